"""Nothing between backward and optimizer makes the host wait for the device."""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.gradients import (
    GradientSynchronizer,
    clip_gradients_by_norm,
    clip_gradients_by_value,
    global_gradient_norm,
)
from d9d_lightning.gradients.bucket import SyncGradientBucket
from d9d_lightning.gradients.plan import ReduceAxis
from d9d_lightning.gradients.reduction import Communicator
from d9d_lightning.gradients.slot import GradientSlot


@contextlib.contextmanager
def refuse_host_waits(device: str) -> Iterator[None]:
    """Raise where the host waits for a CUDA device."""
    if device != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def check(device: str) -> None:
    """One bucket's life and all of the norm, under the guard."""
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(device)
    parameters = list(net.parameters())
    # A group of one rank needs no reduction, so the synchronizer would leave it out; the bucket itself does not.
    slots = [GradientSlot(f"p{index}", parameter, torch.float32) for index, parameter in enumerate(parameters)]
    bucket = SyncGradientBucket(slots, (ReduceAxis(dist.group.WORLD),), Communicator())
    bucket.bind()
    for guarded in (False, True):
        net(torch.ones(8, 64, device=device)).sum().backward()
        with refuse_host_waits(device) if guarded else contextlib.nullcontext():
            for slot in slots:
                bucket.absorb(slot)
            bucket.launch()
            bucket.mark_sync()
            norm = global_gradient_norm(parameters, groups=[dist.group.WORLD])
            clip_gradients_by_norm(parameters, 0.1, groups=[dist.group.WORLD])
            clip_gradients_by_value(parameters, 0.01)
            bucket.zero_grad()
            bucket.begin_step()
        if not bool(norm > 0):
            raise RuntimeError("the norm is not positive")
    bucket.unbind()
    synchronizer = GradientSynchronizer([parameters], 25, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    for guarded in (False, True):
        net(torch.ones(8, 64, device=device)).sum().backward()
        with refuse_host_waits(device) if guarded else contextlib.nullcontext():
            synchronizer.wait()
            synchronizer.scale_gradients(torch.ones((), device=device))
            synchronizer.zero_grad()


def main() -> None:
    """Run the check in a group of one rank."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    device = parser.parse_args().device
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        check(device)
        dist.destroy_process_group()
    print("host: never waits between backward and optimizer")


if __name__ == "__main__":
    main()
