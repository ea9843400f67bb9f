"""The order of streams on CUDA, shown with recorded stand-ins, and the absence of host reads."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from d9d_lightning.gradients import GradientSynchronizer
from d9d_lightning.gradients.reduction import Communicator, StreamReduction, divide_for_average
from d9d_lightning.testing import distributed


class Axis:
    """Stands for a reduce axis."""

    def __init__(self, group: str, size: int, average: bool = True) -> None:
        self.group, self.size, self.average = group, size, average


class Stream:
    """Records what a CUDA stream is told."""

    def __init__(self, name: str, log: list[Any]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: "Stream") -> None:
        self.log.append((self.name, "waits for", other.name))

    def wait_event(self, event: str) -> None:
        self.log.append((self.name, "waits for", event))

    def record_event(self) -> str:
        self.log.append((self.name, "records", "reduced"))
        return "reduced"


class Buffer:
    """Records the division; everything else of a tensor is not needed."""

    device = "cuda:0"

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def mul_(self, factor: float) -> None:
        self.log.append(("on", current[-1], "multiply", factor))


current = ["default"]


def test_streams_are_ordered_from_writers_to_readers(monkeypatch: pytest.MonkeyPatch) -> None:
    """The side stream waits for every writer, reduces axis after axis, and the reader waits for its event only."""
    log: list[Any] = []

    @contextlib.contextmanager
    def enter(stream: Stream) -> Iterator[None]:
        current.append(stream.name)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "stream", enter)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("reader", log))
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, group: log.append(("on", current[-1], "all_reduce", group)))
    writers = [Stream("writer 1", log), Stream("writer 2", log)]
    axes = [Axis("owners", 2, average=False), Axis("replicas", 4)]
    reduction = StreamReduction(Buffer(log), axes, Stream("side", log), writers)  # type: ignore[arg-type]
    reduction.wait()
    assert log == [
        ("side", "waits for", "writer 1"),
        ("side", "waits for", "writer 2"),
        ("on", "side", "multiply", 0.25),
        ("on", "side", "all_reduce", "owners"),
        ("on", "side", "all_reduce", "replicas"),
        ("side", "records", "reduced"),
        ("reader", "waits for", "reduced"),
    ]


def test_buffers_are_freed_only_after_the_side_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before buffers are given back, the current stream waits for the side stream."""
    log: list[Any] = []
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream("current", log))
    communicator = Communicator()
    communicator._streams["cuda:0"] = Stream("side", log)  # type: ignore[index, assignment]
    communicator.release()
    assert log == [("current", "waits for", "side")]


def test_half_precision_does_not_overflow_on_the_way() -> None:
    """Gradients are divided before they are summed, over averaged axes only."""
    buffer = torch.full((2,), 60000.0, dtype=torch.float16)
    divide_for_average(buffer, [Axis("replicas", 4), Axis("owners", 3, average=False)])  # type: ignore[list-item]
    assert (buffer == 15000).all()


class RefuseHostReads(TorchDispatchMode):
    """Raises where the host would have to wait for a device."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.is_nonzero.default):
            raise AssertionError(f"{func} reads a value on the host")
        return func(*args, **(kwargs or {}))


@distributed(ranks=2)
def test_a_full_step_never_reads_a_gradient_on_the_host() -> None:
    """Where every parameter is used, hooks, finish, wait, scaling and zeroing leave the host free."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    synchronizer = GradientSynchronizer([list(net.parameters())], 0, 1)
    synchronizer.bind(mesh=dist.group.WORLD)
    net(torch.ones(2, 4)).sum().backward()
    synchronizer.wait()
    net.zero_grad()
    loss = net(torch.ones(2, 4)).sum()
    loss.backward()
    with RefuseHostReads():
        synchronizer.finish()
        synchronizer.wait()
        synchronizer.scale_gradients(torch.tensor(2.0))
        synchronizer.zero_grad()
