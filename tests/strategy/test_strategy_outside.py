"""Hooks and callbacks that call the module itself, and steps that generate."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch

from d9d_lightning.errors import PartitionError
from d9d_lightning.strategy import meeting
from d9d_lightning.testing import collect_outcomes, run_distributed
from tests.strategy.strategy_cases import Classifier, fit, make_loader, pipeline


class Generates(Classifier):
    """Feeds its own outputs back in validation, and looks at an output when the fit ends."""

    def rollout(self, start: torch.Tensor, steps: int) -> torch.Tensor:
        state = start
        for _ in range(steps):
            logits = self.net(state)
            if float(logits.abs().max()) > 1e6:
                break
            state = torch.nn.functional.pad(logits, (0, 1))
        return state

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("rolled", self.rollout(batch[0], 3).mean())

    def on_train_end(self) -> None:
        with torch.no_grad():
            self.final = self.net(torch.ones(2, 4))


class Samples(L.Callback):
    """Calls the module after every epoch."""

    def __init__(self) -> None:
        self.samples: list[torch.Tensor] = []

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        pl_module.eval()
        with torch.no_grad():
            self.samples.append(pl_module.rollout(torch.ones(1, 4), 2).clone())
        pl_module.train()


def sample(strategy: Any, devices: int) -> dict[str, Any]:
    callback = Samples()
    module, trainer, seen = fit(strategy, Generates, val=make_loader(), devices=devices, callbacks=[callback])
    return {
        "samples": callback.samples,
        "final": module.final,
        "rolled": float(trainer.callback_metrics["rolled"]),
        "losses": seen.losses,
    }


def sample_on_two() -> dict[str, Any]:
    return sample(pipeline(), 2)


def test_the_module_can_be_called_outside_of_its_steps():
    """A callback that samples, a hook that looks at outputs and a step that branches equal one device."""
    one = sample("auto", 1)
    for rank in run_distributed(sample_on_two, 2, init_group=False):
        assert rank["losses"] == pytest.approx(one["losses"], abs=2e-6)
        assert rank["rolled"] == pytest.approx(one["rolled"], abs=2e-6)
        torch.testing.assert_close(rank["final"], one["final"], rtol=1e-4, atol=2e-6)
        torch.testing.assert_close(rank["samples"], one["samples"], rtol=1e-4, atol=2e-6)


class SamplesAlone(L.Callback):
    """The widespread mistake."""

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.is_global_zero:
            pl_module.net(torch.ones(1, 4))


def sample_alone() -> None:
    meeting.WAIT_SECONDS = 1.0
    fit(pipeline(), devices=2, callbacks=[SamplesAlone()])


def test_calling_the_module_on_rank_zero_only_is_an_error_and_no_hang():
    """``if trainer.is_global_zero: pl_module(x)`` says that every rank must call it."""
    outcomes = collect_outcomes(sample_alone, 2, init_group=False, timeout=60.0, fresh=True)
    assert all(outcome.failed and outcome.stack is None for outcome in outcomes)
    assert "called on 1 of 2 ranks only" in (outcomes[0].error or "") + outcomes[0].output


class TrainsProbe(L.Callback):
    """Trains a small model of its own on what the module gives, in every optimizer step."""

    def __init__(self) -> None:
        torch.manual_seed(3)
        self.probe = torch.nn.Linear(3, 1)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        with torch.no_grad():
            features = pl_module.net(torch.ones(2, 4))
        loss = self.probe(features).square().mean()
        (gradient,) = torch.autograd.grad(loss, [self.probe.bias], retain_graph=True)
        loss.backward()
        assert torch.equal(gradient, self.probe.bias.grad)
        with torch.no_grad():
            for parameter in self.probe.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None


def train_probe(strategy: Any, devices: int) -> list[torch.Tensor]:
    callback = TrainsProbe()
    fit(strategy, devices=devices, callbacks=[callback])
    return [parameter.detach() for parameter in callback.probe.parameters()]


def train_probe_on_two() -> list[torch.Tensor]:
    return train_probe(pipeline(), 2)


def test_a_callback_trains_a_model_of_its_own():
    """``backward()`` and ``autograd.grad`` of a callback's own graph do what they do on one device."""
    one = train_probe("auto", 1)
    for rank in run_distributed(train_probe_on_two, 2, init_group=False):
        torch.testing.assert_close(rank, one, rtol=1e-4, atol=2e-6)


class TrainsThroughModule(L.Callback):
    """Adds a loss of its own to the module's gradients."""

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        pl_module.net(torch.ones(2, 4)).square().mean().backward()


def train_through_module() -> None:
    with pytest.raises(PartitionError, match="uses backward between units"):
        fit(pipeline(), devices=2, callbacks=[TrainsThroughModule()])


def test_a_callback_cannot_send_gradients_into_the_module():
    """``pl_module(x).backward()`` in a callback would miss the parameters of other ranks, so every rank refuses it."""
    run_distributed(train_through_module, 2, init_group=False)
