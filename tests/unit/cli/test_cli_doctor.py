"""Each check of `emberkv doctor`, with a machine that passes and one that does not."""

from __future__ import annotations

import json
import resource
import shutil
import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from client_sdk.cli import doctor
from client_sdk.cli.doctor import EXTRAS, Verdict
from client_sdk.cli.doctor_vllm import EVENTS_EXAMPLE, EXAMPLE, examine_vllm
from client_sdk.cli.main import run_with
from client_sdk.faults import POINTS

MIB = 1 << 20


@pytest.mark.parametrize(
    ("release", "verdict"),
    [("6.1.0-13-amd64", Verdict.OK), ("5.10.0", Verdict.OK), ("4.19.0", Verdict.FAIL)],
)
def test_an_old_kernel_fails(release: str, verdict: Verdict) -> None:
    assert doctor.check_linux(release).verdict is verdict


def test_a_missing_distribution_names_its_extra() -> None:
    findings = list(doctor.check_extras(lambda name: None if name == "numba" else "1"))
    warned = [f for f in findings if f.verdict is Verdict.WARN]
    assert [f.check for f in warned] == ["extra router"]
    assert "numba" in warned[0].seen
    assert warned[0].fix == "pip install 'emberkv[router]'"


def test_the_extras_name_what_pyproject_declares() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    for extra, names in EXTRAS.items():
        declared = text.partition(f"\n{extra} = [")[2].partition("]\n")[0]
        assert all(name in declared for name in names), extra


def test_block_hashes_are_equal_under_different_hash_seeds() -> None:
    assert doctor.check_hashes().verdict is Verdict.OK


def test_block_hashes_that_differ_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_HASH_PROGRAM", "print(hash('x'))")
    assert doctor.check_hashes().verdict is Verdict.FAIL


def test_too_little_space_fails_with_both_numbers(tmp_path: Path) -> None:
    fits = doctor.check_free_space("dram space", tmp_path / "pool", MIB, "dram.capacity_bytes")
    assert fits.verdict is Verdict.OK
    asked = 1 << 60
    finding = doctor.check_free_space("dram space", tmp_path / "pool", asked, "dram.capacity_bytes")
    assert finding.verdict is Verdict.FAIL
    assert f"{asked // MIB} MiB asked" in finding.seen
    assert "dram.capacity_bytes" in finding.fix


def test_what_segments_take_already_is_not_asked_for_again(tmp_path: Path) -> None:
    (tmp_path / "segment").write_bytes(bytes(4 * MIB))
    assert doctor.held_bytes(tmp_path) >= 4 * MIB
    free = shutil.disk_usage(tmp_path).free
    asked = free + 3 * MIB
    with mock.patch.object(shutil, "disk_usage", return_value=SimpleNamespace(free=free)):
        full = doctor.check_free_space("ssd space", tmp_path, asked, "ssd.capacity_bytes")
        new = doctor.check_free_space("ssd space", tmp_path / "x", asked, "ssd.capacity_bytes")
    assert full.verdict is Verdict.OK
    assert new.verdict is Verdict.FAIL


def test_a_small_memlock_limit_is_a_warning() -> None:
    assert doctor.check_memlock(resource.RLIM_INFINITY, MIB).verdict is Verdict.OK
    assert doctor.check_memlock(8 * MIB, MIB).verdict is Verdict.OK
    assert doctor.check_memlock(MIB, 8 * MIB).verdict is Verdict.WARN


def test_direct_io_is_tried_and_leaves_nothing(tmp_path: Path) -> None:
    finding = doctor.check_direct_io(tmp_path / "ssd", wanted=True)
    assert finding.verdict is Verdict.OK, finding.seen
    assert list(tmp_path.iterdir()) == []
    assert doctor.check_direct_io(tmp_path, wanted=False).verdict is Verdict.WARN


def test_direct_io_on_a_file_system_that_refuses_fails() -> None:
    assert doctor.check_direct_io(Path("/proc"), wanted=True).verdict is Verdict.FAIL


def test_a_socket_path_over_the_kernels_limit_fails(tmp_path: Path) -> None:
    assert doctor.check_socket_path(tmp_path / "d.sock").verdict is Verdict.OK
    finding = doctor.check_socket_path(tmp_path / ("x" * 120))
    assert finding.verdict is Verdict.FAIL
    assert "107" in finding.fix


def test_a_taken_port_is_a_warning_with_its_key() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        finding = doctor.check_port("router.port", port)
    assert finding.verdict is Verdict.WARN
    assert "router.port" in finding.fix
    assert doctor.check_port("router.port", 0).verdict is Verdict.OK


def test_pools_that_nobody_maps_are_listed(tmp_path: Path) -> None:
    assert doctor.check_stale_pools(tmp_path, lambda _: False).verdict is Verdict.OK
    (tmp_path / "emberkv-1-a").write_bytes(b"x")
    (tmp_path / "emberkv-1-b").write_bytes(b"x")
    finding = doctor.check_stale_pools(tmp_path, lambda pool: pool.name.endswith("a"))
    assert finding.verdict is Verdict.WARN
    assert "emberkv-1-b" in finding.fix
    assert "emberkv-1-a" not in finding.fix


def test_a_pool_that_goes_while_it_is_looked_at_is_not_left_over(tmp_path: Path) -> None:
    (tmp_path / "emberkv-1-a").write_bytes(b"x")

    def ends_now(pool: Path) -> bool:
        pool.unlink()
        return False

    assert doctor.check_stale_pools(tmp_path, ends_now).verdict is Verdict.OK


def test_a_config_that_cannot_be_read_is_a_finding_not_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("enigne: {}")
    findings = doctor.examine(path, ())
    config = [finding for finding in findings if finding.check == "config"]
    assert config[0].verdict is Verdict.FAIL
    assert "did you mean 'engine'" in config[0].seen


