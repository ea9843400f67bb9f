"""A small net on two replicas, and the one device that its gradients must equal."""

import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.gradients import GradientSynchronizer

STEPS = 3


class Net(nn.Module):
    """Three layers; ``gate`` is used where the batch says so, ``idle`` never."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 6)
        self.gate = nn.Linear(6, 6)
        self.idle = nn.Linear(6, 6)
        self.last = nn.Linear(6, 3)

    def forward(self, batch: torch.Tensor, use_gate: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.first(batch))
        if use_gate:
            hidden = hidden + self.gate(hidden)
        return self.last(hidden).square().mean()


def make_net() -> Net:
    torch.manual_seed(7)
    return Net()


def batches(step: int) -> list[torch.Tensor]:
    """The global batch of one step: one part per replica. ``[replica][samples, features]``"""
    generator = torch.Generator().manual_seed(step)
    return list(torch.randn(2, 5, 4, generator=generator).unbind())


def start(net: nn.Module, count: int | None = 1, size: float = 0.0, **options: object) -> GradientSynchronizer:
    synchronizer = GradientSynchronizer([list(net.named_parameters())], size, count, **options)
    synchronizer.bind(mesh=dist.group.WORLD)
    return synchronizer


def assert_same_gradients(net: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        if theirs.grad is None:
            assert mine.grad is None, name
        else:
            torch.testing.assert_close(mine.grad, theirs.grad, msg=lambda text, name=name: f"{name}: {text}")


def assert_same_parameters(net: nn.Module, reference: nn.Module) -> None:
    for (name, mine), theirs in zip(net.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, msg=lambda text, name=name: f"{name}: {text}")


def reference_backward(net: nn.Module, step: int, gates: tuple[bool, bool] = (True, True)) -> None:
    """One device: the mean over both replicas' parts."""
    parts = batches(step)
    (sum(net(part, gate) for part, gate in zip(parts, gates, strict=True)) / 2).backward()
