"""One run of the step that records, and leaves no trace itself."""

from __future__ import annotations

import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.trace import TraceDepth, trace_step
from d9d_lightning.partition.units import canonical_units
from d9d_lightning.stage.randomness import set_position
from d9d_lightning.values import Trace


class Net(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.Dropout(dropout)) for _ in range(6))


def trace(root: Net, step: Any, seed: int | None = None, depth: TraceDepth = TraceDepth.SHAPES) -> Trace:
    def position(kinds: Iterable[str], unit: str, number: int) -> None:
        set_position(kinds, (seed or 0,), unit, number)

    interceptor = Interceptor(canonical_units(root))
    return trace_step(
        root,
        interceptor,
        lambda x: step(root, x),
        (torch.ones(2, 4),),
        {},
        depth=depth,
        position=None if seed is None else position,
    )


def drop_layers(root: Net, x: Tensor) -> Tensor:
    """Every layer is left out with a probability of one half, by two generators."""
    for layer in root.layers:
        if random.random() < 0.5 or torch.rand(()) < 0.1:
            continue
        x = x + layer(x)
    return x.sum()


@pytest.mark.parametrize("depth", list(TraceDepth))
def test_random_numbers_in_glue_are_those_of_the_position(depth: TraceDepth) -> None:
    """A trace at a position takes the branches that a replay at this position takes, whatever was drawn before."""
    paths = set()
    for disturbance in range(4):
        torch.manual_seed(disturbance)
        random.seed(disturbance)
        paths.add(tuple(call.unit for call in trace(Net(0.3), drop_layers, 5, depth).calls))
    taken: list[str] = []
    root = Net(0.3)
    set_position(("torch", "python"), (5,))
    for name, layer in root.layers.named_children():
        layer.register_forward_hook(lambda m, i, o, name=name: set_position(("torch",), (5,), f"layers.{name}", 0))
        layer.register_forward_pre_hook(lambda m, i, name=name: taken.append(f"layers.{name}"))
    drop_layers(root, torch.ones(2, 4))
    assert paths == {tuple(taken)}
    assert len({tuple(call.unit for call in trace(Net(), drop_layers, seed).calls) for seed in range(8)}) > 2


def test_a_trace_moves_no_generator() -> None:
    """The global random state after a trace is that before it, with a position or without."""
    root = Net(0.5)
    states = torch.get_rng_state(), random.getstate()
    for seed in (None, 3):
        trace(root, drop_layers, seed)
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()


def test_draws_are_told_apart_by_call() -> None:
    """Only the calls that drew are noted, and glue's draws at the entry too."""

    def step(root: Net, x: Tensor) -> Tensor:
        x = x + torch.rand(4)
        for index, layer in enumerate(root.layers):
            layer.train(index == 2)
            x = layer(x)
        return x.sum()

    made = trace(Net(0.5), step, 1)
    assert [call.draws for call in made.calls] == [frozenset({"torch"} if i == 2 else ()) for i in range(6)]
    assert made.entry_draws == {"torch"}
    assert trace(Net(), lambda root, x: root.layers[0](x).sum(), 1).entry_draws == frozenset()


@pytest.mark.parametrize("reentrant", [False, True])
def test_calls_know_their_recomputed_region(reentrant: bool) -> None:
    """Calls of one region carry its number, nested regions that of the outermost one, and others none."""

    def step(root: Net, x: Tensor) -> Tensor:
        def inner(x: Tensor) -> Tensor:
            return root.layers[2](checkpoint(root.layers[1], x, use_reentrant=reentrant))

        x = checkpoint(inner, root.layers[0](x), use_reentrant=reentrant)
        x = checkpoint(root.layers[3], x, use_reentrant=reentrant)
        return root.layers[4](x).sum()

    assert [call.region for call in trace(Net(), step).calls] == [None, 0, 0, 1, None]


def test_a_value_inside_a_reentrant_region_has_a_gradient() -> None:
    """A reentrant region computes without a graph; here what it makes can be sent with one."""

    def step(root: Net, x: Tensor) -> Tensor:
        return checkpoint(root.layers[1], root.layers[0](x), use_reentrant=True).sum()

    assert [call.values[0].requires_grad for call in trace(Net(), step).calls] == [True, True]


def test_a_differentiation_says_what_it_goes_through() -> None:
    """``torch.autograd.grad`` in glue is a call of its own, joined with the calls between its outputs and inputs."""

    def step(root: Net, x: Tensor) -> Tensor:
        y = root.layers[0](x.requires_grad_())
        z = root.layers[3](root.layers[2](root.layers[1](y)))
        return z.sum() + torch.autograd.grad(root.layers[4](z).sum(), z, create_graph=True)[0].square().sum()

    found = trace(Net(), step)
    assert [call.unit for call in found.calls] == [*(f"layers.{i}" for i in range(5)), "torch.autograd.grad"]
    assert found.joined == (frozenset({4, 5}),)


@pytest.mark.parametrize("what", ["backward", "a transform of torch.func"])
def test_differentiating_otherwise_between_units_is_refused(what: str) -> None:
    """``backward`` and functional transforms over units name the user's line and the remedy."""

    def step(root: Net, x: Tensor) -> Tensor:
        if what == "backward":
            root.layers[0](x).sum().backward()
        return torch.func.vmap(torch.func.jacrev(root.layers[1]))(x).sum()

    with pytest.raises(PartitionError, match=rf"test_trace\.py:\d+.*uses {what} between units.*units=\["):
        trace(Net(), step)
