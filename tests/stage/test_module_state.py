"""State that users keep beside parameters and buffers: generators of any kind, helper objects, weights given anew."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import PartitionError
from d9d_lightning.stage.world import adopt_state, export_state
from tests.parity import StepModule, assert_equal_training, train_pipeline, train_plain
from tests.stage.test_private_world import Base, pairs


class Jitter:
    """A helper object that is called, counts its calls and draws from generators of two kinds."""

    def __init__(self) -> None:
        self.calls = 0
        self.source = numpy.random.default_rng(5)
        self.others = {"python": random.Random(2), "old": numpy.random.RandomState(3)}

    def __call__(self, x: Tensor) -> Tensor:
        self.calls += 1
        scale = self.source.uniform(0.8, 1.2) + self.others["python"].random() * float(self.others["old"].rand())  # type: ignore[attr-defined]
        return x * scale + 0.01 * self.calls


class CalledHelper(Base):
    """Augments its batch with a helper object."""

    def __init__(self) -> None:
        super().__init__()
        self.jitter = Jitter()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(self.jitter(x))), y)


class AverageByData(Base):
    """The weights of a second network are given anew by ``p.data = ...`` at the start of the step."""

    def __init__(self) -> None:
        super().__init__()
        self.average = nn.ModuleList(nn.Linear(8, 8) for _ in range(6)).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for kept, block in zip(self.average, self.blocks, strict=True):
            kept.weight.data = kept.weight.data * 0.9 + block[0].weight.data * 0.1
        with torch.no_grad():
            target = x
            for kept in self.average:
                target = torch.tanh(kept(target))
        out = self.body(x)
        return F.cross_entropy(self.head(out), y) + F.mse_loss(out, target)


class Dispatch(Base):
    """Each sample goes to the layer that a gate chooses, in glue: the shapes differ in every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 6)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, block in enumerate(self.blocks):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                out[rows] = weight[rows, None] * block(x[rows])
        return F.cross_entropy(self.head(x + out), y)


class ParametersOnly(StepModule):
    """No submodule at all."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(8, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(torch.tanh(x @ self.first) @ self.second, y)


class NoisyLayer(nn.Module):
    """A layer that draws from the generator it was given."""

    def __init__(self, source: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x)) * float(self.source.uniform(0.9, 1.1))


class OwnGenerators(Base):
    """Every layer has a generator of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(NoisyLayer(numpy.random.default_rng(seed)) for seed in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)


class OneGenerator(OwnGenerators):
    """All layers and the module itself have the same one."""

    def __init__(self) -> None:
        super().__init__()
        self.source = numpy.random.default_rng(1)
        self.blocks = nn.ModuleList(NoisyLayer(self.source) for _ in range(6))


@pytest.mark.parametrize("kind", [CalledHelper, AverageByData, Dispatch, ParametersOnly, OwnGenerators])
@pytest.mark.parametrize(("schedule", "ranks"), [("zbv", 2), ("1f1b", 3)])
def test_training_equals_one_device(kind: Callable[[], StepModule], schedule: str, ranks: int) -> None:
    """Whatever a module keeps and however it writes it, training equals one device."""
    torch.manual_seed(0)
    model = kind()
    expected = train_plain(model, [pairs(i) for i in range(3)], 4)
    got = train_pipeline(model, [pairs(i) for i in range(3)], 4, schedule=schedule, ranks=ranks)
    assert_equal_training(expected, got)


def test_a_generator_of_layers_and_step_alike_is_refused() -> None:
    """Stages that skip a layer could not know how far it moves a generator that they use too: the units are named."""
    with pytest.raises(PartitionError, match=r"'blocks\.0'.*draw from the random generator 'source'.*of its own"):
        train_pipeline(OneGenerator(), [pairs(0)], 4, schedule="zbv", ranks=2)


def test_generators_inside_helpers_reach_other_ranks() -> None:
    """The state that the loss owner hands out holds generators of torch, Python and numpy wherever they lie."""
    source, target = CalledHelper(), CalledHelper()
    for module in (source, target):
        module.jitter.others["torch"] = torch.Generator().manual_seed(1)
    source.jitter(torch.zeros(1))
    torch.rand(1, generator=source.jitter.others["torch"])
    adopt_state(target, export_state(source, ["jitter"]))
    assert torch.equal(source.jitter(torch.ones(2)), target.jitter(torch.ones(2)))
    drawn = [torch.rand(2, generator=module.jitter.others["torch"]) for module in (source, target)]
    assert torch.equal(*drawn)
