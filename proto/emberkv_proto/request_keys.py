"""What of a request beside its tokens is in its block hashes, in the bytes all producers agree on.

An engine's connector starts from the request, the index from the engine's events; both build their
keys here, so that the same block gets the same hash on either way.
"""

from __future__ import annotations

from emberkv_proto.hashing import ExtraKey, lora_key, multimodal_key


def salt_bytes(salt: str | None) -> bytes:
    """A request's cache salt as `chain_root` takes it; nothing without one."""
    return salt.encode("utf-8", "surrogatepass") if salt else b""


def adapter_key(name: str, weights_id: str) -> ExtraKey:
    """Belongs to every block of a request that uses the adapter."""
    return lora_key(name, weights_id)


def media_key(identifier: str, offset_tokens: int) -> ExtraKey:
    """An image or sound by the engine's name for its content.

    `offset_tokens` counts from the first token of our block; negative when it began earlier.
    """
    return multimodal_key(identifier.encode("utf-8", "surrogatepass"), offset_tokens)
