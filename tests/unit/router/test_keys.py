"""Keys at rest, and what a tenant's budget lets through."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emberkv_proto.errors import ConfigError, InvalidRequestError
from router.keys import (
    KeyFile,
    KeyRing,
    TenantLimits,
    edit_keys,
    make_key,
    read_keys,
    write_keys,
)
from router.tenant_budget import Bucket, TenantBudget


def test_a_key_finds_its_tenant_and_nothing_near_it_does() -> None:
    one, two = make_key("acme", "now"), make_key("other", "now")
    ring = KeyRing(KeyFile().with_key(one.stored, None).with_key(two.stored, None))
    right = one.text.encode()
    assert ring.tenant_of(right) == "acme"
    assert ring.tenant_of(two.text.encode()) == "other"
    mixed = one.text[:20].encode() + two.text[20:].encode()  # this id, that secret
    for wrong in (b"", b"ek", b"ek-", right[:-1], right + b"x", right.upper(), mixed, b"x" * 9999):
        assert ring.tenant_of(wrong) is None
    revoked = KeyRing(ring.file.without_key(one.stored.key_id, "later"))
    assert revoked.tenant_of(right) is None
    assert revoked.tenant_of(two.text.encode()) == "other"


@given(st.binary(max_size=300))
def test_no_bytes_are_a_key_by_chance_and_none_raise(text: bytes) -> None:
    ring = KeyRing(KeyFile().with_key(make_key("acme", "now").stored, None))
    assert ring.tenant_of(text) is None
    assert ring.tenant_of(b"ek-" + text) is None


def test_the_secret_is_nowhere_in_the_file(tmp_path: Path) -> None:
    path, key = tmp_path / "keys.json", make_key("acme", "now")
    edit_keys(path, lambda file: file.with_key(key.stored, TenantLimits(requests_per_minute=3)))
    content = path.read_text()
    assert key.text.rsplit("-", 1)[0] not in content
    assert key.text[20:] not in content
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert KeyRing(read_keys(path)).tenant_of(key.text.encode()) == "acme"
    assert read_keys(path).tenants["acme"].requests_per_minute == 3
    assert list(tmp_path.iterdir()) == [path]


def test_equal_secrets_look_different_at_rest() -> None:
    assert make_key("a", "now").stored.salt != make_key("a", "now").stored.salt


def test_a_change_that_is_refused_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    edit_keys(path, lambda file: file.with_key(make_key("acme", "now").stored, None))
    before = path.read_bytes()
    with pytest.raises(InvalidRequestError, match="no key"):
        edit_keys(path, lambda file: file.without_key("0" * 16, "now"))
    assert path.read_bytes() == before
    for name in ("", "a b", "x" * 65, "../up", "ä"):
        with pytest.raises(InvalidRequestError, match="tenant"):
            make_key(name, "now")


@pytest.mark.parametrize(
    "content", ["", "[]", '{"version": 2}', '{"keys": [{}]}', '{"else": 1}', "{"]
)
def test_a_file_that_is_none_is_refused_without_showing_it(tmp_path: Path, content: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(content)
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"router\.key_file"):
        read_keys(path)


def test_what_a_process_of_the_same_id_left_behind_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    (tmp_path / f"keys.json.{os.getpid()}").write_text("half a file")
    write_keys(path, KeyFile())
    assert read_keys(path) == KeyFile()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_others_may_write_and_one_that_is_away_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(path)
    write_keys(path, KeyFile())
    path.chmod(0o622)
    with pytest.raises(ConfigError, match="written by others"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_keys(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="no file"):
        read_keys(tmp_path / "pipe")
    key = make_key("a", "now").stored
    path.chmod(0o600)
    path.write_text(KeyFile(keys=(key, key)).model_dump_json())
    with pytest.raises(ConfigError, match="twice"):
        read_keys(path)


def test_requests_of_a_minute_are_given_back_evenly() -> None:
    budget = TenantBudget(TenantLimits(requests_per_minute=6), 0.0)
    for _ in range(6):
        assert budget.enter(0.0) is None
    refused = budget.enter(0.0)
    assert refused is not None
    assert refused.seconds == pytest.approx(10.0)
    assert budget.enter(9.9) is not None
    assert budget.enter(10.1) is None
    budget.check_integrity()


def test_tokens_go_into_debt_and_a_prompt_beyond_a_minutes_worth_runs_when_it_is_full() -> None:
    budget = TenantBudget(TenantLimits(tokens_per_minute=600), 0.0)
    assert budget.spend_prompt(5000, 0.0) is None
    refused = budget.spend_prompt(1, 0.0)
    assert refused is not None
    assert refused.seconds == pytest.approx(440.1, abs=0.1)
    assert budget.spend_prompt(1, 441.0) is None
    budget.spend_answer(100, 441.0)
    refused = budget.spend_prompt(1, 441.0)
    assert refused is not None


def test_requests_at_once_are_counted_in_and_out() -> None:
    budget = TenantBudget(TenantLimits(concurrent_requests=2), 0.0)
    assert budget.enter(0.0) is None
    assert budget.enter(0.0) is None
    assert budget.enter(0.0) is not None
    budget.leave()
    assert budget.enter(0.0) is None
    budget.check_integrity()


def test_a_changed_limit_keeps_what_was_used() -> None:
    budget = TenantBudget(TenantLimits(requests_per_minute=10), 0.0)
    for _ in range(8):
        budget.enter(0.0)
    budget.change(TenantLimits(requests_per_minute=20), 0.0)
    assert sum(budget.enter(0.0) is None for _ in range(50)) == 12
    budget.change(TenantLimits(), 0.0)
    assert budget.enter(0.0) is None
    budget.check_integrity()


def test_a_smaller_limit_shuts_nobody_out_for_what_the_larger_one_allowed() -> None:
    budget = TenantBudget(TenantLimits(requests_per_minute=1000), 0.0)
    for _ in range(500):
        assert budget.enter(0.0) is None
    budget.change(TenantLimits(requests_per_minute=10), 0.0)
    assert sum(budget.enter(0.0) is None for _ in range(50)) == 5
    assert budget.enter(6.1) is None
    budget.check_integrity()


def test_no_sequence_gets_more_than_a_bucket_and_its_refill() -> None:
    rng = Random(2)
    for _ in range(200):
        per_minute, now, taken = rng.randint(1, 500), 0.0, 0
        bucket = Bucket(per_minute, now)
        for _ in range(100):
            now += rng.expovariate(1.0)
            cost = rng.randint(1, per_minute)
            if bucket.seconds_until(cost, now) == 0:
                bucket.take(cost, now)
                taken += cost
            bucket.check_integrity()
        assert taken <= per_minute + now * per_minute / 60 + 1e-6
