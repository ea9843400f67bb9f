"""What the ranks tell each other when one of them fails: who, in which action, and the original traceback."""

from __future__ import annotations

import json
import traceback
from dataclasses import asdict, dataclass

__all__ = ["FailureReport", "looks_like_lost_peer"]

# What gloo, NCCL, sockets and the store say when the process at the other end has gone.
_LOST_PEER_PHRASES = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "connection refused",
    "connection was likely closed",
    "remote process exited",
    "socket closed",
    "ncclremoteerror",
    "nccl communicator was aborted",
    "timed out waiting",
)


def looks_like_lost_peer(error: BaseException) -> bool:
    """Whether an error only says that another process went away, so that the true first error is elsewhere."""
    text = f"{type(error).__name__}: {error}".lower()
    return isinstance(error, (ConnectionError, RuntimeError)) and any(phrase in text for phrase in _LOST_PEER_PHRASES)


@dataclass(frozen=True, slots=True)
class FailureReport:
    """The first failure of a run, as every rank shows it.

    Attributes:
        rank: The rank that failed.
        where: What it was doing, for example ``3F5, unit model.layers.7``.
        message: One line: what happened.
        traceback: The original traceback; empty where there is none (a killed process).
        fatal: Whether every process must leave; otherwise every rank raises and may go on with a new run.
        found_by: The rank that noticed, where that is not the one that failed.
    """

    rank: int
    where: str
    message: str
    traceback: str = ""
    fatal: bool = False
    found_by: int | None = None

    @classmethod
    def from_error(cls, error: BaseException, rank: int, where: str, fatal: bool) -> FailureReport:
        """Report of an exception that was raised on ``rank``."""
        lines = traceback.format_exception(type(error), error, error.__traceback__)
        return cls(rank, where, f"{type(error).__name__}: {error}", "".join(lines), fatal)

    @classmethod
    def from_bytes(cls, payload: bytes) -> FailureReport:
        """Inverse of :meth:`to_bytes`."""
        return cls(**json.loads(payload.decode()))

    def to_bytes(self) -> bytes:
        """Form in which the report lies in the store."""
        return json.dumps(asdict(self)).encode()

    def render(self) -> str:
        """The report as text: the original traceback first, then who failed and in which action."""
        where = f" in {self.where}" if self.where else ""
        finder = f" (found by rank {self.found_by})" if self.found_by is not None else ""
        head = f"rank {self.rank} failed first{where}{finder}: {self.message}"
        return f"{self.traceback.rstrip()}\n{head}" if self.traceback else head
