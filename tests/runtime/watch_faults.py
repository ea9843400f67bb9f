"""Processes under a failure watch, for tests: each rank runs one role until it ends or is ended."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from d9d_lightning.runtime.watch import FailureWatch, WatchLimits

LIMITS = WatchLimits(stopped=0.4, void_grace=1.0, lost_peer_grace=1.0, store_grace=1.0, poll=0.05, beat=0.2)
JOIN_S = 30.0
"""Far above the seconds that a run takes: reached only by a hang."""


def wait_as_a_collective_does() -> None:
    """Block outside of Python, like a receive whose peer never sends."""
    reader, _ = os.pipe()
    os.read(reader, 1)


def make_store(rank: int, ports: Any, world_size: int) -> Any:
    """Store that lives with rank 0, as in a real run."""
    from torch.distributed import TCPStore

    if rank == 0:
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for _ in range(world_size - 1):
            ports.put(store.port)
        return store
    return TCPStore("127.0.0.1", ports.get(), is_master=False, wait_for_workers=False)


def run_rank(rank: int, role: str, log: str, ports: Any, everyone: Any, limits: WatchLimits) -> None:
    """Body of one process: starts the watch, waits until all have heard of each other, then plays its role."""
    os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT), 2)
    store = make_store(rank, ports, everyone.parties)
    watch = FailureWatch(store, rank, everyone.parties, limits=limits)
    watch.enter("RECV_F 1F0" if role in ("wait", "lose peer") else "2F5, unit net.blocks.1")
    watch.start()
    everyone.wait(JOIN_S)
    watch._exchange.refresh(JOIN_S)
    everyone.wait(JOIN_S)
    ROLES[role](watch, store)


def _wait(watch: FailureWatch, store: Any) -> None:
    wait_as_a_collective_does()


def _raise_fatal(watch: FailureWatch, store: Any) -> None:
    try:
        raise ValueError("the user's mistake")
    except ValueError as error:
        watch.publish(error, fatal=True)
    wait_as_a_collective_does()


def _raise_void(watch: FailureWatch, store: Any) -> None:
    try:
        raise ValueError("the user's mistake")
    except ValueError as error:
        watch.publish(error)
    store.set("status", "failed")
    _expect(ValueError, watch)


def _meet_void(watch: FailureWatch, store: Any) -> None:
    from d9d_lightning.errors import RankFailedError

    store.wait(["status"])
    _expect(RankFailedError, watch)


def _expect(kind: type[Exception], watch: FailureWatch) -> None:
    try:
        watch.raise_if_published(wait_s=5.0)
    except kind as error:
        sys.stderr.write(f"raised {error}\n")
    watch.close()
    left = [thread.name for thread in threading.enumerate() if thread.name.startswith("d9d")]
    sys.stderr.write(f"watch threads left: {left}\n")


def _kill_self(watch: FailureWatch, store: Any) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop_self(watch: FailureWatch, store: Any) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def _exit_early(watch: FailureWatch, store: Any) -> None:
    os._exit(0)


def _lose_peer(watch: FailureWatch, store: Any) -> None:
    # What gloo raises on the neighbour of a killed rank, before anything else shows.
    watch.publish(RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1"))


def _leave_well(watch: FailureWatch, store: Any) -> None:
    watch.close()


ROLES = {
    "exit early": _exit_early,
    "kill self": _kill_self,
    "leave well": _leave_well,
    "lose peer": _lose_peer,
    "meet void": _meet_void,
    "raise fatal": _raise_fatal,
    "raise void": _raise_void,
    "stop self": _stop_self,
    "wait": _wait,
}


@dataclass(frozen=True)
class Ending:
    """How one process ended: its exit code (negative: signal number) and what it wrote to standard error."""

    exit_code: int | None
    text: str


def run_ranks(roles: list[str], folder: Path, limits: WatchLimits = LIMITS) -> list[Ending]:
    """Run one process per role and wait until all have ended; those that hang are ended and have exit code None."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed"])
    ports, everyone = context.Queue(), context.Barrier(len(roles))
    logs = [folder / f"rank{rank}.log" for rank in range(len(roles))]
    processes = [
        context.Process(target=run_rank, args=(rank, role, str(logs[rank]), ports, everyone, limits))
        for rank, role in enumerate(roles)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(JOIN_S)
    codes = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return [Ending(code, log.read_text()) for code, log in zip(codes, logs, strict=True)]


ORPHAN_PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]])
sys.stdin.read()
"""
ORPHAN_CHILD = """
import sys, torch.distributed as dist
from d9d_lightning.runtime.watch import FailureWatch, WatchLimits
store = dist.HashStore()
FailureWatch(store, 0, 1, limits=WatchLimits(poll=0.05), follow_parent=True).start()
print("ready", flush=True)
store.get("never written")
"""


def orphan_output() -> str:
    """All that a process with a watch writes when the process that started it is killed."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen([sys.executable, "-c", ORPHAN_PARENT, ORPHAN_CHILD], **pipe) as parent:
        assert parent.stdout is not None
        first_line = parent.stdout.readline()
        parent.kill()
        # The pipe ends only when the orphan has ended too.
        return first_line + parent.stdout.read()
