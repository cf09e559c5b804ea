"""The inputs of the golden block hashes; `python -m tests.helpers.golden_hashes` writes the file.

Regenerate only with a change that is meant to make every stored block unreachable: these hashes
are part of what is on disk, and of every producer (SDK, router, engine connectors).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from emberkv_proto.hashing import ExtraKey, block_hashes, lora_key, multimodal_key
from emberkv_proto.layout import Group, GroupKind, KvLayout, Namespace

GOLDEN_FILE = Path(__file__).parent.parent / "data" / "golden_hashes.json"
BLOCK_TOKENS = 16
TOKENS = [(7 * i * i + 3 * i) % 50000 for i in range(3 * BLOCK_TOKENS + 5)]
LORA = lora_key("support-bot", "sha256:0123")
IMAGE = multimodal_key(bytes(range(32)), -3)
SALT = b"tenant-a"


@dataclass(frozen=True, slots=True)
class Case:
    kind: GroupKind = GroupKind.FULL
    salt: bytes = b""
    extra_keys: dict[int, tuple[ExtraKey, ...]] | tuple[ExtraKey, ...] = ()


CASES = {
    "plain": Case(),
    "salt": Case(salt=SALT),
    "lora": Case(extra_keys=(LORA,)),
    "image": Case(extra_keys={1: (IMAGE,)}),
    "lora_and_salt": Case(salt=SALT, extra_keys=(LORA,)),
    **{f"group_{kind.value}": Case(kind=kind) for kind in GroupKind},
}


def namespace_of(kind: GroupKind) -> Namespace:
    layout = KvLayout(dtype="bfloat16", layers=4, kv_heads=2, head_dim=64)
    windowed = kind in (GroupKind.SLIDING_WINDOW, GroupKind.CHUNKED_LOCAL)
    return Namespace(
        model="example/model",
        weights_id="rev-1",
        kv_dtype="bfloat16",
        layout_fingerprint=layout.fingerprint,
        block_tokens=BLOCK_TOKENS,
        groups=(Group(kind, 4, 32768, window_tokens=128 if windowed else 0),),
    )


def compute() -> dict[str, dict[str, object]]:
    """Case name -> namespace id and block hashes, as hex."""
    return {
        name: {
            "namespace_id": namespace_of(case.kind).id.hex(),
            "hashes": [
                block_hash.hex()
                for block_hash in block_hashes(
                    namespace_of(case.kind).id,
                    TOKENS,
                    BLOCK_TOKENS,
                    salt=case.salt,
                    extra_keys=case.extra_keys,
                )
            ],
        }
        for name, case in CASES.items()
    }


if __name__ == "__main__":
    GOLDEN_FILE.write_text(json.dumps(compute(), indent=1) + "\n", encoding="ascii")
