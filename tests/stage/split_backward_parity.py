"""Compares a split backward with plain autograd, leaf by leaf, over several microbatches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from d9d_lightning.stage.split_backward import WeightPass, full_backward, split_backward


@dataclass
class Case:
    """One microbatch: its inputs and its roots."""

    inputs: Sequence[Tensor]
    roots: Sequence[Tensor]
    gradients: Sequence[Tensor | None] | None = None


@dataclass
class Outcome:
    """What one way of running the backward has produced.

    ``events`` are the firings of post-accumulate hooks by weight number; ``reasons`` why a split was not made.
    """

    inputs: list[list[Tensor | None]] = field(default_factory=list)
    weights: list[Tensor | None] = field(default_factory=list)
    events: list[int] = field(default_factory=list)
    reasons: list[str | None] = field(default_factory=list)


WAYS = ("plain", "split", "full")
Build = Callable[[Sequence[Tensor], int], Case]


def gradients_for(roots: Sequence[Tensor], seed: int) -> list[Tensor]:
    """One random gradient for each root, of its shape and type; integer roots get one that must be ignored."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(
            root.shape,
            generator=generator,
            dtype=root.dtype if root.dtype.is_floating_point or root.dtype.is_complex else torch.float64,
        )
        for root in roots
    ]


def run_way(way: str, weights: Sequence[Tensor], build: Build, microbatches: int) -> Outcome:
    """Run ``build(weights, microbatch)`` and its backward: ``plain``, ``split`` or ``full``."""
    outcome = Outcome()
    handles = [
        weight.register_post_accumulate_grad_hook(lambda _, number=number: outcome.events.append(number))
        for number, weight in enumerate(weights)
        if weight.requires_grad
    ]
    for microbatch in range(microbatches):
        torch.manual_seed(microbatch)
        case = build(weights, microbatch)
        gradients = case.gradients if case.gradients is not None else gradients_for(case.roots, 99 + microbatch)
        if way == "plain":
            outcome.inputs.append(_plain(case, gradients))
        elif way == "full":
            outcome.inputs.append(full_backward(case.roots, gradients, case.inputs))
        else:
            outcome.inputs.append(_split(case, gradients, weights, outcome))
        assert all(tensor.grad is None for tensor in case.inputs), "a backward left .grad on an input"
    outcome.weights = [None if weight.grad is None else weight.grad.clone() for weight in weights]
    for weight in weights:
        weight.grad = None
    for handle in handles:
        handle.remove()
    return outcome


def _plain(case: Case, gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    live = [(r, g) for r, g in zip(case.roots, gradients, strict=True) if r.requires_grad and g is not None]
    if live:
        torch.autograd.backward([root for root, _ in live], [gradient.clone() for _, gradient in live])
    found = [None if tensor.grad is None else tensor.grad.clone() for tensor in case.inputs]
    for tensor in case.inputs:
        tensor.grad = None
    return found


def _split(
    case: Case, gradients: Sequence[Tensor | None], weights: Sequence[Tensor], outcome: Outcome
) -> list[Tensor | None]:
    before = [None if weight.grad is None else weight.grad.clone() for weight in weights]
    num_events = len(outcome.events)
    found, later = split_backward(case.roots, gradients, case.inputs)
    outcome.reasons.append(later.reason)
    if not later.is_full:
        assert len(outcome.events) == num_events, "the input pass accumulated a weight"
        assert_same(before, [weight.grad for weight in weights])
    kept = [None if gradient is None else gradient.clone() for gradient in found]
    case.roots = []
    _run(later, outcome)
    assert_same(kept, found)  # the weight pass must not write into what is on its way to the previous stage
    return found


def _run(later: WeightPass, outcome: Outcome) -> None:
    num_events = len(outcome.events)
    later.run()
    assert not later.is_full or len(outcome.events) == num_events, "a full pass accumulated a second time"


def assert_same(expected: Sequence[Tensor | None], actual: Sequence[Tensor | None]) -> None:
    """Equal presence, layout, type, shape and values, each leaf by itself."""
    for number, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert (left is None) == (right is None), f"tensor {number}: expected {left}, got {right}"
        if left is not None and right is not None:
            assert left.layout == right.layout and left.dtype == right.dtype, f"tensor {number}: {left} {right}"
            torch.testing.assert_close(right, left, msg=lambda text, number=number: f"tensor {number}: {text}")


def check(weights: Sequence[Tensor], build: Build, microbatches: int = 3) -> Outcome:
    """Fail unless the split and the full backward equal plain autograd; return the outcome of the split."""
    plain, split, full = (run_way(way, weights, build, microbatches) for way in WAYS)
    assert_equal_outcomes(plain, split)
    assert_equal_outcomes(plain, full)
    return split


def assert_equal_outcomes(expected: Outcome, actual: Outcome) -> None:
    """The same input gradients in every microbatch, the same weight gradients, the same number of accumulations."""
    for left, right in zip(expected.inputs, actual.inputs, strict=True):
        assert_same(left, right)
    assert_same(expected.weights, actual.weights)
    assert sorted(actual.events) == sorted(expected.events)


def weight(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Parameter:
    """A random weight."""
    generator = torch.Generator().manual_seed(seed + 17 * sum(shape))
    return nn.Parameter(torch.randn(shape, dtype=dtype, generator=generator))


def leaf(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """A random input that requires a gradient."""
    return torch.randn(shape, dtype=dtype, requires_grad=True)


def module_case(module: nn.Module, *shape: int, dtype: torch.dtype = torch.float64) -> tuple[list[nn.Parameter], Build]:
    """The weights of a module, and a stage that calls it on one random input."""

    def build(weights: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(*shape, dtype=dtype)
        result = module(x)
        return Case([x], [t for t in (result if isinstance(result, tuple) else (result,)) if isinstance(t, Tensor)])

    return list(module.parameters()), build
