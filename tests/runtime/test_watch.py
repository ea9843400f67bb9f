"""The failure watch with real processes: each ends by itself, and shows the true first error."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from tests.runtime.watch_faults import LIMITS, orphan_output, run_ranks

pytestmark = pytest.mark.timeout(60)


def test_fatal_exception_ends_every_rank_with_the_traceback_on_top(tmp_path: Path) -> None:
    """Every rank exits non-zero, its text begins with the original traceback and names rank, action and unit."""
    for rank, ending in enumerate(run_ranks(["wait", "raise fatal", "wait"], tmp_path)):
        assert ending.exit_code == 1, rank
        assert ending.text.lstrip().startswith("Traceback (most recent call last):"), rank
        assert "rank 1 failed first in 2F5, unit net.blocks.1: ValueError: the user's mistake" in ending.text, rank
        assert f"rank {rank} ends because" in ending.text


def test_void_exception_is_raised_on_every_rank_and_leaves_no_thread(tmp_path: Path) -> None:
    """The failing rank raises its own error, the others one that holds its traceback, and all end in order."""
    for rank, ending in enumerate(run_ranks(["meet void", "raise void", "meet void"], tmp_path)):
        assert ending.exit_code == 0, ending.text
        assert "raised" in ending.text
        assert "the user's mistake" in ending.text
        assert ("Traceback" in ending.text) == (rank != 1)
        assert "watch threads left: []" in ending.text


def test_void_tier_that_gets_stuck_becomes_the_dead_tier(tmp_path: Path) -> None:
    """A rank that never reaches the point where all raise is ended, and still shows the true error."""
    stuck, _ = run_ranks(["wait", "raise void"], tmp_path)
    assert stuck.exit_code == 1
    assert "rank 1 failed first in 2F5, unit net.blocks.1: ValueError" in stuck.text


@pytest.mark.parametrize("victim", [0, 1])
def test_killed_rank_is_named_with_its_action(victim: int, tmp_path: Path) -> None:
    """After SIGKILL to the rank that holds the store, or to another, the survivors name it and its last action."""
    roles = ["wait", "wait", "wait"]
    roles[victim] = "kill self"
    for rank, ending in enumerate(run_ranks(roles, tmp_path)):
        assert ending.exit_code == (-9 if rank == victim else 1)
        assert rank == victim or f"rank {victim} failed first in 2F5, unit net.blocks.1" in ending.text
        assert rank == victim or "is gone" in ending.text


@pytest.mark.parametrize("victim", [0, 1])
def test_stopped_rank_is_named_and_does_not_stay_behind(victim: int, tmp_path: Path) -> None:
    """After SIGSTOP the other ranks name the silent one, leave, and end it, so that it cannot wake up alone."""
    roles = ["wait", "wait", "wait"]
    roles[victim] = "stop self"
    for rank, ending in enumerate(run_ranks(roles, tmp_path)):
        assert ending.exit_code == (-9 if rank == victim else 1)
        assert rank == victim or f"rank {victim} failed first in 2F5" in ending.text
        assert rank == victim or "SIGSTOP" in ending.text


def test_early_exit_is_a_failure_even_with_exit_code_zero(tmp_path: Path) -> None:
    """A rank that leaves without a good-bye ends the others."""
    waiting, left = run_ranks(["wait", "exit early"], tmp_path)
    assert (waiting.exit_code, left.exit_code) == (1, 0)
    assert "rank 1 failed first" in waiting.text


def test_lost_connection_is_not_taken_for_the_cause(tmp_path: Path) -> None:
    """The neighbour of a killed rank reports the killed rank, not the connection error it saw first."""
    neighbour, _ = run_ranks(["lose peer", "kill self"], tmp_path)
    assert neighbour.exit_code == 1
    assert "rank 1 failed first in 2F5" in neighbour.text


def test_lost_connection_without_a_cause_is_reported_itself(tmp_path: Path) -> None:
    """Where nothing better turns up, the connection error ends all ranks."""
    for ending in run_ranks(["lose peer", "wait"], tmp_path):
        assert ending.exit_code == 1
        assert "rank 0 failed first in RECV_F 1F0: waited in vain for another rank; meanwhile rank 1:" in ending.text
        assert "RuntimeError: [pair.cc:547] Connection closed" in ending.text


def test_action_that_never_ends_is_named_with_what_the_others_do(tmp_path: Path) -> None:
    """Past the limit every rank leaves and shows the waiting action and those of the other ranks."""
    for ending in run_ranks(["wait", "wait"], tmp_path, dataclasses.replace(LIMITS, action=0.5)):
        assert ending.exit_code == 1
        assert "failed first in RECV_F 1F0: no end after 0.5 s" in ending.text
        assert "RECV_F 1F0 for" in ending.text


def test_good_bye_is_no_failure_whoever_leaves_first(tmp_path: Path) -> None:
    """Ranks that close their watch may end in any order, the one that holds the store included."""
    for ending in run_ranks(["leave well"] * 3, tmp_path):
        assert ending.exit_code == 0, ending.text
        assert "failed first" not in ending.text


def test_orphan_ends_by_itself_and_says_why() -> None:
    """A process whose parent was killed prints that its parent is gone, and ends."""
    text = orphan_output()
    assert text.startswith("ready")
    assert "its parent process" in text
