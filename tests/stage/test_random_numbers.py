"""Random numbers belong to a position of the step, so the number of stages does not change them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity import StepModule, Trained, train_pipeline
from tests.parity_basics import CLASSES, TOKENS, WIDTH, block, pairs, tokens
from tests.parity_networks import GptBlock

LAYOUTS = [("1f1b", 2), ("zbv", 2), ("zbv", 4)]
COUNT = 3


class DropoutGpt(StepModule):
    """Dropout in every layer and in glue; enough layers that none is split for eight stages."""

    checkpointed = False

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(GptBlock(dropout=0.1) for _ in range(6))
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, TOKENS))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        places = torch.arange(batch["tokens"].shape[1])
        x = F.dropout(self.wte(batch["tokens"]) + self.wpe(places), 0.1)
        for layer in self.blocks:
            x = checkpoint(layer, x, use_reentrant=False) if self.checkpointed else layer(x)
        return F.cross_entropy(self.head(F.dropout(x, 0.1)).flatten(0, 1), batch["targets"].flatten())


class CheckpointedDropoutGpt(DropoutGpt):
    """The same, recomputed in the backward pass."""

    checkpointed = True


class CheckpointedGlue(DropoutGpt):
    """Recomputed regions that hold a layer, and dropout of their own before and after it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        def region(layer: nn.Module, x: Tensor) -> Tensor:
            return x + torch.tanh(F.dropout(layer(F.dropout(x, 0.1)), 0.1))

        x = self.wte(batch["tokens"])
        for layer in self.blocks:
            x = checkpoint(region, layer, x, use_reentrant=False)
        return F.cross_entropy(self.head(x).flatten(0, 1), batch["targets"].flatten())


class NoisyLayer(nn.Module):
    """Draws from all three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.net = block()

    def forward(self, x: Tensor) -> Tensor:
        shift = random.random() + float(np.random.randn())
        return x + self.net(x) * (1 + 0.1 * shift) + 0.1 * torch.randn_like(x)


class ThreeGenerators(StepModule):
    """Draws of torch, Python and numpy, in layers and between them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(NoisyLayer() for _ in range(7))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        order = torch.randperm(WIDTH)
        for layer in self.layers:
            x = layer(x) + 0.1 * random.gauss(0, 1) + 0.1 * float(np.random.rand()) + 0.1 * torch.randn(WIDTH)
        return F.cross_entropy(self.head(x[:, order]), y)


class NoiseOnOtherStages(StepModule):
    """Glue draws in the shape of an activation that most stages do not have."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(block(), nn.Dropout(0.3)) for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = x + layer(x)
            x = x + 0.1 * torch.randn_like(x)
            x = x * torch.bernoulli(torch.full_like(x, 0.9)) + torch.zeros_like(x).uniform_(-0.1, 0.1)
        return F.cross_entropy(self.head(x) + 0.1 * torch.rand(CLASSES), y)


def train(kind: type[StepModule], schedule: str, ranks: int, *, accumulate: int = 1, steps: int = 3) -> Trained:
    """Three optimizer steps of a module that draws."""
    torch.manual_seed(0)
    batch = tokens if issubclass(kind, DropoutGpt) else pairs
    batches = [batch(i, 6) for i in range(steps * accumulate)]
    return train_pipeline(kind(), batches, COUNT, schedule=schedule, ranks=ranks, accumulate=accumulate)


def assert_equal_parameters(one: Trained, other: Trained, *, exact: bool = True) -> None:
    """To the last bit, or within 1e-6 where a sum in glue is taken in another order."""
    theirs = dict(other.module.named_parameters())
    for name, parameter in one.module.named_parameters():
        torch.testing.assert_close(parameter, theirs[name], rtol=0, atol=0 if exact else 1e-6, msg=name)
    torch.testing.assert_close(torch.tensor(one.losses), torch.tensor(other.losses), rtol=0, atol=0 if exact else 1e-6)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("kind", [DropoutGpt, CheckpointedDropoutGpt, CheckpointedGlue])
def test_dropout_is_the_same_at_any_number_of_stages(kind: type[StepModule], accumulate: int) -> None:
    """With dropout everywhere, recomputed or not, parameters at pipeline sizes 1, 2 and 4 are equal."""
    reference = train(kind, "gpipe", 1, accumulate=accumulate)
    for schedule, ranks in LAYOUTS[accumulate - 1 :]:
        got = train(kind, schedule, ranks, accumulate=accumulate)
        assert_equal_parameters(got, reference, exact=kind is not CheckpointedGlue)


def test_recomputation_draws_what_the_first_run_drew() -> None:
    """Activation checkpointing changes no dropout mask, so it changes no parameter."""
    assert_equal_parameters(train(CheckpointedDropoutGpt, "zbv", 2), train(DropoutGpt, "zbv", 2))


@pytest.mark.parametrize("kind", [ThreeGenerators, NoiseOnOtherStages])
@pytest.mark.parametrize(("schedule", "ranks"), LAYOUTS)
def test_every_generator_goes_on_past_skipped_units(kind: type[StepModule], schedule: str, ranks: int) -> None:
    """Draws in glue after a unit that ran elsewhere are those that follow the unit on one rank."""
    assert_equal_parameters(train(kind, schedule, ranks), train(kind, "gpipe", 1), exact=False)


@pytest.mark.parametrize("kind", [DropoutGpt, CheckpointedGlue, ThreeGenerators])
def test_the_global_generators_are_where_they_were(kind: type[StepModule]) -> None:
    """After a step torch, Python and numpy continue as if the step had drawn nothing."""
    torch.manual_seed(5)
    module = kind()
    random.seed(6)
    np.random.seed(7)
    expected = (torch.rand(3).tolist(), random.random(), float(np.random.rand()))
    torch.manual_seed(5)
    kind()
    random.seed(6)
    np.random.seed(7)
    batch = tokens if issubclass(kind, DropoutGpt) else pairs
    train_pipeline(module, [batch(0, 6), batch(1, 6)], COUNT, schedule="zbv", ranks=2)
    assert (torch.rand(3).tolist(), random.random(), float(np.random.rand())) == expected


def test_no_two_microbatches_share_their_draws() -> None:
    """Equal samples get different masks in another microbatch and in another batch."""

    class Drops(StepModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Sequential(block(), nn.Dropout(0.5)) for _ in range(2))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x = batch[0]
            for layer in self.layers:
                x = layer(x)
            return x.mean()

    ones = (torch.ones(4, WIDTH), torch.zeros(4))
    run = train_pipeline(Drops(), [ones, ones], 4, schedule="zbv", ranks=1)
    assert len(set(run.losses[0])) == 4
    frozen = train_pipeline(
        Drops(), [ones, ones], 1, schedule="zbv", ranks=1, make_optimizer=lambda p: torch.optim.SGD(p, lr=0.0)
    )
    assert frozen.losses[0] != frozen.losses[1]