def test_faults_in_the_environment_are_a_warning_and_wrong_ones_a_failure() -> None:
    assert doctor.check_faults({}).verdict is Verdict.OK
    warned = doctor.check_faults({"EMBERKV_FAULTS": "segment_read=fail@3"})
    assert warned.verdict is Verdict.WARN
    assert "segment_read=fail@3" in warned.seen
    failed = doctor.check_faults({"EMBERKV_FAULTS": "segment_read=explode"})
    assert failed.verdict is Verdict.FAIL
    assert "can be done: delay, drop, exit, fail, pause" in failed.seen


def test_doctor_faults_lists_every_point_with_its_actions_and_sentence(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run_with(["doctor", "faults"]) == 0
    shown = capsys.readouterr().out
    assert run_with(["doctor", "faults", "--json"]) == 0
    listed = {entry["point"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert set(listed) == set(POINTS)
    for name, point in POINTS.items():
        assert name in shown
        assert point.sentence in shown
        assert listed[name]["actions"] == sorted(action.value for action in point.actions)


def test_a_vllm_command_is_checked_flag_by_flag(tmp_path: Path) -> None:
    def verdicts(*command: str) -> dict[str, Verdict]:
        return {finding.check: finding.verdict for finding in examine_vllm(command)}

    good = json.loads(EXAMPLE)
    good["kv_connector_extra_config"] = {"socket_path": str(tmp_path / "none.sock")}
    found = verdicts("vllm", "serve", "m", "--kv-transfer-config", json.dumps(good))
    assert found.pop("store daemon") is Verdict.WARN
    assert found.pop("engine_url") is Verdict.WARN
    assert found.pop("kv-events-config") is Verdict.WARN
    assert set(found.values()) == {Verdict.OK}

    assert verdicts("serve", "m") == {"kv-transfer-config": Verdict.FAIL}
    assert verdicts("--kv-transfer-config={") == {"kv-transfer-config": Verdict.FAIL}
    assert verdicts("--kv_transfer_config=[]") == {"kv-transfer-config": Verdict.FAIL}
    for key in ("kv_connector", "kv_load_failure_policy", "kv_role"):
        bad = json.dumps({**good, key: "other"})
        assert verdicts(f"--kv-transfer-config={bad}")[key] is Verdict.FAIL
    typo = json.dumps({**good, "kv_connector_extra_config": {"socket": "x"}})
    assert verdicts(f"--kv-transfer-config={typo}")["extra config"] is Verdict.FAIL
    split = verdicts("--kv-transfer-config", json.dumps(good), "--decode-context-parallel-size=2")
    assert split["decode-context-parallel-size"] is Verdict.WARN


@pytest.mark.parametrize(
    ("extra", "flags", "verdict"),
    [
        ({}, [], Verdict.OK),
        ({}, ["--block-size=16"], Verdict.OK),
        ({"block_tokens": 256}, ["--block-size", "128"], Verdict.OK),
        ({"block_tokens": 256}, [], Verdict.WARN),
        ({"block_tokens": 100}, ["--block-size=16"], Verdict.FAIL),
        ({"block_tokens": 16}, ["--block-size=0x10"], Verdict.FAIL),
        ({"block_tokens": 16}, ["--block-size=0"], Verdict.FAIL),
    ],
)
def test_a_vllm_commands_block_sizes_are_checked(
    tmp_path: Path, extra: dict[str, Any], flags: list[str], verdict: Verdict
) -> None:
    transfer = json.loads(EXAMPLE)
    transfer["kv_connector_extra_config"] = {"socket_path": str(tmp_path / "none.sock"), **extra}
    command = ["--kv-transfer-config", json.dumps(transfer), *flags]
    found = {finding.check: finding.verdict for finding in examine_vllm(command)}
    assert found["block_tokens"] is verdict


def test_a_vllm_commands_own_cache_is_checked(tmp_path: Path) -> None:
    transfer = json.loads(EXAMPLE)
    transfer["kv_connector_extra_config"] = {"socket_path": str(tmp_path / "none.sock")}
    command = ["--kv-transfer-config", json.dumps(transfer)]
    found = {f.check: f for f in examine_vllm([*command, "--prefix-caching-hash-algo=sha256_cbor"])}
    assert found["prefix-caching-hash-algo"].seen.startswith("sha256_cbor: any will do")
    assert "prefix caching" not in found
    found = {f.check: f for f in examine_vllm([*command, "--no-enable-prefix-caching"])}
    assert found["prefix caching"].verdict is Verdict.WARN


@pytest.mark.parametrize(
    ("events", "verdict"),
    [
        ("{}", Verdict.WARN),
        ("[]", Verdict.FAIL),
        ("{", Verdict.FAIL),
        ('{"enable_kv_cache_events": true}', Verdict.WARN),
        ('{"enable_kv_cache_events": true, "endpoint": "tcp://collector:1"}', Verdict.WARN),
        (EVENTS_EXAMPLE, Verdict.OK),
    ],
)
def test_a_vllm_commands_events_are_checked(tmp_path: Path, events: str, verdict: Verdict) -> None:
    transfer = json.loads(EXAMPLE)
    transfer["kv_connector_extra_config"] = {
        "socket_path": str(tmp_path / "none.sock"),
        "engine_url": "http://10.0.0.5:8000",
    }
    command = ["--kv-transfer-config", json.dumps(transfer), "--kv-events-config", events]
    found = {finding.check: finding for finding in examine_vllm(command)}["kv-events-config"]
    assert found.verdict is verdict
    if verdict is Verdict.OK:
        assert found.seen == "tcp://10.0.0.5:5557, replays tcp://10.0.0.5:5657"
