"""Random graphs of shared weights, reuse and multi-output operations against plain autograd."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.stage.split_backward_parity import WAYS, Build, Case, Outcome, assert_equal_outcomes, run_way

SIZE = 3


class Swap(torch.autograd.Function):
    """Two outputs that mix both arguments; the second one is often unused, so its gradient is undefined."""

    @staticmethod
    def forward(ctx, left: Tensor, right: Tensor):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(left, right)
        return left * right, left - right

    @staticmethod
    def backward(ctx, product: Tensor | None, difference: Tensor | None):
        left, right = ctx.saved_tensors
        zero = torch.zeros_like(left)
        p, d = (zero if product is None else product), (zero if difference is None else difference)
        return p * right + d, p * left - d


def _write(a: Tensor, b: Tensor) -> list[Tensor]:
    target = a * 1.0
    target[0] = b[1]
    target[:, 1].mul_(b[0])
    return [target]


OPERATIONS: list[Callable[[Tensor, Tensor, Tensor], list[Tensor]]] = [
    lambda a, b, c: [a @ b],
    lambda a, b, c: [torch.addmm(c, a, b, beta=0.5)],
    lambda a, b, c: [torch.addmm(c[0], a, b.t())],
    lambda a, b, c: [torch.baddbmm(c[None], a[None], b[None], alpha=0.5)[0]],
    lambda a, b, c: [F.linear(a, b, c[0])],
    lambda a, b, c: [a + b.t()],
    lambda a, b, c: [a - b[0], torch.sub(b, a, alpha=0.5)],
    lambda a, b, c: [a * b[:, :1]],
    lambda a, b, c: [a / (2 + b**2)],
    lambda a, b, c: [F.layer_norm(a, (SIZE,), b[0], c[1])],
    lambda a, b, c: list(Swap.apply(a, b)),
    lambda a, b, c: [torch.cat([a[:1], b[1:]]), torch.stack([a, c]).mean(0)],
    lambda a, b, c: [torch.cat([a, b], dim=1).chunk(2, dim=1)[i] for i in range(2)],
    lambda a, b, c: [torch.where(a > 0, b, c)],
    lambda a, b, c: [a.sort(dim=0)[0], torch.lerp(b, c, a.sigmoid())],
    lambda a, b, c: [F.conv1d(a[None], b[:, :, None], c[0])[0]],
    lambda a, b, c: [torch.einsum("ij,kj,ik->ik", a, b, c)],
    lambda a, b, c: [a.tanh()],
    lambda a, b, c: [a.detach() * b],
    lambda a, b, c: _write(a, b),
]


def random_graph(seed: int, fired: Counter[str]) -> tuple[list[Tensor], Build]:
    """New weights, and a function that builds the same random graph over them in every microbatch."""
    plan = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    weights = [torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator) for _ in range(plan.randint(1, 4))]
    for number, weight in enumerate(weights):
        weight.requires_grad_(plan.random() < 0.85)
        if weight.requires_grad and plan.random() < 0.3:
            _observe(weight, f"weight {number}", fired)

    def build(weights: Sequence[Tensor], microbatch: int) -> Case:
        dice = random.Random(seed)
        inputs = [torch.randn(SIZE, SIZE, dtype=torch.float64) for _ in range(dice.randint(1, 3))]
        for number, tensor in enumerate(inputs):
            tensor.requires_grad_(number == 0 or dice.random() < 0.8)
        values: list[Tensor] = [*inputs, *weights]
        for step in range(dice.randint(1, 12)):
            arguments = dice.choice(values[-4:]), dice.choice(values), dice.choice(values)
            for result in dice.choice(OPERATIONS)(*arguments):
                value = result.tanh() if dice.random() < 0.5 else result / 2
                if value.requires_grad and dice.random() < 0.3:
                    _observe(value, f"value {step}", fired)
                values.append(value)
        roots = [dice.choice(values) for _ in range(dice.randint(0, 2))] + [values[-1]]
        gradients = [None if dice.random() < 0.15 else torch.randn_like(root) for root in roots]
        return Case(inputs, roots, gradients)

    return weights, build


def _observe(tensor: Tensor, name: str, fired: Counter[str]) -> None:
    def count_and_scale(gradient: Tensor) -> Tensor:
        fired[name] += 1
        return gradient * 0.9

    tensor.register_hook(count_and_scale)


def compare_ways(seed: int, microbatches: int) -> Outcome:
    """Run one random graph in every way, each with new weights and hooks; return the outcome of the split."""
    outcomes, counts = {}, {}
    for way in WAYS:
        counts[way] = Counter()
        outcomes[way] = run_way(way, *random_graph(seed, counts[way]), microbatches)
    for way in WAYS[1:]:
        try:
            assert_equal_outcomes(outcomes["plain"], outcomes[way])
            assert counts[way] == counts["plain"], f"tensor hooks fired {counts[way]}, plainly {counts['plain']}"
        except AssertionError as error:
            raise AssertionError(f"graph {seed}, {way}: {error}") from error
    return outcomes["split"]


@pytest.mark.parametrize("block", range(4))
def test_random_graphs(block: int) -> None:
    """On random graphs the two parts give the gradients, and fire every tensor hook as often, as plain autograd."""
    for seed in range(60 * block, 60 * block + 60):
        assert compare_ways(seed, microbatches=2).reasons == [None, None]


@pytest.mark.full
def test_many_more_random_graphs() -> None:
    """Two thousand further random graphs are exact."""
    for seed in range(1000, 3000):
        compare_ways(seed, microbatches=1)
