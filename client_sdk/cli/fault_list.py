"""The points at which faults can be made, for operators who test their own deployment."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from client_sdk.faults import FORM, POINTS, VARIABLE


def print_faults(console: Console) -> None:
    table = Table(box=None, pad_edge=False)
    for title in ("point", "actions", "what stands there"):
        table.add_column(title, no_wrap=title != "what stands there")
    for point in POINTS.values():
        actions = " ".join(sorted(action.value for action in point.actions))
        table.add_row(point.name, actions, point.sentence)
    console.print(table)
    console.print(
        f"\n{VARIABLE} is a comma-separated list of {FORM}, and at most one seed=N.", markup=False
    )
    console.print("Hits count from 1; @3 is the third only, @3+ all from there. As in:")
    console.print(
        f"  {VARIABLE}=segment_write=fail:ENOSPC@3,before_ack=exit@10,seed=7", markup=False
    )


def faults_json() -> list[dict[str, object]]:
    return [
        {
            "point": point.name,
            "actions": sorted(action.value for action in point.actions),
            "sentence": point.sentence,
        }
        for point in POINTS.values()
    ]
