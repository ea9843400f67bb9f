"""Whatever goes wrong on one rank of a pipeline, every rank raises or ends, with the true error."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from d9d_lightning.testing import collect_outcomes
from tests.strategy.strategy_cases import Classifier, fit, make_loader, pipeline


class BadLabelsError(ValueError):
    """What a user's code raises."""


class FailsInStep(Classifier):
    """Raises in the loss, which only one rank computes."""

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss_of(batch)
        if self.trainer.global_step == 2:
            raise BadLabelsError("label 77 is out of range")
        return loss


class ReturnsNothing(Classifier):
    """Skips a batch in the middle."""

    def training_step(self, batch, batch_idx):
        loss, _ = self.loss_of(batch)
        return None if batch_idx == 1 else loss


class FailsInHook(Classifier):
    """Raises on the rank that does not own the loss, outside of any step."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_rank == 1:
            raise BadLabelsError("the hook of rank 1")


class Anomaly(Classifier):
    """The gradient of its last activation is not a number, after two good steps."""

    def training_step(self, batch, batch_idx):
        loss, logits = self.loss_of(batch)
        return loss + (logits * 0).sum().sqrt() if self.trainer.global_step == 2 else loss


class Dies(Classifier):
    """Its process ends without a word."""

    def on_train_batch_start(self, batch, batch_idx):
        if self.trainer.global_rank == 1 and batch_idx == 2:
            os._exit(17)


def train(kind: type[Classifier]) -> None:
    fit(pipeline(), kind, devices=2)


def run(kind: type[Classifier]):
    return collect_outcomes(train, 2, (kind,), init_group=False, timeout=60.0, grace=25.0)


def told(outcome) -> str:
    return f"{outcome.error or ''}{outcome.output}{outcome.stack or ''}"


@pytest.mark.parametrize(
    ("kind", "message"),
    [(FailsInStep, "label 77 is out of range"), (ReturnsNothing, "training_step returned None")],
)
def test_an_error_in_a_step_is_raised_on_every_rank(kind, message):
    """Both ranks raise, and both show the user's own message."""
    outcomes = run(kind)
    assert all(outcome.error is not None for outcome in outcomes), [told(outcome) for outcome in outcomes]
    assert all(message in told(outcome) for outcome in outcomes)


@pytest.mark.parametrize(("kind", "message"), [(FailsInHook, "the hook of rank 1"), (Dies, "is gone")])
def test_a_rank_that_fails_alone_takes_the_other_with_it(kind, message):
    """A rank that fails outside of a step, or vanishes, ends the other one within seconds, which says why."""
    outcomes = run(kind)
    assert all(outcome.stack is None for outcome in outcomes), "a rank hung"
    assert all(outcome.failed for outcome in outcomes)
    assert message in told(outcomes[0])


def train_into_anomaly() -> None:
    fit(pipeline(), Anomaly, devices=2, detect_anomaly=True)


def test_an_anomaly_is_named_on_every_rank():
    """``detect_anomaly=True`` raises on both ranks and names the function whose gradient is not a number."""
    with pytest.raises(RuntimeError, match="MulBackward0' returned nan values"):
        fit("auto", Anomaly, detect_anomaly=True)
    outcomes = collect_outcomes(train_into_anomaly, 2, init_group=False, timeout=60.0, grace=25.0)
    assert all(outcome.error is not None for outcome in outcomes), [told(outcome) for outcome in outcomes]
    assert all("MulBackward0' returned nan values" in told(outcome) for outcome in outcomes)


class FailsBetweenUnits(Classifier):
    """Its validation reads an activation, and rank 1 fails before it calls the next layer."""

    def validation_step(self, batch, batch_idx):
        hidden = self.net[0](batch[0])
        if float(hidden.sum()) > -1e9 and self.trainer.global_rank == 1:
            raise OSError("no such file on rank 1")
        self.log("value", self.net[2](hidden).mean())


def validate_alone() -> None:
    fit(pipeline(), FailsBetweenUnits, val=make_loader(), devices=2)


def test_a_rank_that_fails_alone_while_a_step_is_traced_in_lockstep_is_heard():
    """An error of one rank between two layers ends the rank that waits for the next layer, with its message."""
    outcomes = collect_outcomes(validate_alone, 2, init_group=False, timeout=120.0, grace=40.0, fresh=True)
    assert all(outcome.stack is None for outcome in outcomes), "a rank hung"
    assert all(outcome.failed for outcome in outcomes)
    assert "no such file on rank 1" in told(outcomes[0])


class Terminated(Classifier):
    """Rank 1 is asked to stop in the middle of a batch."""

    def on_train_batch_end(self, outputs, batch, batch_idx):
        if self.trainer.global_rank == 1 and self.trainer.global_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)


def stop_one(folder: str) -> tuple[int, list[str]]:
    keep = ModelCheckpoint(folder, save_on_exception=True, every_n_epochs=100)
    trainers: list = []
    watch = LambdaCallback(setup=lambda trainer, module, stage: trainers.append(trainer))
    with pytest.raises(SIGTERMException):
        fit(pipeline(), Terminated, devices=2, max_epochs=5, callbacks=[keep, watch], enable_checkpointing=True)
    return trainers[0].global_step, sorted(path.name for path in Path(folder).glob("*.ckpt"))


def test_a_stop_signal_to_one_rank_stops_all_at_the_same_step(tmp_path):
    """SIGTERM to one rank ends all of them before the same batch, and they save together."""
    outcomes = collect_outcomes(stop_one, 2, (str(tmp_path),), init_group=False, timeout=60.0, fresh=True)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value[0] for outcome in outcomes] == [3, 3]
    (saved,) = tmp_path.glob("*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == 3
