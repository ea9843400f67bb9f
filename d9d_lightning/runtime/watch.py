"""Failure watch: one rank's failure reaches all the others within seconds, without any collective.

Collectives cannot carry the news: on gloo a blocked one cannot be aborted, and its peers may be gone. So every process
has a watch with its own connection to the store and threads of its own. It knows two tiers:

- **void**: the failing rank publishes its error and goes on through its program; every rank then raises at the same
  point (:meth:`FailureWatch.raise_if_published`), and the process groups stay usable.
- **dead**: a process is gone or silent, an action waits too long, the store is gone, or a rank said so. Every watch
  prints the first error and ends its process with ``os._exit``, since nothing else ends a blocked collective.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from d9d_lightning.errors import RankFailedError
from d9d_lightning.runtime.watch_exit import leave_process, wait_for_others
from d9d_lightning.runtime.watch_judge import LocalState, WatchJudge, WatchLimits
from d9d_lightning.runtime.watch_process import ProcessState, die_with_parent, outlive_parent
from d9d_lightning.runtime.watch_report import FailureReport, looks_like_lost_peer
from d9d_lightning.runtime.watch_store import SharedStore, StoreExchange

__all__ = ["FailureWatch", "WatchLimits"]

# A watch that has not looked for this long was itself standing still (a stopped job, a held interpreter lock).
_STOOD_STILL_S = 3.0
_STORE_CALL_S = 2.0


class FailureWatch:
    """Watches one run (one ``fit`` or ``validate``) from one process; needed once per process and run.

    Call :meth:`start` on every rank, and :meth:`close` on every rank that ends the run by itself. A process that ends
    without :meth:`close` counts as failed.

    Args:
        store: Any ``torch.distributed`` store that all ranks share; a connection of its own is made from it. A
            ``TCPStore`` lives in the process of rank 0.
        rank: This process.
        world_size: Number of processes.
        run: Number of this run, equal on all ranks, so that an old error is not taken for a new one.
        limits: How long to wait for what.
        follow_parent: Leave when the parent process is gone. For processes that the strategy has started; not for those
            that a shell or ``nohup`` has.
        idle: Anything whose text tells the others what this process does between actions.
        on_dead: Called with the first error instead of ending the process (for tests).
    """

    def __init__(
        self,
        store: SharedStore,
        rank: int,
        world_size: int,
        *,
        run: int = 0,
        limits: WatchLimits | None = None,
        follow_parent: bool = False,
        idle: object = "",
        on_dead: Callable[[FailureReport], None] | None = None,
    ) -> None:
        self._rank = rank
        self._limits = limits or WatchLimits()
        self._local = LocalState(parent=os.getppid() if follow_parent else None, idle=idle)
        self._exchange = StoreExchange(
            store,
            f"d9d_failure_watch/{run}",
            rank,
            world_size,
            self._local.describe_for_others,
            poll_s=self._limits.poll,
            beat_s=self._limits.beat,
        )
        self._judge = WatchJudge(rank, self._limits, self._exchange, self._local)
        self._on_dead = on_dead or self._leave
        self._own_error: BaseException | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="d9d-failure-watch", daemon=True)

    def start(self) -> None:
        """Start watching; returns when this rank is known to the others."""
        if self._local.parent is not None:
            # From here on the watch notices a dead parent itself, and can still print why it leaves.
            outlive_parent()
        self._exchange.start()
        self._exchange.refresh(_STORE_CALL_S)
        self._thread.start()

    def hear_others(self) -> None:
        """Read who the others are; worth it once all have started, since a rank that was never heard is not missed."""
        self._exchange.refresh(_STORE_CALL_S)

    def enter(self, action: object) -> None:
        """Note that an action begins; costs one attribute write. Its text is made only if somebody asks for it.

        Args:
            action: Anything whose text names the action, for example ``2F5, unit model.layers.7``.
        """
        self._local.action = (action, time.monotonic())

    def leave(self) -> None:
        """Note that the action ended."""
        self._local.action = None
        self._local.progress += 1

    @property
    def where(self) -> str:
        """The action under way, as text; empty between actions."""
        return self._local.describe_action()[0]

    def publish(self, error: BaseException, where: str = "", *, fatal: bool = False) -> None:
        """Tell all ranks about an error of this one; the first error of a run wins.

        An error that only says that a peer is gone is held back until the cause has shown itself, and is always fatal:
        the connections it comes from cannot be used again.

        Args:
            error: What was raised here.
            where: In which action; by default the one that was entered last.
            fatal: End all processes (dead tier) rather than let every rank raise (void tier).
        """
        where = where or self.where
        lost_peer = looks_like_lost_peer(error)
        report = FailureReport.from_error(error, self._rank, where, fatal or lost_peer)
        self._own_error = self._own_error or error
        if lost_peer:
            # Such an error says nothing of the rank that did not come, so that goes on top.
            others = self._judge.describe_others()
            message = f"waited in vain for another rank; {others}; {report.message}\n{report.traceback}"
            report = replace(report, message=message.rstrip(), traceback="")
            self._local.suspicion = (report, time.monotonic())
            self._closing.wait(self._limits.lost_peer_grace + _STORE_CALL_S)
        else:
            # This process is on its way out already, and may still have a log to upload or a checkpoint to write.
            self._local.handled = not fatal
            self._exchange.publish(report, _STORE_CALL_S)

    def raise_if_published(self, wait_s: float = 0.0) -> None:
        """Raise the first error of the run, if there is one (void tier).

        Args:
            wait_s: Ask the store now, for at most this long, instead of trusting the last poll. Use it where it is
                already known that some rank has failed.

        Raises:
            BaseException: The original error, on the rank where it was raised.
            RankFailedError: On every other rank; the message starts with the original traceback.
        """
        if wait_s > 0 and self._exchange.first is None:
            self._exchange.refresh(wait_s)
        first = self._exchange.first
        if first is None:
            return
        self._local.handled = True
        if first.rank == self._rank and self._own_error is not None:
            raise self._own_error
        raise RankFailedError(first.render())

    @property
    def first_failure(self) -> FailureReport | None:
        """The first error of the run as far as this rank knows."""
        return self._exchange.first

    def close(self) -> None:
        """End the watch; no thread stays behind. Returns at once, or as soon as the others know that rank 0 leaves."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if self._exchange.say_good_bye(_STORE_CALL_S):
            self._wait_until_good_bye_is_read()
        self._exchange.stop(_STORE_CALL_S)
        # Its traceback keeps the tensors of the failed step alive.
        self._own_error = None
        if self._local.parent is not None:
            die_with_parent()

    def _wait_until_good_bye_is_read(self) -> None:
        """The store goes with rank 0: the others must know that this is no failure before its process ends."""
        deadline = time.monotonic() + (self._limits.good_bye if self._rank == 0 else 0.0)
        news = self._exchange.news
        while time.monotonic() < deadline and any(
            not beat.closed and beat.news_seen < news and beat.process.state() is not ProcessState.GONE
            for beat in self._exchange.beats.values()
        ):
            time.sleep(self._limits.poll / 4)
            self._exchange.refresh(_STORE_CALL_S)

    def _watch(self) -> None:
        last_look = time.monotonic()
        while not self._closing.wait(self._limits.poll):
            now = time.monotonic()
            if now - last_look > _STOOD_STILL_S:
                self._judge.forgive(now)
            report = self._judge.verdict(now)
            if report is not None:
                self._die(report)
                return
            last_look = time.monotonic()

    def _die(self, report: FailureReport) -> None:
        if self._exchange.first is None:
            self._exchange.publish(report, _STORE_CALL_S)
        self._on_dead(self._exchange.first or report)

    def _leave(self, first: FailureReport) -> None:
        action, seconds = self._local.describe_action()
        doing = f" while it was in {action} for {seconds:.1f} s" if action else ""
        why = "of this" if first.rank == self._rank else f"rank {first.rank} failed"
        text = f"{first.render()}\nrank {self._rank} ends because {why}{doing}"
        culprit = self._exchange.beats.get(first.rank)

        def finish() -> None:
            if first.found_by is not None and culprit is not None:
                # It was declared lost: should it wake up later, it would wait for processes that no longer exist.
                culprit.process.kill()
            if self._rank == 0:
                wait_for_others(lambda: self._exchange.beats, self._limits.linger)

        leave_process(text, finish)
