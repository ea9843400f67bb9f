"""What the judge of the failure watch concludes from given signs of life; time is an argument, nothing waits."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from d9d_lightning.runtime.watch import FailureWatch
from d9d_lightning.runtime.watch_judge import LocalState, WatchJudge, WatchLimits
from d9d_lightning.runtime.watch_process import ProcessIdentity, ProcessState
from d9d_lightning.runtime.watch_report import FailureReport, looks_like_lost_peer
from d9d_lightning.runtime.watch_store import Beat

LIMITS = WatchLimits(action=100.0, silence=60.0, void_grace=6.0, store_grace=3.0)
ELSEWHERE = ProcessIdentity("another host", 1, 1)


def make_beat(number: int, *, closed: bool = False) -> Beat:
    return Beat(number, "1F0", 2.0, closed, 0, ELSEWHERE)


def make_judge(beats: dict[int, Beat]) -> tuple[WatchJudge, Any, LocalState]:
    exchange = SimpleNamespace(
        beats=beats, first=None, error=None, error_at=0.0, stuck_since=None, refresh=lambda seconds: True
    )
    local = LocalState()
    return WatchJudge(1, LIMITS, exchange, local), exchange, local


def test_silent_rank_of_another_host_is_named() -> None:
    """A rank whose heartbeat does not move for longer than the limit is declared lost, and not before."""
    judge, _, _ = make_judge({0: make_beat(1), 2: make_beat(1)})
    assert judge.verdict(1000.0) is None
    assert judge.verdict(1060.0) is None
    report = judge.verdict(1061.0)
    assert report is not None
    assert (report.rank, report.where, report.found_by, report.fatal) == (0, "1F0", 1, True)


def test_heartbeat_that_moves_keeps_a_rank_alive() -> None:
    """Each new heartbeat starts the wait anew."""
    judge, exchange, _ = make_judge({0: make_beat(1)})
    assert judge.verdict(1000.0) is None
    exchange.beats[0] = make_beat(2)
    assert judge.verdict(1050.0) is None
    assert judge.verdict(1109.0) is None


def test_process_that_stood_still_itself_blames_nobody() -> None:
    """After a pause of this process, such as a stopped job, all waiting starts anew."""
    judge, _, local = make_judge({0: make_beat(1)})
    local.action = ("2F5", 1000.0)
    assert judge.verdict(1000.0) is None
    judge.forgive(5000.0)
    assert judge.verdict(5059.0) is None
    assert judge.verdict(5061.0) is not None


def test_rank_that_said_good_bye_may_be_silent() -> None:
    """Neither silence nor a vanished store counts after the rank that holds it has said good-bye."""
    judge, exchange, _ = make_judge({0: make_beat(1, closed=True)})
    exchange.error = RuntimeError("connection reset")
    assert judge.verdict(1000.0) is None
    assert judge.verdict(9000.0) is None


def test_lost_store_is_blamed_on_its_holder_after_a_grace() -> None:
    """A store that cannot be reached ends the run, once this rank had time to end by itself."""
    judge, exchange, _ = make_judge({0: make_beat(1)})
    exchange.error, exchange.error_at = RuntimeError("connection reset\nframe 1"), 1000.0
    assert judge.verdict(1002.0) is None
    report = judge.verdict(1004.0)
    assert report is not None
    assert report.rank == 0
    assert report.message.endswith("RuntimeError: connection reset")


def test_store_that_does_not_answer_is_noticed() -> None:
    """A store call that never returns counts as a lost store, and the silence of the others is not blamed on them."""
    judge, exchange, _ = make_judge({0: make_beat(1), 2: make_beat(1)})
    assert judge.verdict(1000.0) is None
    exchange.stuck_since = 1000.0
    report = judge.verdict(1061.0)
    assert report is not None
    assert "has not answered for 61 s" in report.message


def test_void_error_waits_while_the_rank_makes_progress() -> None:
    """A published error of the void tier becomes deadly only when this rank stands still without raising it."""
    judge, exchange, local = make_judge({})
    exchange.first = FailureReport(0, "1F0", "ValueError: no")
    assert judge.verdict(1000.0) is None
    local.progress = 1
    assert judge.verdict(1005.0) is None
    assert judge.verdict(1010.0) is None
    assert judge.verdict(1012.0) is exchange.first
    local.handled = True
    assert judge.verdict(1012.0) is None


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"), True),
        (ConnectionResetError("Connection reset by peer"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("broken pipe in the user's own words"), False),
    ],
)
def test_lost_peer_errors_are_told_from_real_ones(error: Exception, lost: bool) -> None:
    """Only what the communication library says about a vanished peer is held back."""
    assert looks_like_lost_peer(error) is lost


def test_report_survives_the_store() -> None:
    """A report is the same after it was written and read, and its text begins with the original traceback."""
    try:
        raise KeyError("schlüssel")
    except KeyError as error:
        report = FailureReport.from_error(error, 2, "3F5, unit net", fatal=False)
    assert FailureReport.from_bytes(report.to_bytes()) == report
    assert report.render().startswith("Traceback")
    assert report.render().endswith("rank 2 failed first in 3F5, unit net: KeyError: 'schlüssel'")


def test_error_of_an_earlier_run_is_not_taken_for_a_new_one() -> None:
    """On the same store, a run with the next number starts clean."""
    dist = pytest.importorskip("torch.distributed")
    store = dist.HashStore()
    for run in (0, 1):
        watch = FailureWatch(store, 0, 1, run=run)
        watch.start()
        watch.raise_if_published(wait_s=5.0)
        watch.publish(ValueError(f"run {run}"))
        with pytest.raises(ValueError, match=f"run {run}"):
            watch.raise_if_published()
        watch.close()


def test_own_process_is_seen_running() -> None:
    """The identity of the calling process is visible on its own host, and that of a later process is not confused."""
    identity = ProcessIdentity.of_this_process()
    assert identity.state() in (ProcessState.RUNNING, ProcessState.UNKNOWN)
    assert ELSEWHERE.state() is ProcessState.UNKNOWN
    if identity.host:
        reused = ProcessIdentity(identity.host, identity.pid, identity.started - 1)
        assert reused.state() is ProcessState.GONE
