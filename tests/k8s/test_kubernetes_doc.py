"""docs/kubernetes.md names values and figures that are so."""

from __future__ import annotations

import re

import pytest
import yaml

from tests.helpers.manifests import CHART, ROOT

TEXT = (ROOT / "docs/kubernetes.md").read_text()
OPERATIONS = (ROOT / "docs/operations.md").read_text()
PARTS = (
    "tls",
    "redis",
    "store",
    "router",
    "index",
    "vllm",
    "monitoring",
    "networkPolicy",
    "user",
    "image",
    "discovery",
)
# Settings of our own file, and keys of a Secret, that the text names beside the chart's values.
SETTINGS = {
    "tls.crt",
    "tls.key",
    "index.resolve_seconds",
    "index.gone_seconds",
    "index.suspect_seconds",
    "index.engines",
    "redis.md",
    "index.capacity_blocks",
    "router.tenant_secret_file",
    "index.kubernetes.relist_seconds",
    "index.kubernetes",
    "index.nodes",
}


def rows(heading: str) -> list[list[str]]:
    """The cells of the first table below a heading."""
    lines = TEXT.split(f"## {heading}\n", 1)[1].splitlines()
    table = []
    for line in lines:
        if line.startswith("|"):
            table.append([cell.strip() for cell in line.strip("|").split("|")])
        elif table:
            break
    return table[2:]


@pytest.mark.parametrize("text", [TEXT, OPERATIONS], ids=["kubernetes", "operations"])
def test_every_value_it_names_exists(text: str) -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    named = (
        set(re.findall(rf"(?<![-/\w\[])(?:{'|'.join(PARTS)})(?:\.[a-zA-Z_]+)+", text)) - SETTINGS
    )
    assert len(named) > 8
    for name in sorted(named):
        at = values
        for word in name.split("."):
            assert word in at, f"there is no value {name}"
            at = at[word]
            if word == "config" or not isinstance(at, dict):
                break


def test_bytes_of_a_token_are_what_the_formula_says() -> None:
    for model, layers, width, size, token, tokens in rows("Size it"):
        heads, _, dim = width.partition(" \u00d7 ")
        values = 2 * int(heads) * int(dim) if dim else int(heads)
        assert int(layers) * values * int(size) == int(token), model
        assert (64 << 30) // int(token) == int(tokens), model


def test_its_ports_are_the_charts() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    ports = {
        *values["store"]["ports"].values(),
        values["index"]["ports"]["grpc"],
        values["router"]["port"],
    }
    named = {int(row[0].split()[0]) for row in rows("Ports and policies")}
    assert named == ports
