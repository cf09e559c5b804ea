"""What makes two vLLM engines' blocks the same, without a vLLM."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from client_sdk.engine.vllm_connector.chains import RequestChain, UncacheableRequestError
from client_sdk.engine.vllm_connector.identity import weights_id
from client_sdk.engine.vllm_connector.settings import ConnectorSettings
from client_sdk.engine.weights import UnsupportedEngineError, directory_id
from emberkv_proto.errors import ConfigError
from emberkv_proto.hashing import block_hashes, lora_key, multimodal_key
from emberkv_proto.types import NamespaceId

NAMESPACE = NamespaceId(bytes(range(16)))
TOKENS = list(range(100, 180))


def request(**fields: Any) -> Any:
    plain = {
        "prompt_token_ids": TOKENS,
        "prompt_embeds": None,
        "cache_salt": None,
        "lora_request": None,
        "mm_features": [],
    }
    return SimpleNamespace(**{**plain, **fields})


def checkpoint(directory: Path) -> Path:
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    (directory / "config.json").write_text("{}")
    return directory


def test_a_chain_that_grows_is_the_chain_of_all_its_tokens() -> None:
    chain = RequestChain(request(cache_salt="s"), NAMESPACE, 16)
    for length in (0, 15, 16, 40, 41, 80):
        wanted = block_hashes(NAMESPACE, TOKENS[:length], 16, salt=b"s")
        assert chain.grow(TOKENS[:length]) == wanted
    assert len(chain.hashes) == 5


def test_an_image_is_in_every_block_it_touches_and_in_no_other() -> None:
    place = SimpleNamespace(offset=20, length=20)
    picture = SimpleNamespace(identifier="d1" * 32, mm_position=place)
    keys = {n: [multimodal_key(b"d1" * 32, 20 - 16 * n)] for n in (1, 2)}
    chain = RequestChain(request(mm_features=[picture]), NAMESPACE, 16)
    chain.grow(TOKENS[:16])
    assert chain.grow(TOKENS) == block_hashes(NAMESPACE, TOKENS, 16, extra_keys=keys)


def test_an_adapter_is_known_by_name_path_and_weights(tmp_path: Path) -> None:
    adapter = checkpoint(tmp_path / "adapter")
    lora = SimpleNamespace(lora_name="a", lora_path=str(adapter))

    def hashes() -> list[bytes]:
        return list(RequestChain(request(lora_request=lora), NAMESPACE, 16).grow(TOKENS))

    before = hashes()
    key = lora_key("a", f"{adapter}\0{directory_id(adapter)}")
    assert before == block_hashes(NAMESPACE, TOKENS, 16, extra_keys=[key])
    (adapter / "model.safetensors").write_bytes(b"WEIGHTS")
    assert not set(before) & set(hashes())


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt_embeds": object()},
        {"prompt_token_ids": None},
        {"resumable": True},
        {"lora_request": SimpleNamespace(lora_name="a", lora_path="hub/name")},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_what_has_no_key_is_not_cached(fields: dict[str, Any]) -> None:
    with pytest.raises(UncacheableRequestError):
        RequestChain(request(**fields), NAMESPACE, 16)


def test_other_weights_under_the_same_name_are_others(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "m")
    first = directory_id(path)
    assert directory_id(path) == first
    about = (path / "model.safetensors").stat()
    os.utime(path / "model.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns + 1))
    second = directory_id(path)
    (path / "config.json").write_text('{"rope_theta": 1}')
    assert len({first, second, directory_id(path)}) == 3


def test_weights_are_named_by_the_hub_commit_or_by_nothing(tmp_path: Path) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    (tmp_path / "snapshots").mkdir()
    local = checkpoint(tmp_path / "snapshots" / commit)
    assert weights_id(SimpleNamespace(model=str(local), revision=None)) == commit
    assert weights_id(SimpleNamespace(model="org/name", revision=commit)) == commit
    with pytest.raises(UnsupportedEngineError, match="weights_id"):
        weights_id(SimpleNamespace(model="org/name", revision="main"))


def test_settings_name_the_key_that_is_wrong() -> None:
    assert ConnectorSettings.of({"load_seconds": 1}).load_seconds == 1
    with pytest.raises(ConfigError, match="did you mean socket_path"):
        ConnectorSettings.of({"socket_pat": "/x"})
    with pytest.raises(ConfigError, match="timeout_seconds must be float or int"):
        ConnectorSettings.of({"timeout_seconds": True})
    assert ConnectorSettings.of({"role": "prefill"}).role == "prefill"
    with pytest.raises(ConfigError, match="role 'prefil' is none of both, prefill, decode"):
        ConnectorSettings.of({"role": "prefil"})
    with pytest.raises(ConfigError, match="load_async must be bool"):
        ConnectorSettings.of({"load_async": 1})
