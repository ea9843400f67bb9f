"""Averages, teachers and target networks that hooks update from the parts they are copies of."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import PlaceholderReadError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.partition.shapes import Geometry
from d9d_lightning.strategy.hooks import refuse_unknown
from d9d_lightning.testing import run_distributed
from d9d_lightning.values import LogRecord
from tests.strategy.strategy_cases import Classifier, fit, largest_difference, make_loader, pipeline


class Averaged(Classifier):
    """A teacher in the step, an average beside it that validates, and a dictionary of shadows in the checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(5)), nn.Linear(4, 3))
        self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        self.average = copy.deepcopy(self.net).requires_grad_(False)
        self.shadow: dict[str, Tensor] = {}

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            target = self.teacher(batch[0])
        loss, logits = self.loss_of(batch)
        self.log("loss", loss)
        return loss + F.mse_loss(logits, target)

    def on_before_zero_grad(self, optimizer: Any) -> None:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                mine.mul_(0.8).add_(theirs, alpha=0.2)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        with torch.no_grad():
            torch._foreach_lerp_([*self.average.parameters()], [*self.net.parameters()], 0.3)
        for name, parameter in self.net.named_parameters():
            before = self.shadow.get(name, torch.zeros_like(parameter))
            self.shadow[name] = before.lerp(parameter.detach(), 0.1)

    def _swap(self) -> None:
        for mine, theirs in zip(self.net.parameters(), self.average.parameters(), strict=True):
            mine.data, theirs.data = theirs.data, mine.data

    def on_validation_start(self) -> None:
        self._swap()

    def on_validation_end(self) -> None:
        self._swap()

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["shadow"] = self.shadow


class MovedInTheStep(Classifier):
    """A frozen key encoder that the step itself moves towards what is trained, before it uses it."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)]
        self.net = nn.Sequential(*layers, nn.Linear(4, 3))
        self.key = copy.deepcopy(self.net).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, logits = self.loss_of(batch)
        with torch.no_grad():
            for mine, theirs in zip(self.key.parameters(), self.net.parameters(), strict=True):
                mine.data = mine.data * 0.9 + theirs.data * 0.1
            target = self.key(batch[0].flip(1))
        return loss + F.mse_loss(logits, target)


def train(folder: str) -> tuple[list[float], list[dict[str, float]]]:
    strategy = pipeline(schedule="1f1b", num_microbatches=1)
    _, trainer, seen = fit(strategy, Averaged, devices=3, val=make_loader(10))
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    _, trainer, _ = fit(pipeline(schedule="1f1b", num_microbatches=1), MovedInTheStep, devices=3)
    trainer.save_checkpoint(f"{folder}/moved.ckpt")
    return seen.losses, seen.metrics


def test_copies_that_hooks_update_are_those_of_one_device(tmp_path: Any) -> None:
    """On three ranks teachers, averages, swapped weights and shadows in the checkpoint equal one device's."""
    plain, trainer, seen = fit("auto", Averaged, val=make_loader(10))
    trainer.save_checkpoint(tmp_path / "plain.ckpt")
    for losses, metrics in run_distributed(train, 3, (str(tmp_path),), init_group=False):
        assert losses == pytest.approx(seen.losses, abs=2e-6)
        for ours, theirs in zip(metrics, seen.metrics, strict=True):
            assert ours == pytest.approx(theirs, abs=2e-6)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert largest_difference(saved["state_dict"], plain.state_dict()) < 5e-6
    expected = torch.load(tmp_path / "plain.ckpt", weights_only=True)
    assert largest_difference(saved["shadow"], expected["shadow"]) < 5e-6
    moved = torch.load(tmp_path / "moved.ckpt", weights_only=True)["state_dict"]
    assert largest_difference(moved, fit("auto", MovedInTheStep)[0].state_dict()) < 5e-6


class Loses(Classifier):
    """Gives the first and a late layer each other's weight, or logs a norm of all parameters."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(4)), nn.Linear(4, 3))
        self.what = what

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.what == "write":
            with torch.no_grad():
                for one, other in ((0, 3), (3, 0)):
                    self.net[one].weight.data.copy_(self.net[other].weight)
        else:
            self.log("norm", sum(parameter.norm() for parameter in self.parameters()))


def lose(what: str) -> None:
    fit(pipeline(schedule="1f1b"), lambda: Loses(what), devices=2, max_epochs=1)


@pytest.mark.full
@pytest.mark.parametrize(("what", "message"), [("write", "the write would be lost"), ("log", "is not known here")])
def test_a_hook_that_needs_a_value_of_another_rank_is_refused(what: str, message: str) -> None:
    """What a hook would write or log without knowing it ends the run with the line or the key."""
    with pytest.raises(Exception, match=message):
        run_distributed(lose, 2, (what,), init_group=False)


def test_a_value_of_another_rank_is_not_logged() -> None:
    """A log of a placeholder is refused by its key and origin."""
    value = Placeholder(Geometry.of(torch.ones(())), "net.0.weight")
    with pytest.raises(PlaceholderReadError, match=r"self\.log\('norm'.*'net\.0\.weight'"):
        refuse_unknown([LogRecord("on_train_batch_end", "norm", value, {}, 1)])
