"""What it costs before the first step, in processor time: trace, plan, walk, and traces of further signatures.

    python benchmarks/setup/run.py

One process, one thread, under a minute. Everything is measured as ``Pipeline`` does it at setup and at a batch of a
new shape. Memory is what the process grows by while it traces.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.partition.placement import place_units
from d9d_lightning.partition.plan import make_plan
from d9d_lightning.partition.units import canonical_units
from d9d_lightning.stage.planner import Planner
from d9d_lightning.values import Microbatch

HIDDEN, HEADS, WORDS = 64, 4, 100
STAGES = tuple(range(4))


class Layer(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.mixed, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.up, self.down = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        parts = self.mixed(self.first(x)).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(*parts.unbind(0), is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(rows, length, HIDDEN))
        return x + self.down(nn.functional.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Embedding, layers, head."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, HIDDEN)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(HIDDEN, WORDS)

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        for layer in self.layers:
            hidden = layer(hidden)
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), ids.flatten())


def batch(length: int, index: int = 0) -> Microbatch:
    """A slice of a batch of sentences."""
    return Microbatch(index, 4, (torch.zeros(4, length, dtype=torch.long),))


def step_of(module: nn.Module) -> Callable[[Microbatch], Any]:
    """The user's step."""
    return lambda microbatch: module(*microbatch.args)


@contextmanager
def measured(what: str, goal: str) -> Iterator[None]:
    """Print the processor time of the block."""
    start = time.process_time()
    yield
    print(f"{what:58s} {time.process_time() - start:7.2f} s   goal {goal}", flush=True)


def trace_and_plan(layers: int) -> None:
    """The first batch of a deep model."""
    module = Decoder(layers)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    planner = Planner(module)
    step = step_of(module)
    with measured(f"trace and plan of {layers} layers", "< 2 s"):
        planner.place(step, batch(32), STAGES)
        planner.plan(step, planner.describe("training_step", [batch(32)])[0])
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    size = sum(p.numel() * p.element_size() for p in module.parameters()) / 2**20
    print(f"{'':4s}memory grew by {grown:.0f} MiB; the module has {size:.0f} MiB")


def retrace(layers: int) -> None:
    """Batches of other lengths."""
    module = Decoder(layers)
    planner = Planner(module)
    step = step_of(module)
    planner.place(step, batch(32), STAGES)
    planner.plan(step, planner.describe("training_step", [batch(32)])[0])
    with measured(f"one new sequence length, {layers} layers", "< 0.5 s"):
        planner.plan(step, planner.describe("training_step", [batch(33)])[0])
    with measured(f"10 more sequence lengths, {layers} layers", "< 1 s (100 in < 10 s)"):
        for length in range(34, 44):
            planner.plan(step, planner.describe("training_step", [batch(length)])[0])


def walk(modules: int) -> None:
    """Units and plan of a large tree, from a trace that is there."""
    layers = modules // 7
    module = Decoder(layers)
    planner = Planner(module)
    with measured(f"    (its trace: {layers} layers, {sum(1 for _ in module.modules())} modules)", "-"):
        trace = planner.trace(step_of(module), batch(8))
    with measured(f"walk and plan of {modules} modules from a trace", "< 10 s"):
        units = canonical_units(module)
        make_plan(module, units, trace, place_units(trace, units, STAGES))


def main() -> None:
    """Print all figures."""
    torch.set_num_threads(1)
    trace_and_plan(4)  # what torch loads and caches on first use is not counted below
    trace_and_plan(100)
    retrace(32)
    walk(10_000)


if __name__ == "__main__":
    main()
