"""Activation checkpointing that the strategy adds: less memory, and nothing else changes."""

from __future__ import annotations

import gc
import weakref
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn import functional as F

from d9d_lightning.errors import PartitionError
from d9d_lightning.schedule import SCHEDULES
from d9d_lightning.stage.recomputation import Recomputation, find_recomputed, matching_modules
from tests.parity import StepModule, assert_equal_training, train_pipeline, train_plain
from tests.parity_basics import CLASSES, WIDTH, pairs, tokens
from tests.stage.test_random_numbers import DropoutGpt, GptBlock, NoisyLayer, ThreeGenerators

COUNT = 4


class CountingLayer(nn.Module):
    """Keeps running averages, a counter, its last output and a generator of its own."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Tanh())
        self.register_buffer("seen", torch.zeros(()))
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: Tensor) -> Tensor:
        type(self).runs += 1
        self.calls += 1
        self.seen += x.detach().abs().mean()
        self.last = self.net(x)
        return x + self.last


class Counting(StepModule):
    """Layers whose state one call changes once."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(CountingLayer() for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.head(x), y)


@pytest.mark.parametrize("schedule", sorted(set(SCHEDULES) - {"forward_only"}))
def test_dropout_and_gradients_are_those_without_recomputation(schedule: str) -> None:
    """Under every schedule, layers that run again draw the same masks and give bit for bit the same gradients."""
    torch.manual_seed(0)
    module, batches = DropoutGpt(), [tokens(index) for index in range(2)]
    plain = train_pipeline(module, batches, COUNT, schedule=schedule, ranks=2)
    again = train_pipeline(module, batches, COUNT, schedule=schedule, ranks=2, recomputed={GptBlock})
    assert_equal_training(plain, again, exact=True)


@pytest.mark.parametrize("classes", [{NoisyLayer}, {nn.Sequential}, {NoisyLayer, nn.Linear}], ids=str)
def test_python_and_numpy_draw_the_same_numbers_again(classes: set[type[nn.Module]]) -> None:
    """Layers that draw from torch, Python and numpy see the same numbers in their second run, nested or not."""
    torch.manual_seed(0)
    module, batches = ThreeGenerators(), [pairs(index) for index in range(2)]
    plain = train_pipeline(module, batches, COUNT, schedule="zbv", ranks=2)
    again = train_pipeline(module, batches, COUNT, schedule="zbv", ranks=2, recomputed=classes)
    assert_equal_training(plain, again, exact=True)


def test_a_second_run_changes_no_state() -> None:
    """Running averages, buffers and counters count each microbatch once, and equal one device without recomputation."""
    torch.manual_seed(0)
    module, batches = Counting(), [pairs(index, 16) for index in range(2)]
    plain = train_plain(module, batches, COUNT)
    again = train_pipeline(module, batches, COUNT, schedule="zbv", ranks=2, recomputed={CountingLayer})
    assert_equal_training(plain, again)
    assert [layer.calls for layer in again.module.layers] == [layer.calls for layer in plain.module.layers]
    assert list(again.module.state_dict()) == list(module.state_dict())


def test_every_chosen_layer_runs_twice_for_each_microbatch() -> None:
    """With recomputation each layer runs once more for each microbatch than without."""
    torch.manual_seed(0)
    module, runs = Counting(), []
    for recomputed in ((), {CountingLayer}):
        CountingLayer.runs = 0
        train_pipeline(module, [pairs(0)], COUNT, schedule="1f1b", ranks=2, recomputed=recomputed)
        runs.append(CountingLayer.runs)
    assert runs[1] - runs[0] == len(module.layers) * COUNT


class Keeping(nn.Module):
    """Has an activation inside that only its own backward needs."""

    alive: ClassVar[list[weakref.ref[Tensor]]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.first(x).exp()
        Keeping.alive.append(weakref.ref(inner))
        return self.second(inner)


def test_activations_inside_are_freed_after_the_forward() -> None:
    """Between its two runs a module keeps none of the activations that it computed inside."""
    module = Keeping()
    kept = {}
    for recomputed in (False, True):
        Keeping.alive.clear()
        with Recomputation({"it": module} if recomputed else {}).installed():
            output = module(torch.ones(2, WIDTH, requires_grad=True))
        gc.collect()
        kept[recomputed] = Keeping.alive[0]() is not None
        output.sum().backward()
    assert kept == {False: True, True: False}
    assert "forward" not in vars(module)


@pytest.mark.parametrize(
    "policy",
    [
        {GptBlock},
        (GptBlock,),
        ModuleWrapPolicy({GptBlock}),
        lambda module, recurse, nonwrapped_numel: recurse or isinstance(module, GptBlock),
    ],
    ids=["set", "tuple", "policy", "function"],
)
def test_every_form_of_a_policy_chooses_the_same_modules(policy: Any) -> None:
    """A set of classes, torch's ``ModuleWrapPolicy`` and a function as FSDP takes it choose the same layers."""
    assert matching_modules(DropoutGpt(), policy) == [f"blocks.{index}" for index in range(6)]


def test_what_surrounds_units_is_recomputed_unit_by_unit() -> None:
    """A chosen container stands for the units in it, and modules outside of units are left alone."""
    module = DropoutGpt()
    units = {f"blocks.{index}": module.blocks[index] for index in range(6)}
    assert list(find_recomputed(module, units, ["blocks", "wte"])) == list(units)


def test_a_compiled_layer_is_recomputed_as_a_whole() -> None:
    """What lies inside a compiled layer stays in it; the compiled layer itself runs again."""
    module = DropoutGpt()
    module.blocks[0].compile(backend="eager")
    module.blocks[1] = torch.compile(module.blocks[1], backend="eager")
    units = {f"blocks.{index}": module.blocks[index] for index in range(6)}
    chosen = matching_modules(module, {nn.LayerNorm})
    assert {"blocks.0", "blocks.1"} < set(find_recomputed(module, units, chosen))


class RememberingLayer(nn.Module):
    """Puts what it computes into a list that is handed from layer to layer, and reads all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))

    def forward(self, x: Tensor, memory: list[Tensor]) -> Tensor:
        memory.append(self.net(x))
        return x + x * torch.stack(memory).mean(0)


class Remembering(StepModule):
    """Layers that share a list, as those of a transformer share a cache of keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RememberingLayer() for _ in range(8))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, memory = batch[0], []
        for layer in self.layers:
            x = layer(x, memory)
        return F.cross_entropy(self.head(x), batch[1])


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_layers_that_fill_a_list_run_again_as_the_first_time(schedule: str) -> None:
    """A layer that puts tensors into a list it is given sees the list as it was when it ran first."""
    torch.manual_seed(0)
    module, batches = Remembering(), [pairs(index) for index in range(2)]
    plain = train_pipeline(module, batches, COUNT, schedule=schedule, ranks=2)
    again = train_pipeline(module, batches, COUNT, schedule=schedule, ranks=2, recomputed={RememberingLayer})
    assert_equal_training(plain, again, exact=True)


def test_classes_that_the_module_does_not_have_are_an_error() -> None:
    """Classes that match nothing are named, with those that there are; one that matches is enough."""
    with pytest.raises(PartitionError, match=r"Bilinear.*DropoutGpt has no such module.*GptBlock"):
        matching_modules(DropoutGpt(), {nn.Bilinear})
    assert matching_modules(DropoutGpt(), {nn.Bilinear, GptBlock})
