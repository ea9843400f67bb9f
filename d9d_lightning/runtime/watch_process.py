"""Signs of life of another process on this host, read from ``/proc``, and the tie of a process to its parent.

A process that vanished is seen at once and without its help. Off Linux, or for a process of another host or container,
nothing can be said here, and its heartbeats in the store decide.
"""

from __future__ import annotations

import ctypes
import enum
import functools
import os
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

__all__ = ["ProcessIdentity", "ProcessState", "die_with_parent", "outlive_parent"]

_PR_SET_PDEATHSIG = 1
# Positions behind the command name in /proc/<pid>/stat; see proc(5), whose numbers are larger by three.
_STATE, _USER_TICKS, _SYSTEM_TICKS, _START_TIME, _EXIT_CODE = 0, 11, 12, 19, 49


class ProcessState(enum.Enum):
    """What this host knows of a process."""

    UNKNOWN = "unknown"
    """Another host or container, or no /proc."""
    RUNNING = "running"
    """It exists and is not stopped."""
    STOPPED = "stopped"
    """It was stopped by a signal and can neither compute nor answer."""
    GONE = "gone"
    """It ended, was killed, or is a zombie."""


@dataclass(frozen=True, slots=True)
class ProcessIdentity:
    """A process, told apart from a later one with the same number.

    Attributes:
        host: Boot and process namespace; processes of one host share it.
        pid: Process number within that namespace.
        started: Start time in clock ticks since boot.
    """

    host: str
    pid: int
    started: int

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Identity of the calling process."""
        fields = _read_stat(os.getpid())
        return cls(_host_name(), os.getpid(), int(fields[_START_TIME]) if fields else 0)

    def state(self) -> ProcessState:
        """State of the process, as far as this host can see it."""
        if not self._is_visible():
            return ProcessState.UNKNOWN
        fields = _read_stat(self.pid)
        if not fields or int(fields[_START_TIME]) != self.started or fields[_STATE] in ("Z", "X"):
            return ProcessState.GONE
        return ProcessState.STOPPED if fields[_STATE] == "T" else ProcessState.RUNNING

    def cpu_ticks(self) -> int:
        """Processor time used so far, in clock ticks; 0 where it cannot be seen."""
        fields = _read_stat(self.pid) if self._is_visible() else []
        return int(fields[_USER_TICKS]) + int(fields[_SYSTEM_TICKS]) if fields else 0

    def cause_of_death(self) -> str:
        """Which signal ended the process, where its parent has not yet collected it; else an empty text."""
        fields = _read_stat(self.pid) if self._is_visible() else []
        number = int(fields[_EXIT_CODE]) & 0x7F if len(fields) > _EXIT_CODE and fields[_STATE] == "Z" else 0
        return f"killed by {signal.Signals(number).name}" if number in set(signal.Signals) else ""

    def kill(self) -> None:
        """End the process for good if it still is the one meant here."""
        if self.state() in (ProcessState.RUNNING, ProcessState.STOPPED):
            os.kill(self.pid, signal.SIGKILL)

    def _is_visible(self) -> bool:
        return bool(self.host) and self.host == _host_name()


def die_with_parent() -> None:
    """Let the kernel end this process when the thread that started it ends (Linux; nothing elsewhere)."""
    _set_parent_death_signal(signal.SIGKILL)


def outlive_parent() -> None:
    """Take :func:`die_with_parent` back, so that this process can still report why its parent died."""
    _set_parent_death_signal(0)


def _set_parent_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, int(number))


@functools.cache
def _host_name() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _read_stat(pid: int) -> list[str]:
    """Fields of ``/proc/<pid>/stat`` behind the command name, which may itself hold spaces and brackets."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []
