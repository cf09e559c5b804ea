"""The text of EMBERKV_FAULTS, and what each action does at its point."""

from __future__ import annotations

import errno
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from client_sdk import faults
from client_sdk.faults import POINTS, Action, Faults
from emberkv_proto.errors import ConfigError, UnavailableError
from tests.helpers.faults import making


def outcomes(point: faults.Point, hits: int) -> str:
    """One letter a hit: . went on, d dropped, f failed."""
    return "".join(outcome(point) for _ in range(hits))


def outcome(point: faults.Point) -> str:
    try:
        return "." if faults.hit(point) else "d"
    except OSError:
        return "f"


def test_nothing_happens_unless_faults_are_armed() -> None:
    assert all(faults.hit(point) for point in POINTS.values())
    assert not faults.is_armed(faults.SEGMENT_READ)
    assert faults.acted() == {}


@pytest.mark.parametrize("text", ["", "  ", None])
def test_a_server_without_the_variable_arms_nothing(text: str | None) -> None:
    faults.arm_from({} if text is None else {faults.VARIABLE: text})
    assert not any(faults.is_armed(point) for point in POINTS.values())


@pytest.mark.parametrize(
    ("entry", "seen"),
    [
        ("segment_write=fail", "ffffff"),
        ("segment_write=fail@3", "..f..."),
        ("segment_write=fail@3+", "..ffff"),
        ("segment_write=fail@2+*2", ".ff..."),
        ("segment_write=drop*1", "d....."),
        ("segment_write=drop@1,segment_write=fail@4", "d..f.."),
        ("segment_write=fail@2,segment_write=drop", "dfdddd"),
        ("segment_read=fail", "......"),
    ],
)
def test_an_entry_says_at_which_hits_it_acts(entry: str, seen: str) -> None:
    with making(entry):
        assert outcomes(faults.SEGMENT_WRITE, 6) == seen


def test_a_failure_of_io_carries_its_errno_and_another_is_unavailable() -> None:
    with making("segment_write=fail:ENOSPC,rocks_write=fail,before_ack=fail"):
        with pytest.raises(OSError, match="fault segment_write") as full:
            faults.hit(faults.SEGMENT_WRITE)
        assert full.value.errno == errno.ENOSPC
        with pytest.raises(OSError, match="fault rocks_write") as failed:
            faults.hit(faults.ROCKS_WRITE)
        assert failed.value.errno == errno.EIO
        with pytest.raises(UnavailableError, match="fault before_ack"):
            faults.hit(faults.BEFORE_ACK)
        assert faults.acted() == {"segment_write": 1, "rocks_write": 1, "before_ack": 1}


def test_chance_is_the_seeds() -> None:
    def run(seed: int) -> str:
        with making(f"segment_write=drop%0.3,seed={seed}"):
            return outcomes(faults.SEGMENT_WRITE, 200)

    assert run(1) == run(1) != run(2)
    assert 30 < run(1).count("d") < 90


def test_a_delay_holds_only_the_thread_that_got_there() -> None:
    with making("peer_read=delay:0.2"):
        begin = time.monotonic()
        late = threading.Thread(target=faults.hit, args=(faults.PEER_READ,))
        late.start()
        faults.hit(faults.MID_TRANSFER)
        assert late.is_alive()
        late.join()
        assert time.monotonic() - begin >= 0.2


def test_threads_share_the_count_of_hits() -> None:
    with making("segment_read=drop@100+*50") as armed, ThreadPoolExecutor(4) as pool:
        seen = "".join(pool.map(lambda _: outcomes(faults.SEGMENT_READ, 50), range(8)))
        assert (seen.count("d"), armed.hits["segment_read"]) == (50, 400)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("segmnt_write=fail", "unknown point 'segmnt_write'; known: before_ack, before_commit"),
        ("segment_write", "is not point=action"),
        ("segment_write=fail:ENOSPC:2", "is not point=action"),
        ("segment_write=explode", "can be done: delay, drop, exit, fail, pause"),
        ("evict=fail", "at evict can be done: delay, exit, pause"),
        ("before_ack=drop", "at before_ack can be done"),
        ("segment_write=fail:EWRONG", "EWRONG is no errno"),
        ("segment_write=fail:errorcode", "errorcode is no errno"),
        ("before_ack=fail:ENOSPC", "fail takes no argument here"),
        ("segment_write=exit:3", "exit takes no argument here"),
        ("peer_read=delay", "say how many seconds"),
        ("peer_read=delay:-1", "is not point=action"),
        ("peer_read=delay:nan", "0 to 3600 seconds"),
        ("peer_read=delay:9999999", "0 to 3600 seconds"),
        ("segment_write=drop@0", "never happens"),
        ("segment_write=drop%0", "never happens"),
        ("segment_write=drop%1.1.1", "the chance is a number"),
        ("segment_write=drop*0", "never happens"),
        ("seed=x", "the seed is a number"),
    ],
)
def test_a_text_that_is_wrong_is_refused_with_what_would_be_right(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        faults.arm_from({faults.VARIABLE: f"rocks_write=drop,{text}"})
    assert words in str(refusal.value)
    assert faults.VARIABLE in str(refusal.value)
    assert not faults.is_armed(faults.ROCKS_WRITE)


def test_every_point_and_action_can_be_written_down() -> None:
    arguments = {Action.DELAY: ":0"}
    for point in POINTS.values():
        assert point.sentence.endswith(".")
        for action in point.actions:
            entry = f"{point.name}={action.value}{arguments.get(action, '')}"
            (fault,) = Faults.parse(entry).entries[point.name]
            assert (fault.point, fault.action) == (point, action)


def test_arming_says_so_loudly(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), making("evict=delay:0"):
        faults.hit(faults.EVICT)
    assert "FAULTS ARE MADE ON PURPOSE" in caplog.text
    assert "fault: evict=delay at hit 1" in caplog.text


CHILD = """
import sys
from client_sdk import faults
faults.arm(sys.argv[1])
faults.hit(faults.BEFORE_ACK)
print("went on", flush=True)
"""


@pytest.mark.process
def test_exit_is_kill_9_and_pause_lasts_until_sigcont() -> None:
    def child(text: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHILD, text]
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )

    with child("before_ack=exit") as killed:
        assert killed.communicate(timeout=90)[0] == ""
        assert killed.returncode == -signal.SIGKILL
    with child("before_ack=pause") as paused:
        pid, status = os.waitpid(paused.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        os.kill(pid, signal.SIGCONT)
        assert paused.communicate(timeout=90)[0] == "went on\n"
        assert paused.returncode == 0
