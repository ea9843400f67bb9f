"""Decides from signs of life whether the run is lost. Reads plain attributes only: it can never block."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from d9d_lightning.runtime.watch_process import ProcessState
from d9d_lightning.runtime.watch_report import FailureReport
from d9d_lightning.runtime.watch_store import Beat, StoreExchange

__all__ = ["LocalState", "WatchJudge", "WatchLimits"]

_STORE_RANK = 0


@dataclass(frozen=True, slots=True)
class WatchLimits:
    """How long the watch waits for what, in seconds.

    Attributes:
        action: One action of this rank (a computation or a wait) before it counts as hung.
        silence: A rank without heartbeat. Generous on purpose: the beats come from a Python thread, which stands still
            while a long call keeps Python's lock. On one host, processor time also counts as a sign of life.
        stopped: A rank of this host that was stopped by a signal (SIGSTOP).
        void_grace: After an error was published, without progress, before the void tier is given up.
        lost_peer_grace: After a lost connection, for the cause to show itself.
        store_grace: After the store is gone, for this rank to end by itself (a run that is over anyway).
        linger: For the other processes to leave before the one that holds the store does.
        good_bye: For the other ranks to read a good-bye.
        poll: Between two looks.
        beat: Between two heartbeats.
    """

    action: float = 600.0
    silence: float = 60.0
    stopped: float = 5.0
    void_grace: float = 6.0
    lost_peer_grace: float = 2.0
    store_grace: float = 3.0
    linger: float = 1.5
    good_bye: float = 10.0
    poll: float = 0.2
    beat: float = 1.0


@dataclass(slots=True)
class LocalState:
    """What the main thread tells the watch; written without locks, one attribute at a time.

    Attributes:
        action: The action under way and when it began; None between actions.
        idle: Anything whose text tells what the process does between actions.
        progress: Number of actions finished.
        handled: An error of the run was raised in this process.
        suspicion: An error that only says that a peer is gone, and when it was seen.
        parent: Process that this one must not outlive; None where there is no such.
    """

    action: tuple[object, float] | None = None
    idle: object = ""
    progress: int = 0
    handled: bool = False
    suspicion: tuple[FailureReport, float] | None = None
    parent: int | None = None

    def describe_action(self) -> tuple[str, float]:
        """The action as text, and its age in seconds."""
        action = self.action
        return (str(action[0]), time.monotonic() - action[1]) if action is not None else ("", 0.0)

    def describe_for_others(self) -> tuple[str, float]:
        """The same for a heartbeat: between actions, what else the process does."""
        return (str(self.idle), 0.0) if self.action is None else self.describe_action()


class WatchJudge:
    """Gives a verdict at every poll: None, or the failure that this process must leave for."""

    def __init__(self, rank: int, limits: WatchLimits, exchange: StoreExchange, local: LocalState) -> None:
        self._rank, self._limits, self._exchange, self._local = rank, limits, exchange, local
        self._resumed_at = 0.0
        self._stopped_since: dict[int, float] = {}
        self._signs_of_life: dict[int, tuple[tuple[int, int], float]] = {}
        self._void: tuple[int, float] | None = None

    def forgive(self, now: float) -> None:
        """Start all waiting anew: this process itself stood still, so it could not have heard anything."""
        self._resumed_at = now

    def verdict(self, now: float) -> FailureReport | None:
        """The failure this process must leave for, the most telling first; None while all is well."""
        checks: tuple[Callable[[float], FailureReport | None], ...] = (
            self._check_published,
            self._check_peers,
            self._check_suspicion,
            self._check_store,
            self._check_parent,
            self._check_action,
        )
        return next((report for check in checks if (report := check(now)) is not None), None)

    def _waited(self, since: float, now: float) -> float:
        return now - max(since, self._resumed_at)

    def _find(self, rank: int, where: str, message: str) -> FailureReport:
        return FailureReport(rank, where, message, fatal=True, found_by=None if rank == self._rank else self._rank)

    def _check_published(self, now: float) -> FailureReport | None:
        first = self._exchange.first
        if first is None or first.fatal:
            return first
        progress = self._local.progress
        if self._void is None or self._void[0] != progress:
            self._void = (progress, now)
        expired = self._waited(self._void[1], now) > self._limits.void_grace
        return first if expired and not self._local.handled else None

    def _check_peers(self, now: float) -> FailureReport | None:
        for rank, beat in sorted(self._exchange.beats.items()):
            if beat.closed:
                continue
            message = self._judge_peer(rank, beat, now)
            if message:
                return self._confirm(rank, message)
        return None

    def _judge_peer(self, rank: int, beat: Beat, now: float) -> str:
        """What is wrong with another rank; empty while nothing is."""
        name = f"its process ({beat.process.pid})"
        state = beat.process.state()
        if state is ProcessState.GONE:
            cause = beat.process.cause_of_death() or "killed, out of memory, or ended without a word"
            return f"{name} is gone: {cause}"
        if state is ProcessState.STOPPED:
            if self._waited(self._stopped_since.setdefault(rank, now), now) > self._limits.stopped:
                return f"{name} was stopped (SIGSTOP) and does not answer"
            return ""
        self._stopped_since.pop(rank, None)
        sign = (beat.number, beat.process.cpu_ticks())
        if rank not in self._signs_of_life or self._signs_of_life[rank][0] != sign:
            self._signs_of_life[rank] = (sign, now)
        silence = self._waited(self._signs_of_life[rank][1], now)
        # While this rank cannot read the store, the silence of the others says nothing.
        can_hear = self._exchange.error is None and self._stuck_for(now) < self._limits.beat
        if can_hear and silence > self._limits.silence:
            return f"{name} has been silent for {silence:.0f} s"
        return ""

    def _confirm(self, rank: int, message: str) -> FailureReport | None:
        """Look once more before a rank is declared lost: it may have said good-bye, or someone knows the cause."""
        self._exchange.refresh(self._limits.beat)
        if self._exchange.first is not None:
            return self._exchange.first
        beat = self._exchange.beats[rank]
        return None if beat.closed else self._find(rank, beat.action, message)

    def _check_suspicion(self, now: float) -> FailureReport | None:
        suspicion = self._local.suspicion
        if suspicion is None or self._waited(suspicion[1], now) <= self._limits.lost_peer_grace:
            return None
        return self._exchange.first or suspicion[0]

    def _check_store(self, now: float) -> FailureReport | None:
        store_beat = self._exchange.beats.get(_STORE_RANK)
        if store_beat is not None and store_beat.closed:
            return None
        error = self._exchange.error
        if error is not None and self._waited(self._exchange.error_at, now) > self._limits.store_grace:
            first_line = str(error).partition("\n")[0]
            return self._find(_STORE_RANK, "", f"the store that it holds is gone: {type(error).__name__}: {first_line}")
        if self._stuck_for(now) > self._limits.silence:
            return self._find(
                _STORE_RANK, "", f"the store that it holds has not answered for {self._stuck_for(now):.0f} s"
            )
        return None

    def _stuck_for(self, now: float) -> float:
        since = self._exchange.stuck_since
        return 0.0 if since is None else self._waited(since, now)

    def _check_parent(self, now: float) -> FailureReport | None:
        parent = self._local.parent
        if parent is None or os.getppid() == parent:
            return None
        return self._find(self._rank, self._local.describe_action()[0], f"its parent process ({parent}) is gone")

    def _check_action(self, now: float) -> FailureReport | None:
        action = self._local.action
        if action is None or self._waited(action[1], now) <= self._limits.action:
            return None
        limit = self._limits.action
        message = f"no end after {limit:g} s (raise `timeout` if that is normal); {self.describe_others()}"
        return self._find(self._rank, str(action[0]), message)

    def describe_others(self) -> str:
        """What the other ranks were doing when they were last heard."""
        others = [
            f"rank {rank}: {beat.action or 'no action'}" + (f" for {beat.seconds:.0f} s" if beat.seconds else "")
            for rank, beat in sorted(self._exchange.beats.items())
        ]
        return f"meanwhile {'; '.join(others) or 'no other rank was heard'}"
