"""The thread that talks to the store for the failure watch, and nothing else.

A call to a store whose host is stopped blocks for ever and cannot be interrupted (a TCPStore's ``check`` has no
timeout). So the store has a thread of its own, and whoever judges looks only at what this thread has left in plain
attributes, including since when it has been stuck.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from d9d_lightning.runtime.watch_process import ProcessIdentity
from d9d_lightning.runtime.watch_report import FailureReport

__all__ = ["Beat", "SharedStore", "StoreExchange"]


class SharedStore(Protocol):
    """The part of a ``torch.distributed`` store that the watch uses."""

    def clone(self) -> SharedStore:
        """A connection of its own to the same data."""

    def add(self, key: str, amount: int, /) -> int:
        """Add to a counter and return it."""

    def check(self, keys: list[str], /) -> bool:
        """Whether all keys exist."""

    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes:
        """Write a key unless it holds something else than ``expected``; return what it holds then."""

    def get(self, key: str, /) -> bytes:
        """Read a key."""

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        """Read several keys."""

    def set(self, key: str, value: str, /) -> None:
        """Write a key."""


@dataclass(frozen=True, slots=True)
class Beat:
    """What a rank says of itself about once a second.

    Attributes:
        number: Grows with every beat.
        action: What its main thread is doing; empty when idle.
        seconds: For how long.
        closed: The rank said good-bye: its silence means nothing any more.
        news_seen: Number of the last news that it has read.
        process: Its process.
    """

    number: int
    action: str
    seconds: float
    closed: bool
    news_seen: int
    process: ProcessIdentity

    @classmethod
    def parse(cls, payload: bytes) -> Beat:
        """Read what :meth:`StoreExchange._send_beat` wrote."""
        fields: dict[str, Any] = json.loads(payload.decode())
        process = ProcessIdentity(*fields.pop("process"))
        return cls(process=process, **fields)


class StoreExchange:
    """Sends this rank's beats and reports, and fetches those of the others.

    Attributes:
        first: The first report that any rank published, once known.
        beats: Last beat of every other rank that has been heard.
        error: Why the store cannot be reached any more.
        stuck_since: Local clock at the start of the store call that is under way; None between calls.
    """

    def __init__(
        self,
        store: SharedStore,
        prefix: str,
        rank: int,
        world_size: int,
        describe_action: Callable[[], tuple[str, float]],
        *,
        poll_s: float,
        beat_s: float,
    ) -> None:
        self.first: FailureReport | None = None
        self.beats: dict[int, Beat] = {}
        self.error: Exception | None = None
        self.error_at = 0.0
        self.stuck_since: float | None = None
        self.news = 0
        self._store = store.clone()
        self._prefix = prefix
        self._rank = rank
        self._others: Sequence[int] = [other for other in range(world_size) if other != rank]
        self._describe_action = describe_action
        self._poll_s, self._beat_s = poll_s, beat_s
        self._process = ProcessIdentity.of_this_process()
        self._number = 0
        self._next_beat = 0.0
        self._closed = self._closed_sent = False
        self._outgoing: FailureReport | None = None
        self._waiters: list[threading.Event] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="d9d-failure-watch-store", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Stop the thread; False where it hangs in the store and had to be left behind."""
        self._stopping = True
        self._wake.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def refresh(self, timeout_s: float) -> bool:
        """Fetch everything now; whether that worked within ``timeout_s`` seconds."""
        done = threading.Event()
        with self._lock:
            self._waiters.append(done)
        self._wake.set()
        return not self._stopping and done.wait(timeout_s) and self.error is None

    def publish(self, report: FailureReport, timeout_s: float) -> bool:
        """Write a report unless another one came first; :attr:`first` then holds the one that did."""
        with self._lock:
            self._outgoing = self._outgoing or report
        return self.refresh(timeout_s)

    def say_good_bye(self, timeout_s: float) -> bool:
        """Tell the others that the silence of this rank will mean nothing from now on."""
        self._closed = True
        return self.refresh(timeout_s)

    def _run(self) -> None:
        while not self._stopping:
            with self._lock:
                waiters, self._waiters = self._waiters, []
            self.stuck_since = time.monotonic()
            try:
                self._take_turn(forced=bool(waiters))
            except Exception as error:
                # Every store reports its end with an exception of its own; all of them mean the same here.
                self.error, self.error_at, self._stopping = error, time.monotonic(), True
            self.stuck_since = None
            for waiter in waiters:
                waiter.set()
            self._wake.wait(self._poll_s)
            self._wake.clear()
        self._release_waiters()

    def _release_waiters(self) -> None:
        with self._lock:
            waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            waiter.set()

    def _take_turn(self, forced: bool) -> None:
        news = self._store.add(f"{self._prefix}/news", int(self._write_news()))
        if not forced and news == self.news and time.monotonic() < self._next_beat:
            return
        if self.first is None and self._store.check([f"{self._prefix}/error"]):
            self.first = FailureReport.from_bytes(self._store.get(f"{self._prefix}/error"))
        self._fetch_beats()
        # Only now: `news_seen` promises the others that everything up to that number has been read.
        self.news = news
        self._send_beat()

    def _write_news(self) -> bool:
        """Write what the others must learn before the next beat is due; whether there was any."""
        report, self._outgoing = self._outgoing, None
        if report is not None:
            winner = self._store.compare_set(f"{self._prefix}/error", "", report.to_bytes().decode())
            self.first = FailureReport.from_bytes(winner)
        good_bye = self._closed and not self._closed_sent
        if good_bye:
            self._send_beat()
            self._closed_sent = True
        return report is not None or good_bye

    def _send_beat(self) -> None:
        self._number += 1
        action, seconds = self._describe_action()
        process = self._process
        beat = {
            "number": self._number,
            "action": action,
            "seconds": round(seconds, 1),
            "closed": self._closed,
            "news_seen": self.news,
            "process": [process.host, process.pid, process.started],
        }
        self._store.set(f"{self._prefix}/beat/{self._rank}", json.dumps(beat))
        self._next_beat = time.monotonic() + self._beat_s

    def _fetch_beats(self) -> None:
        known = [
            other
            for other in self._others
            if other in self.beats or self._store.check([f"{self._prefix}/beat/{other}"])
        ]
        if not known:
            return
        payloads = self._store.multi_get([f"{self._prefix}/beat/{other}" for other in known])
        # A new dictionary, since other threads iterate over the old one.
        self.beats = {other: Beat.parse(payload) for other, payload in zip(known, payloads, strict=True)}
