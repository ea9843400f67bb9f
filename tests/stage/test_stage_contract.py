"""PipelineStage: the contract of the original stage, and its weak points mended."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import StageGradientError
from d9d_lightning.stage.planner import Planner
from d9d_lightning.stage.replay import Replay
from d9d_lightning.stage.script import make_script
from d9d_lightning.stage.stage import PipelineStage
from d9d_lightning.values import Microbatch, ValueId


class TwoStages(nn.Module):
    """Stage 0 gives a hidden state, an integer mask and a tensor that the loss does not use."""

    def __init__(self, freeze_first: bool = False) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 2)
        if freeze_first:
            self.first.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.second(self.first(x)), y)


def microbatch(size: int = 3) -> Microbatch:
    source = torch.Generator().manual_seed(0)
    batch = torch.randn(size, 4, generator=source), torch.randint(0, 2, (size,), generator=source)
    return Microbatch(0, size, (batch, 0))


def stages_of(module: TwoStages, piece: Microbatch, finish: Callable[..., Any] | None = None) -> list[PipelineStage]:
    def step(microbatch: Microbatch) -> Tensor:
        return module.training_step(*microbatch.args)

    planner = Planner(module)
    planner.place(step, piece, (0, 1))
    plan = planner.plan(step, planner.describe("training_step", [piece])[0])
    made = []
    for stage in range(2):
        replay = Replay(module, planner.interceptor, make_script(plan, stage), None)
        made.append(PipelineStage(stage, [replay], step, [piece], finish or (lambda _, loss: loss)))
    installed = planner.interceptor.installed()
    installed.__enter__()
    made[0].leave = lambda: installed.__exit__(None, None, None)  # type: ignore[attr-defined]
    return made


def test_2_6_backward_twice_is_a_value_error() -> None:
    """A second backward of a microbatch names the stage and the order that is expected."""
    first, second = stages_of(TwoStages(), microbatch())
    sent = first.forward(0, {})
    second.forward(0, sent)
    gradients = second.backward_full(0, {})
    first.backward_full(0, gradients)
    with pytest.raises(ValueError, match="microbatch 0 came twice"):
        first.backward_full(0, gradients)
    assert issubclass(StageGradientError, RuntimeError)


def test_2_6_weight_gradients_come_after_input_gradients() -> None:
    """W before I, or twice, is a ValueError that says so."""
    _, second = stages_of(TwoStages(), microbatch())
    with pytest.raises(ValueError, match="before its input gradients"):
        second.backward_weight(0)


def test_2_6_backward_of_a_forward_without_grad_is_explained() -> None:
    """A training action after a forward under no_grad says that the forward kept no graph."""
    with torch.no_grad():
        first, _ = stages_of(TwoStages(), microbatch())
        first.forward(0, {})
    assert first.is_clean
    with pytest.raises(ValueError, match="no_grad"):
        first.backward_full(0, {})


def test_2_6_a_frozen_first_stage_trains() -> None:
    """Where nothing of the first stage is trained, its output needs no gradient and the rest trains as always."""
    module = TwoStages(freeze_first=True)
    piece = microbatch()
    first, second = stages_of(module, piece)
    sent = first.forward(0, {})
    assert [tensor.requires_grad for tensor in sent.values()] == [False]
    second.forward(0, sent)
    assert second.backward_input(0, {}) == {}
    second.backward_weight(0)
    assert first.backward_input(0, {}) == {}
    first.backward_weight(0)
    first.leave()  # type: ignore[attr-defined]
    got = module.second.weight.grad
    module.zero_grad()
    module.training_step(*piece.args).backward()
    assert got is not None and module.second.weight.grad is not None
    torch.testing.assert_close(got, module.second.weight.grad)
    assert module.first.weight.grad is None


def test_2_6_a_missing_gradient_stays_none() -> None:
    """An output that no gradient comes back for leaves its weights without one, instead of raising."""
    module = TwoStages()
    first, _ = stages_of(module, microbatch())
    (value,) = first.forward(0, {})
    assert first.backward_full(0, {value: None}) == {}
    assert module.first.weight.grad is None


def test_2_6_inference_keeps_nothing() -> None:
    """After forwards without gradients no graph, input or output is held."""
    with torch.no_grad():
        first, second = stages_of(TwoStages(), microbatch())
        sent = first.forward(0, {})
        watched = weakref.ref(next(iter(sent.values())))
        second.forward(0, sent)
        del sent
    gc.collect()
    assert first.is_clean and second.is_clean and watched() is None


def test_2_6_the_graph_is_freed_by_the_backward() -> None:
    """What a stage kept of a microbatch is gone once its backward has run."""
    first, second = stages_of(TwoStages(), microbatch())
    sent = first.forward(0, {})
    second.forward(0, sent)
    assert not second.is_clean
    received = second.backward_input(0, {})
    second.backward_weight(0)
    first.backward_input(0, received)
    first.backward_weight(0)
    assert first.is_clean and second.is_clean


def test_2_6_received_tensors_get_no_gradient_attribute() -> None:
    """Gradients of what a stage received are returned, never left on the tensors."""
    first, second = stages_of(TwoStages(), microbatch())
    sent = first.forward(0, {})
    second.forward(0, sent)
    gradients = second.backward_full(0, {})
    assert set(gradients) == set(sent) == {ValueId(0, 0)}
    assert all(tensor.grad is None for tensor in sent.values())


def test_2_6_a_loss_of_any_scale_starts_the_backward() -> None:
    """What ``finish`` returns is what is differentiated."""
    module, piece = TwoStages(), microbatch()
    first, second = stages_of(module, piece, lambda _, loss: loss * 3.0)
    second.forward(0, first.forward(0, {}))
    first.backward_full(0, second.backward_full(0, {}))
    first.leave()  # type: ignore[attr-defined]
    got = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    (module.training_step(*piece.args) * 3.0).backward()
    assert got.keys() == {name for name, _ in module.named_parameters()}
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(got[name], parameter.grad)
