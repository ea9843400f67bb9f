"""Two hosts made of network namespaces and a cable between them, for processes that torchrun starts."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_JOB = """
import sys
from benchmarks.faults.job import train
print("losses", train(None, schedule="zbv", batches=int(sys.argv[1]), ranks=2, nodes=2, timeout=float(sys.argv[2])))
"""


@dataclass(frozen=True)
class Hosts:
    """Names of the namespaces."""

    names: tuple[str, str]

    def cut(self) -> None:
        """Pull the cable."""
        _ip("-n", self.names[0], "link", "set", f"v{self.names[0]}", "down")

    def start(self, host: int, batches: int, timeout_s: float) -> subprocess.Popen[str]:
        """Start torchrun with two processes on one of the hosts."""
        name = self.names[host]
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": f"v{name}",
            "PYTHONPATH": os.getcwd(),
        }
        torchrun = ["-m", "torch.distributed.run", "--nnodes=2", f"--node-rank={host}", "--nproc-per-node=2"]
        address = ["--master-addr=10.213.0.1", "--master-port=29533", "--no-python"]
        job = [sys.executable, "-u", "-c", _JOB, str(batches), str(timeout_s)]
        command = ["ip", "netns", "exec", name, sys.executable, *torchrun, *address, *job]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


def can_make_hosts() -> bool:
    """Whether this process may make network namespaces."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        return False
    name = f"d9d{uuid.uuid4().hex[:6]}"
    if subprocess.run(["ip", "netns", "add", name], capture_output=True).returncode != 0:
        return False
    _ip("netns", "delete", name)
    return True


def can_slow_down() -> bool:
    """Whether this process may make TAP devices."""
    return os.access("/dev/net/tun", os.R_OK | os.W_OK)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Two namespaces with addresses 10.213.0.1 and 10.213.0.2, and a cable between them."""
    with _namespaces() as names:
        _ip("link", "add", f"v{names[0]}", "type", "veth", "peer", "name", f"v{names[1]}")
        _plug_in(names)
        yield Hosts(names)


@contextlib.contextmanager
def two_hosts_far_apart(delay_ms: float, loss_percent: float, told: list[str]) -> Iterator[Hosts]:
    """The same with a cable that delays every packet and loses some.

    Args:
        delay_ms: In each direction.
        loss_percent: Share of packets that never arrive.
        told: Gets the line in which the cable says afterwards what it did.
    """
    with _namespaces() as names:
        script = str(Path(__file__).with_name("slow_cable.py"))
        ends = [f"v{name}" for name in names]
        command = [sys.executable, script, *ends, str(delay_ms), str(loss_percent)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as cable:
            try:
                if cable.stdout is None or cable.stdout.readline() != "ready\n":
                    raise OSError("no TAP device could be made")
                _plug_in(names)
                yield Hosts(names)
            finally:
                cable.terminate()
                told.append(cable.communicate()[0])


@contextlib.contextmanager
def _namespaces() -> Iterator[tuple[str, str]]:
    tag = uuid.uuid4().hex[:6]
    names = (f"d9da{tag}", f"d9db{tag}")
    for name in names:
        _ip("netns", "add", name)
    try:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def _plug_in(names: tuple[str, str]) -> None:
    for number, name in enumerate(names, start=1):
        _ip("link", "set", f"v{name}", "netns", name)
        _ip("-n", name, "addr", "add", f"10.213.0.{number}/24", "dev", f"v{name}")
        _ip("-n", name, "link", "set", f"v{name}", "up")
        _ip("-n", name, "link", "set", "lo", "up")
