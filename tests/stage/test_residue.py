"""A step leaves nothing behind, and holds no more forward graphs than its schedule needs."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor, nn

from d9d_lightning.schedule import build_program
from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.stage import PipelineStage
from d9d_lightning.testing.pipeline import LocalPipeline, LocalRun
from d9d_lightning.values import Microbatch
from tests.parity import StepModule, microbatches_of
from tests.parity_basics import Mlp, Residual, pairs
from tests.parity_modules import CASES
from tests.parity_networks import Checkpointed, CheckpointedRegion

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")


class Harness:
    """A module and its pipeline, run batch by batch."""

    def __init__(self, module: nn.Module, schedule: str, ranks: int, count: int) -> None:
        self.module, self.schedule, self.ranks, self.count = module, schedule, ranks, count
        self.pipeline = LocalPipeline(module, Planner(module, [(module, "log")]))

    def run(self, batch: Any) -> LocalRun:
        """One batch, forward and backward."""
        pieces = microbatches_of(batch, self.count)
        program = build_program(self.schedule, pp_size=self.ranks, num_microbatches=len(pieces))

        def finish(piece: Microbatch, output: Any) -> Tensor:
            return output["loss"] if isinstance(output, dict) else output

        return self.pipeline.run(lambda piece: self.module.training_step(*piece.args), pieces, program, finish)  # type: ignore[operator]


def attributes_of(module: nn.Module) -> dict[str, frozenset[str]]:
    """Names in the ``__dict__`` of every submodule."""
    return {name: frozenset(vars(inner)) for name, inner in module.named_modules()}


def hooks_of(module: nn.Module) -> list[int]:
    """Number of hooks of every kind on every submodule."""
    return [len(getattr(inner, kind)) for inner in module.modules() for kind in HOOKS]


def live_tensors() -> int:
    """Number of tensors that Python knows of."""
    gc.collect()
    return sum(1 for item in gc.get_objects() if issubclass(type(item), torch.Tensor))


NAMES = ["Mlp", "SharedHeadGpt", "BatchNormNet", "Checkpointed", "CheckpointedReentrant", "Structures", "RawParameters"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zbv"])
def test_five_steps_leave_nothing(name: str, schedule: str) -> None:
    """Attributes, hooks, patched functions and stage caches are after each of five steps what they were before."""
    torch.manual_seed(0)
    harness = Harness(CASES[name].make(), schedule, 2, 4)
    attributes, hooks = attributes_of(harness.module), hooks_of(harness.module)
    patched = {key: value for key, value in vars(torch.utils.checkpoint).items() if callable(value)}
    for index in range(5):
        run = harness.run(CASES[name].batch(index))
        assert all(stage.is_clean for stage in run.stages)
        assert attributes_of(harness.module) == attributes
        assert hooks_of(harness.module) == hooks
    assert {key: value for key, value in vars(torch.utils.checkpoint).items() if callable(value)} == patched


@pytest.mark.parametrize("name", ["SharedHeadGpt", "CheckpointedRegion"])
def test_the_number_of_live_tensors_does_not_grow(name: str) -> None:
    """After the second step no further tensor stays alive."""
    torch.manual_seed(0)
    harness = Harness(CASES[name].make(), "zbv", 2, 4)
    counts = []
    for _ in range(2):
        for index in range(2):
            harness.run(CASES[name].batch(index))
        harness.module.zero_grad()
        counts.append(live_tensors())
    assert counts[1] <= counts[0]


@pytest.mark.parametrize("kind", [Residual, Checkpointed, CheckpointedRegion])
def test_what_crosses_a_border_dies_with_the_step(kind: type[StepModule], monkeypatch: pytest.MonkeyPatch) -> None:
    """No boundary tensor keeps a gradient, and none outlives the step by so much as a reference cycle."""
    torch.manual_seed(0)
    harness = Harness(kind(), "zbv", 2, 3)
    borders: list[Tensor] = []
    original = PipelineStage.forward

    def watch(stage: PipelineStage, microbatch: int, received: Any) -> Any:
        sent = original(stage, microbatch, received)
        graph = stage._graphs[microbatch]
        borders.extend([*received.values(), *sent.values(), *graph.inputs.values(), *graph.made.values()])
        return sent

    monkeypatch.setattr(PipelineStage, "forward", watch)
    gc.collect()
    gc.disable()
    try:
        harness.run(pairs(0))
        assert all(not tensor.is_leaf or tensor.grad is None for tensor in borders)
        references = [weakref.ref(tensor) for tensor in borders]
        borders.clear()
        assert references
        assert all(reference() is None for reference in references)
    finally:
        gc.enable()


def test_a_module_is_copied_and_pickled_between_steps() -> None:
    """Between two steps the module is an ordinary module: a copy of it steps on as the original does."""
    torch.manual_seed(0)
    harness = Harness(Mlp(), "zbv", 2, 4)
    harness.run(pairs(0))
    copied, pickled = copy.deepcopy(harness.module), pickle.loads(pickle.dumps(harness.module))
    harness.module.zero_grad()
    harness.run(pairs(1))
    for other in (copied, pickled):
        assert not any("forward" in names or "_call_impl" in names for names in attributes_of(other).values())
        other.zero_grad()
        Harness(other, "1f1b", 2, 4).run(pairs(1))
        for one, two in zip(harness.module.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(one.grad, two.grad, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("count", [4, 8])
def test_one_forward_one_backward_holds_few_graphs(ranks: int, count: int) -> None:
    """At its peak rank r of 1f1b holds p - r forward graphs, where gpipe holds one for every microbatch."""
    torch.manual_seed(0)
    module = Residual()
    one = Harness(module, "1f1b", ranks, count).run(pairs(0)).peak_graphs
    other = Harness(module, "gpipe", ranks, count).run(pairs(0)).peak_graphs
    assert one == [min(count, ranks - rank) for rank in range(ranks)]
    assert other == [count] * ranks


def test_one_forward_one_backward_keeps_less_memory() -> None:
    """The bytes that autograd saves at the peak of a step are fewer under 1f1b than under gpipe."""

    def peak(schedule: str) -> int:
        torch.manual_seed(0)
        live, most = 0, 0
        held: dict[int, int] = {}

        def release(key: int) -> None:
            nonlocal live
            live -= held.pop(key)

        def pack(tensor: Tensor) -> Tensor:
            nonlocal live, most
            saved = tensor.detach()
            held[id(saved)] = tensor.numel() * tensor.element_size()
            live += held[id(saved)]
            most = max(most, live)
            weakref.finalize(saved, release, id(saved))
            return saved

        harness = Harness(Residual(), schedule, 4, 8)
        harness.pipeline.planner.place(
            lambda piece: harness.module.training_step(*piece.args),  # type: ignore[operator]
            microbatches_of(pairs(0, 64), 8)[0],
            (0, 1, 2, 3),
        )
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            harness.run(pairs(0, 64))
        return most

    assert peak("1f1b") < 0.7 * peak("gpipe")
