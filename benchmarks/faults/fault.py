"""One thing that goes wrong: what, where, on which rank, at which batch."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import dataclass

from benchmarks.faults.ranks import note_moment

MESSAGE = "label 77 is out of range"
BLOCKS = 6
PLACES = ("step", "forward", "backward", "loss", "hook", "callback", "loader")
"""Places in a batch. Others are passed once or twice in a run, with no batch; see the methods of ``job.Job``."""
LOOPS = {"fit": "train", "validate": "validation", "test": "test", "predict": "predict"}
"""Methods of a trainer, and what their loops are called."""
KINDS = ("raise", "kill", "exit", "stop", "interrupt", "terminate", "hang")
SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "interrupt": signal.SIGINT,
    "terminate": signal.SIGTERM,
}


class BadLabelError(ValueError):
    """What a user's own code raises."""


@dataclass(frozen=True)
class Fault:
    """One thing that goes wrong, once.

    Attributes:
        kind: What happens, one of KINDS.
        place: In which code, one of PLACES.
        rank: On which process; None: on whichever comes there first. Units run on one rank each anyway.
        batch: In which batch; None: wherever the place is reached first.
        block: In which block of the network, for the places ``forward`` and ``backward``.
        loop: In which loop, one of the values of LOOPS.
        among: Processes that blocks may fail on, where replicas have the same ones; None: all.
    """

    kind: str
    place: str
    rank: int | None = None
    batch: int | None = 2
    block: int = 1
    loop: str = "train"
    among: tuple[int, ...] | None = None

    @property
    def name(self) -> str:
        """Short text for tables."""
        where = f"{self.place} of block {self.block}" if self.place in ("forward", "backward") else self.place
        where += "" if self.loop == "train" else f" of {self.loop}"
        return f"{self.kind} in {where}" + ("" if self.rank is None else f", rank {self.rank}")

    @property
    def told(self) -> str:
        """What the first error that is shown must say; empty where no error has to be shown."""
        return {
            "raise": MESSAGE,
            "kill": "is gone",
            "exit": "is gone",
            "stop": "was stopped (SIGSTOP)",
            "interrupt": "KeyboardInterrupt",
            "terminate": "",
            "hang": "meanwhile rank",
        }[self.kind]

    def strike(self) -> None:
        """Let it happen, here and now."""
        note_moment()
        if self.kind == "raise":
            raise BadLabelError(MESSAGE)
        if self.kind == "exit":
            os._exit(17)
        if self.kind == "hang":
            threading.Event().wait()
        os.kill(os.getpid(), SIGNALS[self.kind])
        if self.kind == "stop":
            # the process goes on a little before a signal to itself takes effect
            threading.Event().wait(0.2)

    @classmethod
    def draw(cls, generator: random.Random, ranks: int, batches: int) -> Fault:
        """A random one."""
        return cls(
            generator.choice(KINDS),
            generator.choice(PLACES),
            generator.choice(range(ranks)),
            generator.randrange(batches),
            generator.randrange(BLOCKS),
        )


class Trigger:
    """Strikes when the chosen place is reached in the chosen batch."""

    def __init__(self, fault: Fault | None, rank: int) -> None:
        self._fault = fault
        self._rank = rank
        self.batch = -1
        self.loop = "train"
        self.struck = False

    def begin(self, loop: str, batch: int) -> None:
        """A batch begins."""
        self.loop, self.batch = loop, batch
        self.reach("hook")

    def reach(self, place: str, block: int | None = None, loop: str | None = None) -> None:
        """The job has come to a place."""
        fault = self._fault
        if fault is None or self.struck or (fault.place, fault.loop) != (place, loop or self.loop):
            return
        if fault.batch not in (None, self.batch):
            return
        if place in ("forward", "backward"):
            if fault.block != block or self._rank not in (fault.among or (self._rank,)):
                return
        elif fault.rank is not None and fault.rank != self._rank:
            return
        self.struck = True
        fault.strike()
