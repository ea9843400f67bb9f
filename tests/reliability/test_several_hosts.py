"""Two hosts of two processes each, under torchrun; skipped where network namespaces cannot be made."""

from __future__ import annotations

import re
import subprocess

import pytest

from benchmarks.faults.job import train
from benchmarks.faults.ranks import run_ranks
from tests.reliability.several_hosts import can_make_hosts, can_slow_down, two_hosts, two_hosts_far_apart

pytestmark = [
    pytest.mark.full,
    pytest.mark.timeout(400),
    pytest.mark.skipif(not can_make_hosts(), reason="needs root and the commands of iproute2"),
]

END_S = 200.0


def print_losses(batches: int) -> None:
    print("losses", train(None, schedule="zbv", batches=batches, ranks=4))


def losses_in(text: str) -> set[str]:
    return set(re.findall(r"losses \[.*\]", text))


def finish(jobs: list[subprocess.Popen[str]]) -> list[str]:
    """All that each torchrun printed, after it has ended by itself."""
    try:
        return [job.communicate(timeout=END_S)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()


def test_two_hosts_train_as_one() -> None:
    """Two times two processes over a cable give the losses of four processes on one host."""
    expected = set().union(*(losses_in(ending.text) for ending in run_ranks(print_losses, 4, 4, limit_s=END_S)))
    with two_hosts() as hosts:
        texts = finish([hosts.start(host, batches=4, timeout_s=60.0) for host in (0, 1)])
    assert len(expected) == 1
    assert [losses_in(text) for text in texts] == [expected, expected], texts


@pytest.mark.skipif(not can_slow_down(), reason="needs /dev/net/tun, since not every kernel can delay and lose packets")
def test_two_hosts_far_apart_train_as_one() -> None:
    """A cable that takes 5 ms each way and loses two packets of a hundred changes no loss."""
    expected = set().union(*(losses_in(ending.text) for ending in run_ranks(print_losses, 4, 4, limit_s=END_S)))
    told: list[str] = []
    with two_hosts_far_apart(5.0, 2.0, told) as hosts:
        texts = finish([hosts.start(host, batches=4, timeout_s=60.0) for host in (0, 1)])
    assert [losses_in(text) for text in texts] == [expected, expected], texts
    carried, lost = map(int, re.findall(r"\d+", told[0]))
    assert carried > 200 and lost > 0, told


def test_a_cut_cable_ends_all_processes_with_a_readable_error() -> None:
    """After the cable is pulled both hosts end non-zero within the timeout and say for whom they waited."""
    with two_hosts() as hosts:
        jobs = [hosts.start(host, batches=100_000, timeout_s=15.0) for host in (0, 1)]
        for line in jobs[0].stdout or ():
            if "D9DStrategy:" in line:  # training begins
                break
        hosts.cut()
        texts = finish(jobs)
    assert all(job.returncode not in (0, None) for job in jobs)
    for text in texts:
        assert re.search(r"rank \d failed first.*(waited in vain|no end after|store)", text), text
