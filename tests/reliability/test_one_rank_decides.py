"""A module that decides by what one rank sees: the others follow, or all are told, and nobody waits."""

from __future__ import annotations

import os
from typing import Any

import lightning as L
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.testing import collect_outcomes
from tests.strategy.strategy_cases import QUIET

LIMIT_S = 30.0


class Decides(L.LightningModule):
    """Its rank 1 does something else in the third batch."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))

    def _is_time(self, what: str, batch_idx: int) -> bool:
        return what == self.what and batch_idx == 2 and os.environ["RANK"] == "1"

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.what == f"end the epoch on rank {os.environ['RANK']}" and batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layers(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("size", self.layers(batch[0]).square().mean())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._is_time("stop", batch_idx):
            self.trainer.should_stop = True

    def on_validation_end(self) -> None:
        if self.what == "stop after validation" and os.environ["RANK"] == "1":
            self.trainer.should_stop = True

    def on_train_epoch_end(self) -> None:
        if self.what == "stop after an epoch" and os.environ["RANK"] == "1":
            self.trainer.should_stop = True

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Skips(Decides):
    """It steps by itself."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if self._is_time("skip the closure", batch_idx):
            return
        if self._is_time("skip the step", batch_idx) or (self.what == "skip on all" and batch_idx == 2):
            optimizer_closure()
            return
        optimizer.step(closure=optimizer_closure)


def fit(what: str, clip: float | None = None) -> tuple[int, int]:
    """Train for two epochs of six batches; returns the number of steps and of epochs."""
    L.seed_everything(3, verbose=False)
    data = TensorDataset(torch.randn(24, 8, generator=torch.Generator().manual_seed(0)))
    trainer = L.Trainer(
        **QUIET,
        devices=2,
        max_epochs=2,
        num_sanity_val_steps=0,
        gradient_clip_val=clip,
        val_check_interval=4 if what == "stop after validation" else None,
        strategy=D9DStrategy("zbv", num_microbatches=2),
    )
    kind = Skips if what.startswith("skip") else Decides
    trainer.fit(kind(what), DataLoader(data, batch_size=4), DataLoader(data, batch_size=12))
    return trainer.global_step, trainer.current_epoch


@pytest.mark.parametrize(
    ("what", "steps"),
    [
        ("stop", 3),
        pytest.param("stop after validation", 4, marks=pytest.mark.full),
        pytest.param("stop after an epoch", 6, marks=pytest.mark.full),
    ],
)
def test_a_wish_to_stop_on_one_rank_stops_all_at_the_same_step(what: str, steps: int) -> None:
    """``trainer.should_stop = True`` on one rank ends the fit of all ranks after the same batch."""
    outcomes = collect_outcomes(fit, 2, (what,), init_group=False, timeout=LIMIT_S, fresh=True)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value[0] for outcome in outcomes] == [steps, steps]


@pytest.mark.full
@pytest.mark.parametrize(("rank", "steps"), [(0, 4), (1, 12)])
def test_the_answer_of_the_loss_owner_ends_the_epoch_of_all(rank: int, steps: int) -> None:
    """-1 from ``on_train_batch_start`` of the loss owner ends the epoch on all ranks; from another it ends none."""
    what = f"end the epoch on rank {rank}"
    outcomes = collect_outcomes(fit, 2, (what,), init_group=False, timeout=LIMIT_S, fresh=True)
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert [outcome.value[0] for outcome in outcomes] == [steps, steps]


@pytest.mark.parametrize("clip", [1.0, pytest.param(None, marks=pytest.mark.full)])
def test_an_optimizer_step_that_one_rank_skips_is_told_on_all(clip: float | None) -> None:
    """An ``optimizer_step`` that steps on one rank only raises on both, and names the ranks."""
    outcomes = collect_outcomes(fit, 2, ("skip the step", clip), init_group=False, timeout=LIMIT_S, fresh=True)
    for outcome in outcomes:
        assert "skipped the step on ranks [1] and made it on ranks [0]" in str(outcome.error)
        assert "reduce_boolean_decision" in str(outcome.error)


@pytest.mark.full
def test_a_closure_that_one_rank_skips_ends_all_with_its_name() -> None:
    """An ``optimizer_step`` that does not run its closure on one rank ends both, and says which rank it was."""
    outcomes = collect_outcomes(fit, 2, ("skip the closure",), init_group=False, timeout=LIMIT_S, fresh=True)
    for outcome in outcomes:
        assert outcome.value is None
        assert "rank 1 skipped its closure" in f"{outcome.error} {outcome.output}"


@pytest.mark.full
def test_an_optimizer_step_that_all_ranks_skip_is_no_error() -> None:
    """A step that every rank skips trains on, as it does on one device."""
    outcomes = collect_outcomes(fit, 2, ("skip on all",), init_group=False, timeout=LIMIT_S, fresh=True)
    assert [outcome.error for outcome in outcomes] == [None, None]
