"""Comparing a pipeline in one process with plain autograd, parameter by parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.runtime.batch import split_batch
from d9d_lightning.schedule import build_program
from d9d_lightning.stage.planner import Planner
from d9d_lightning.testing.pipeline import LocalPipeline, LocalRun
from d9d_lightning.values import Microbatch

Step = Callable[..., Any]
MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class StepModule(nn.Module):
    """A module with a ``training_step(batch, batch_idx)``, as a LightningModule has, and a log."""

    def __init__(self) -> None:
        super().__init__()
        self.logged: list[tuple[str, float]] = []

    def log(self, name: str, value: Any) -> None:
        self.logged.append((name, float(torch.as_tensor(value).detach())))


def microbatches_of(batch: Any, count: int, batch_index: int = 0) -> list[Microbatch]:
    """Slices of one batch."""
    split = split_batch(batch, count)
    return [
        Microbatch(index, size, (piece, batch_index), (batch_index, index))
        for index, (piece, size) in enumerate(zip(split.microbatches, split.sizes, strict=True))
    ]


def loss_of(output: Any) -> Tensor:
    """The scalar of what a step returned."""
    loss = output["loss"] if isinstance(output, dict) else output
    assert isinstance(loss, Tensor)
    return loss


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Plain gradient descent."""
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW with its default learning rate."""
    return torch.optim.AdamW(parameters, lr=1e-3)


@dataclass
class Trained:
    """A module after a few optimizer steps, with the gradients of each, and for each the loss of every microbatch."""

    module: nn.Module
    losses: list[list[float]]
    gradients: list[dict[str, Tensor | None]]
    runs: list[LocalRun]
    planner: Planner | None = None


def _snapshot(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in module.named_parameters()}


def train_plain(
    module: nn.Module, batches: Sequence[Any], count: int, make_optimizer: MakeOptimizer = sgd, accumulate: int = 1
) -> Trained:
    """One device that accumulates the same microbatches."""
    result = Trained(copy.deepcopy(module), [], [], [])
    optimizer = make_optimizer([p for p in result.module.parameters() if p.requires_grad])
    for index, batch in enumerate(batches):
        if index % accumulate == 0:
            optimizer.zero_grad()
        pieces = microbatches_of(batch, count, index)
        total = sum(piece.size for piece in pieces)
        losses = []
        for piece in pieces:
            loss = loss_of(result.module.training_step(*piece.args))  # type: ignore[operator]
            (loss * (piece.size / total / accumulate)).backward()
            losses.append(float(loss.detach()))
        result.losses.append(losses)
        result.gradients.append(_snapshot(result.module))
        if (index + 1) % accumulate == 0:
            optimizer.step()
    return result


def train_pipeline(
    module: nn.Module,
    batches: Sequence[Any],
    count: int,
    *,
    schedule: str,
    ranks: int,
    make_optimizer: MakeOptimizer = sgd,
    accumulate: int = 1,
    recomputed: Any = (),
    **planner: Any,
) -> Trained:
    """All ranks of a pipeline in this process."""
    own = copy.deepcopy(module)
    sinks = [(own, "log")] if hasattr(own, "log") else []
    result = Trained(own, [], [], [], Planner(own, sinks, **planner))
    pipeline = LocalPipeline(own, result.planner, recomputed)
    optimizer = make_optimizer([p for p in own.parameters() if p.requires_grad])
    for index, batch in enumerate(batches):
        if index % accumulate == 0:
            optimizer.zero_grad()
        pieces = microbatches_of(batch, count, index)
        total = sum(piece.size for piece in pieces)
        losses: dict[int, float] = {}

        def finish(piece: Microbatch, output: Any, losses: dict[int, float] = losses, total: int = total) -> Tensor:
            loss = loss_of(output)
            losses[piece.index] = float(loss.detach())
            return loss * (piece.size / total / accumulate)

        program = build_program(schedule, pp_size=ranks, num_microbatches=len(pieces))
        run = pipeline.run(lambda piece: own.training_step(*piece.args), pieces, program, finish)  # type: ignore[operator]
        result.runs.append(run)
        result.losses.append([losses[i] for i in range(len(pieces))])
        result.gradients.append(_snapshot(own))
        if (index + 1) % accumulate == 0:
            optimizer.step()
    return result


def assert_equal_training(expected: Trained, got: Trained, *, exact: bool = False) -> None:
    """Losses, every gradient of every step, and every parameter and buffer agree."""
    for step, (one, other) in enumerate(zip(expected.losses, got.losses, strict=True)):
        torch.testing.assert_close(
            torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-6, msg=f"losses of step {step}"
        )
    for step, (ours, theirs) in enumerate(zip(got.gradients, expected.gradients, strict=True)):
        assert ours.keys() == theirs.keys()
        for name in theirs:
            _assert_tensor(f"gradient of {name} in step {step}", theirs[name], ours[name], exact)
    initial = dict(expected.module.named_parameters())
    for name, parameter in got.module.named_parameters():
        _assert_tensor(f"parameter {name}", initial[name].detach(), parameter.detach(), exact)
    buffers = dict(expected.module.named_buffers())
    for name, buffer in got.module.named_buffers():
        _assert_tensor(f"buffer {name}", buffers[name], buffer, exact)
    for run in got.runs:
        assert all(stage.is_clean for stage in run.stages)


def _assert_tensor(what: str, expected: Tensor | None, got: Tensor | None, exact: bool) -> None:
    assert (expected is None) == (got is None), f"{what}: expected {expected}, got {got}"
    if expected is None or got is None:
        return
    expected, got = (t.to_dense() if t.layout is not torch.strided else t for t in (expected, got))
    assert expected.shape == got.shape, what
    if exact or not expected.dtype.is_floating_point:
        assert torch.equal(expected, got), what
        return
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    error = float((expected - got).abs().max()) if expected.numel() else 0.0
    assert error <= 1e-5 * largest + 1e-9, f"{what}: differs by {error:.3g}, largest {largest:.3g}"


def assert_same_outcome(
    before: nn.Module, expected: Trained, got: Trained, *, unseen: tuple[str, slice] | None = None
) -> None:
    """Every parameter and buffer agrees, each within 1e-5 of its largest value and 1e-3 of its update.

    Args:
        before: The module before training.
        expected: One device.
        got: A pipeline.
        unseen: How names of parameters end of which a slice has no effect on the loss. There both must have gradients
            that are rounding noise, which is not compared.
    """
    initial, theirs = dict(before.named_parameters()), dict(expected.module.named_parameters())
    for name, parameter in got.module.named_parameters():
        three = [theirs[name].detach(), parameter.detach(), initial[name].detach()]
        if unseen is not None and name.endswith(unseen[0]):
            assert_noise(name, expected, unseen[1])
            assert_noise(name, got, unseen[1])
            seen = torch.ones(parameter.shape, dtype=torch.bool)
            seen[unseen[1]] = False
            three = [tensor[seen] for tensor in three]
        assert_close(f"parameter {name}", *three)
    buffers = dict(expected.module.named_buffers())
    for name, buffer in got.module.named_buffers():
        assert_close(f"buffer {name}", buffers[name], buffer, torch.zeros_like(buffer))
    assert all(stage.is_clean for run in got.runs for stage in run.stages)


def assert_noise(name: str, trained: Trained, part: slice) -> None:
    """The gradients of a part of a parameter are nothing beside those of the model."""
    for step, gradients in enumerate(trained.gradients):
        largest = max(float(gradient.abs().max()) for gradient in gradients.values() if gradient is not None)
        gradient = gradients[name]
        assert gradient is not None and float(gradient[part].abs().max()) <= 1e-7 * largest, f"{name} in step {step}"


def assert_close(what: str, expected: Tensor, got: Tensor, before: Tensor) -> None:
    """Within 1e-5 of the tensor's largest value and 1e-3 of its update, or of two units in the last place of it."""
    if not expected.dtype.is_floating_point or not expected.numel():
        assert torch.equal(expected, got), what
        return
    largest, error = float(expected.abs().max()), float((expected - got).abs().max())
    update = float((expected - before).abs().max())
    assert error <= 1e-5 * largest, f"{what}: differs by {error:.3g}, largest {largest:.3g}"
    resolution = 2 * torch.finfo(expected.dtype).eps * largest
    assert error <= max(1e-3 * update, resolution), f"{what}: differs by {error:.3g}, its update is {update:.3g}"
