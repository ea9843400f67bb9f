"""CPU time of a backward in two parts against one plain backward, and the memory that waits between the parts.

    OMP_NUM_THREADS=1 python benchmarks/split_backward/run.py                 # all cases, 30 rounds
    OMP_NUM_THREADS=1 python benchmarks/split_backward/run.py --case llama-512 --rounds 60

In every round each way runs once on a new graph of the same microbatch, in an order that rotates. Times are CPU time of
the process (one thread), so other processes disturb them little. ``torch`` is the split backward of
``torch.distributed.pipelining`` (its ``_backward`` module), given the same roots, inputs and weights.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from d9d_lightning.stage.split_backward import full_backward, split_backward


class MlpBlock(nn.Module):
    """Pre-norm residual MLP, ``[microbatch, sequence, hidden]`` to the same."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(hidden)
        self.up = nn.Linear(hidden, 4 * hidden)
        self.down = nn.Linear(4 * hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class LlamaBlock(nn.Module):
    """RMS norms, rotary attention, gated MLP, no biases."""

    def __init__(self, hidden: int, heads: int = 8) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.RMSNorm(hidden) for _ in range(2))
        self.q, self.k, self.v, self.o = (nn.Linear(hidden, hidden, bias=False) for _ in range(4))
        self.gate, self.up = (nn.Linear(hidden, 8 * hidden // 3, bias=False) for _ in range(2))
        self.down = nn.Linear(8 * hidden // 3, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norms[0](x)
        q, k, v = (p(h).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v))
        attention = nn.functional.scaled_dot_product_attention(rotate(q), rotate(k), v, is_causal=True)
        x = x + self.o(attention.transpose(1, 2).flatten(2))
        h = self.norms[1](x)
        return x + self.down(nn.functional.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor) -> Tensor:
    """Rotary position embedding of ``[microbatch, heads, sequence, head]``."""
    half = x.shape[-1] // 2
    angles = torch.outer(torch.arange(x.shape[-2]), 10000 ** (-torch.arange(half) / half))
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)


def encoder(hidden: int, layers: int) -> nn.Module:
    make = nn.TransformerEncoderLayer
    return nn.Sequential(
        *[make(hidden, 8, 4 * hidden, dropout=0.0, batch_first=True, norm_first=True) for _ in range(layers)]
    )


# name -> (module, hidden, rows, sequence)
CASES: dict[str, tuple[Callable[[], nn.Module], int, int, int]] = {
    "mlp-512": (lambda: nn.Sequential(*[MlpBlock(512) for _ in range(4)]), 512, 8, 16),
    "encoder-512": (lambda: encoder(512, 2), 512, 4, 64),
    "llama-512": (lambda: nn.Sequential(*[LlamaBlock(512) for _ in range(2)]), 512, 4, 64),
    "encoder-1024": (lambda: encoder(1024, 1), 1024, 2, 128),
    "mlp-32 (overhead)": (lambda: nn.Sequential(*[MlpBlock(32) for _ in range(4)]), 32, 8, 16),
}


# column -> the parts whose sum is set against the plain backward
RATIOS = {
    "(I + W) / plain": ("I", "W"),
    "full / plain": ("full",),
    "torch (I + W) / plain": ("torch I", "torch W"),
}


@dataclass
class Samples:
    """CPU seconds of each part of each way, one entry a round."""

    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, name: str, seconds: float) -> None:
        self.parts.setdefault(name, []).append(seconds)

    def median_us(self, name: str) -> float:
        return statistics.median(self.parts[name]) * 1e6

    def ratio(self, *names: str) -> float:
        """Median over rounds of the sum of ``names`` over the plain backward of the same round."""
        rows = zip(*(self.parts[name] for name in names), self.parts["plain"], strict=True)
        return statistics.median(sum(row[:-1]) / row[-1] for row in rows)


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes that a graph saves for its backward, each storage once, weights not counted."""
    weights = {weight.untyped_storage().data_ptr() for weight in module.parameters()}
    found: dict[int, int] = {}
    kept: list[Tensor] = []  # or a freed address would be counted twice

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            found[storage.data_ptr()] = storage.nbytes()
            kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x.clone().requires_grad_())
    return sum(found.values())


def measure(module: nn.Module, x: Tensor, gradient: Tensor, rounds: int) -> tuple[Samples, int]:
    samples, held = Samples(), 0
    clock = time.process_time

    def plain(h: Tensor, y: Tensor) -> None:
        start = clock()
        y.backward(gradient)
        samples.add("plain", clock() - start)

    def full(h: Tensor, y: Tensor) -> None:
        start = clock()
        full_backward([y], [gradient], [h])
        samples.add("full", clock() - start)

    def split(h: Tensor, y: Tensor) -> None:
        nonlocal held
        start = clock()
        _, later = split_backward([y], [gradient], [h])
        samples.add("I", clock() - start)
        held = later.held_bytes()
        start = clock()
        later.run()
        samples.add("W", clock() - start)

    def torch_split(h: Tensor, y: Tensor) -> None:
        start = clock()
        _, groups = stage_backward_input([y], [gradient], [h], iter(module.parameters()))
        samples.add("torch I", clock() - start)
        start = clock()
        stage_backward_weight(iter(module.parameters()), groups)
        samples.add("torch W", clock() - start)

    ways = [plain, full, split, torch_split]
    for round_number in range(-3, rounds):
        for offset in range(len(ways)):
            h = x.clone().requires_grad_()
            ways[(round_number + offset) % len(ways)](h, module(h))
        if round_number < 0:
            samples.parts.clear()
    return samples, held


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=list(CASES), action="append")
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    print(f"| case | plain us | I us | W us | {' | '.join(RATIOS)} | MB saved | MB between I and W |")
    print("|---" * 9 + "|")
    for name in options.case or CASES:
        build, hidden, rows, sequence = CASES[name]
        torch.manual_seed(0)
        module, x = build(), torch.randn(rows, sequence, hidden)
        rounds = options.rounds * (10 if hidden < 64 else 1)
        samples, held = measure(module, x, torch.randn(rows, sequence, hidden), rounds)
        figures = [f"{samples.median_us(part):.0f}" for part in ("plain", "I", "W")]
        ratios = [f"{samples.ratio(*parts):.3f}" for parts in RATIOS.values()]
        sizes = [f"{size / 1e6:.1f}" for size in (saved_bytes(module, x), held)]
        print("|", " | ".join([name, *figures, *ratios, *sizes]), "|")


if __name__ == "__main__":
    main()
