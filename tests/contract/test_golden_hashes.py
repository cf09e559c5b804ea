"""Block hashes of record. Every producer of hashes is held to this file."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import blake3
import pytest

from tests.helpers.golden_hashes import BLOCK_TOKENS, CASES, GOLDEN_FILE, TOKENS, compute

GOLDEN = json.loads(GOLDEN_FILE.read_text(encoding="ascii"))


@pytest.mark.parametrize("name", CASES)
def test_hashes_are_those_of_record(name: str) -> None:
    assert compute()[name] == GOLDEN[name]


def test_the_file_has_no_case_that_nobody_checks_and_no_equal_hashes() -> None:
    assert set(GOLDEN) == set(CASES)
    chains = {name: tuple(case["hashes"]) for name, case in GOLDEN.items()}
    assert chains.pop("group_full") == chains["plain"]
    roots = [chain[0] for name, chain in chains.items() if name != "image"]
    assert len(set(roots)) == len(roots)
    # The image is in block 1: block 0 is shared with the plain chain, what follows is not.
    assert chains["image"][0] == chains["plain"][0]
    assert not set(chains["image"][1:]) & set(chains["plain"][1:])


def test_plain_chain_follows_from_the_definition_alone() -> None:
    """Written out by hand, with nothing of ours but the namespace id."""
    namespace_id = bytes.fromhex(GOLDEN["plain"]["namespace_id"])
    previous = blake3.blake3(namespace_id + bytes(4)).digest()
    for number, expected in enumerate(GOLDEN["plain"]["hashes"]):
        tokens = TOKENS[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]
        packed = b"".join(token.to_bytes(4, "little") for token in tokens)
        previous = blake3.blake3(previous + packed).digest()
        assert previous.hex() == expected
    assert len(GOLDEN["plain"]["hashes"]) == len(TOKENS) // BLOCK_TOKENS


@pytest.mark.process
def test_processes_with_different_hash_seeds_build_equal_hashes() -> None:
    program = (
        "import json, sys; from tests.helpers.golden_hashes import compute;"
        " json.dump(compute(), sys.stdout)"
    )
    root = Path(__file__).parent.parent.parent
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            cwd=root,
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            timeout=90,
            check=True,
        ).stdout
        for seed in ("1", "4242")
    ]
    assert json.loads(outputs[0]) == json.loads(outputs[1]) == GOLDEN
