"""A process group whose all-reduces take as long as on a slow wire, without using the processor meanwhile.

On a machine with few cores the bytes of an all-reduce cost processor time, so nothing can hide behind backward. A wire
is different: it makes one wait. This group moves the real bytes by gloo, then sleeps for what a wire of the given
latency and bandwidth would have taken, one operation after the other, in a thread of its own.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Wire:
    """What an operation costs: ``latency_ms + size / bandwidth``."""

    latency_ms: float
    megabytes_per_second: float

    def seconds(self, num_bytes: int) -> float:
        """Duration of one operation."""
        return self.latency_ms / 1e3 + num_bytes / (self.megabytes_per_second * 1e6)


class WireWork(dist.Work):
    """An operation on the wire; completes when its future does."""

    def __init__(self, future: torch.futures.Future[Any]) -> None:
        super().__init__()
        self._future = future

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Block until the operation is over."""
        self._future.wait()
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """What DistributedDataParallel waits for."""
        return self._future


class WireGroup(dist.ProcessGroup):
    """Delegates to a gloo group; all-reduces go over the wire."""

    def __init__(self, inner: dist.ProcessGroup, wire: Wire) -> None:
        super().__init__(inner.rank(), inner.size())
        self._inner = inner
        self._wire = wire
        self._orders: queue.Queue[tuple[list[torch.Tensor], Any, torch.futures.Future[Any]]] = queue.Queue()
        threading.Thread(target=self._carry, daemon=True).start()

    def getBackendName(self) -> str:  # noqa: N802
        """Name of the backend."""
        return "wire"

    def allreduce(self, tensors: list[torch.Tensor], options: Any = None) -> dist.Work:
        """Queue an all-reduce."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        self._orders.put((tensors, options or dist.AllreduceOptions(), future))
        return WireWork(future)

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> dist.Work:
        """Not delayed: setup only."""
        return self._inner.broadcast(tensors, options)

    def allgather(self, outputs: Any, inputs: Any, options: Any = None) -> dist.Work:
        """Not delayed: setup only."""
        return self._inner.allgather(outputs, inputs, options or dist.AllgatherOptions())

    def _carry(self) -> None:
        while True:
            tensors, options, future = self._orders.get()
            start = time.perf_counter()
            self._inner.allreduce(tensors, options).wait()
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            time.sleep(max(0.0, self._wire.seconds(size) - (time.perf_counter() - start)))
            future.set_result(tensors)


def make_wire_group(wire: Wire) -> dist.ProcessGroup:
    """A group of all ranks over the wire. Collective."""
    inner = dist.new_group(backend="gloo")
    name = f"wire{id(wire)}"
    dist.Backend.register_backend(name, lambda store, rank, size, timeout: WireGroup(inner, wire), devices=["cpu"])
    return dist.new_group(backend=name)
