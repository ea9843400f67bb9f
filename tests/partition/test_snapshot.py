"""State is remembered, compared and put back in the objects it was in."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from d9d_lightning.partition.snapshot import ModuleSnapshot, RandomState


class Meter:
    """A user's own object on an attribute."""

    def __init__(self) -> None:
        self.total = 0.0


class Stateful(nn.Module):
    running: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.BatchNorm1d(2)
        self.count = 0
        self.history: list[Any] = [1]
        self.options: dict[str, Any] = {"nested": {"seen": {1}}}
        self.queue: deque[int] = deque([1, 2], maxlen=2)
        self.meter = Meter()
        self.center = torch.zeros(2)
        self.generator = torch.Generator().manual_seed(1)
        self.register_buffer("running", torch.zeros(2))


def disturb(module: Stateful) -> None:
    """Change everything that a step may change."""
    module.count += 1
    module.history.append(2)
    module.options["nested"]["seen"].add(2)
    module.options["new"] = 1
    module.queue.append(3)
    module.meter.total += 1
    module.center.add_(1)
    module.running.add_(1)
    module.running = module.running * 2
    module.late = torch.ones(1)  # type: ignore[assignment]
    torch.rand(1, generator=module.generator)
    module.net(torch.rand(4, 2))
    random.random()
    np.random.rand()


def test_restoring_puts_everything_back() -> None:
    """Attributes, nested containers, own objects, tensors, buffers and generators hold again what they held."""
    module = Stateful()
    keep = (module.history, module.options, module.queue, module.meter, module.center, module.running)
    states = (torch.get_rng_state(), random.getstate(), np.random.get_state()[2], module.generator.get_state())
    snapshot = ModuleSnapshot(module)
    disturb(module)
    snapshot.restore()
    assert (module.count, module.history, module.options) == (0, [1], {"nested": {"seen": {1}}})
    assert list(module.queue) == [1, 2] and module.meter.total == 0 and not hasattr(module, "late")
    assert not module.center.any() and not module.running.any() and module.net.num_batches_tracked == 0
    now = (module.history, module.options, module.queue, module.meter, module.center, module.running)
    assert all(one is other for one, other in zip(keep, now, strict=True))
    assert torch.equal(states[0], torch.get_rng_state()) and torch.equal(states[3], module.generator.get_state())
    assert states[1] == random.getstate() and states[2] == np.random.get_state()[2]


def test_changes_are_named() -> None:
    """What differs is named by its qualified name, and what a unit keeps to itself is not."""
    module = Stateful()
    snapshot = ModuleSnapshot(module)
    assert set(snapshot.changed({"net": module.net})) == set()
    disturb(module)
    changed = set(snapshot.changed({"net": module.net}))
    snapshot.restore()
    names = {"count", "history", "options", "queue", "meter", "center", "running", "late", "generator"}
    assert changed == names


def test_names_can_be_kept() -> None:
    """State that shall last survives the restoring, content included."""
    module = Stateful()
    snapshot = ModuleSnapshot(module)
    disturb(module)
    snapshot.restore(keep={"count", "history", "late"})
    assert (module.count, module.history, module.meter.total) == (1, [1, 2], 0)
    assert module.late.item() == 1


class Plain(nn.Module):
    """Without tensors of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(2, 2)
        self.history: list[Any] = [1]
        self.options: dict[str, Any] = {"nested": [{1}]}
        self.meter = Meter()
        self.generator = torch.Generator().manual_seed(1)
        self.count = 0


def swap_fields(module: Plain) -> None:
    module.meter.__dict__ = {"total": 1.0}


def rename_the_last_field(module: Plain) -> None:
    module.__dict__["counted"] = module.__dict__.pop("count")


def fill_an_empty_field(module: Plain) -> None:
    module.net.register_forward_hook(lambda *args: None)


def empty_a_field(module: Plain) -> None:
    module.history.clear()


def change_deep_inside(module: Plain) -> None:
    module.options["nested"][0].add(2)


def replace_a_field(module: Plain) -> None:
    module.history = [1]


def draw_from_the_generator(module: Plain) -> None:
    torch.rand(1, generator=module.generator)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (swap_fields, {"meter"}),
        (rename_the_last_field, {"count", "counted"}),
        (fill_an_empty_field, {"net._forward_hooks"}),
        (empty_a_field, {"history"}),
        (change_deep_inside, {"options"}),
        (replace_a_field, {"history"}),
        (draw_from_the_generator, {"generator"}),
    ],
)
def test_a_single_change_is_named(change: Any, names: set[str]) -> None:
    """One change is found wherever it is, although modules that nothing touched are not looked at closely."""
    module = Plain()
    history, state = module.history, module.generator.get_state()
    snapshot = ModuleSnapshot(module)
    assert list(snapshot.changed({"net": module.net})) == []
    change(module)
    assert set(snapshot.changed({"net": module.net})) - {"net._forward_hooks_with_kwargs"} == names
    snapshot.restore()
    assert module.count == 0 and "counted" not in vars(module) and not module.net._forward_hooks
    assert module.history is history and history == [1] and module.options == {"nested": [{1}]}
    assert module.meter.total == 0 and torch.equal(module.generator.get_state(), state)


@pytest.mark.parametrize(
    ("draw", "kind"),
    [
        (lambda: torch.rand(1), "torch"),
        (lambda: random.random(), "python"),
        (lambda: np.random.rand(), "numpy"),
        (lambda: np.random.shuffle([1, 2, 3]), "numpy"),
    ],
)
def test_a_draw_is_seen_by_its_kind(draw: Any, kind: str) -> None:
    """Each global generator is told apart, and its state comes back."""
    state = RandomState()
    assert state.drawn_since() == frozenset()
    draw()
    assert state.drawn_since() == {kind}
    state.restore()
    assert state.drawn_since() == frozenset()


def test_the_second_of_two_normal_numbers_is_a_draw() -> None:
    """numpy and Python keep every second normal number apart; using it up counts."""
    np.random.seed(0)
    random.seed(0)
    np.random.randn()
    random.gauss(0, 1)
    state = RandomState()
    np.random.randn()
    random.gauss(0, 1)
    assert state.drawn_since() == {"numpy", "python"}
