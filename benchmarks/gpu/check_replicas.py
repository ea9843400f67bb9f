"""Two processes on one GPU, over gloo, train like one process on the whole batch."""

from __future__ import annotations

import argparse
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

from d9d_lightning.gradients import GradientSynchronizer, clip_gradients_by_norm

_REPLICAS = 2
_STEPS = 4
_ACCUMULATIONS = 2


class Net(nn.Module):
    """Two layers that are used and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(32, 64)
        self.idle = nn.Linear(64, 64)
        self.last = nn.Linear(64, 8)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        """Loss of a batch. ``[samples, 32]``"""
        return self.last(torch.tanh(self.first(batch))).square().mean()


def make_net(device: str) -> tuple[Net, torch.optim.Optimizer]:
    """The same module and optimizer everywhere."""
    torch.manual_seed(0)
    net = Net().to(device)
    return net, torch.optim.AdamW(net.parameters(), lr=0.05, weight_decay=0.5)


def part(step: int, accumulation: int, replica: int, device: str) -> torch.Tensor:
    """One replica's part of one batch."""
    generator = torch.Generator().manual_seed(100 * step + 10 * accumulation + replica)
    return torch.randn(16, 32, generator=generator).to(device)


def train_alone(device: str) -> Net:
    """The reference: one process sees all parts."""
    net, optimizer = make_net(device)
    for step in range(_STEPS):
        for accumulation in range(_ACCUMULATIONS):
            for replica in range(_REPLICAS):
                (net(part(step, accumulation, replica, device)) / _REPLICAS).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return net


def train_replica(rank: int, device: str, folder: str) -> None:
    """One replica; compares with the reference at the end. Every second step runs its backward on a side stream."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=_REPLICAS)
    if device == "cuda":
        torch.cuda.set_device(0)
    reference = train_alone(device)
    net, optimizer = make_net(device)
    synchronizer = GradientSynchronizer([list(net.named_parameters())], 0.001, _ACCUMULATIONS)
    synchronizer.bind(mesh=dist.group.WORLD)
    side = torch.cuda.Stream() if device == "cuda" else None
    for step in range(_STEPS):
        if side is not None and step % 2:
            side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side if step % 2 else None):
            for accumulation in range(_ACCUMULATIONS):
                net(part(step, accumulation, rank, device)).backward()
            synchronizer.finish()
        if side is not None:
            torch.cuda.current_stream().wait_stream(side)
        synchronizer.wait()
        clip_gradients_by_norm(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")
    synchronizer.unbind()
    dist.destroy_process_group()


def main() -> None:
    """Start the replicas and wait for them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train_replica, args=(device, folder), nprocs=_REPLICAS)
    print(f"replicas: {_REPLICAS} on one device train like one process")


if __name__ == "__main__":
    main()
