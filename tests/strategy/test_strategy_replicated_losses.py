"""Losses and gradients that are no plain means over samples, on two replicated pipelines."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.testing import distributed, run_distributed
from tests.strategy.replicated_cases import Outcome, TiedModel, assert_replicas_equal, make_tokens, replicated, train
from tests.strategy.strategy_cases import fit, largest_difference, pipeline

GLOBAL, ACCUMULATE, STEPS = 16, 3, 3


class TokenMean(TiedModel):
    """The mean over the tokens of sequences of different lengths, and their number."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, targets = batch
        losses = F.cross_entropy(self.logits(ids).transpose(1, 2), targets, ignore_index=-1, reduction="sum")
        count = (targets >= 0).sum()
        return {"loss": losses / count.clamp(min=1), "loss_weight": count}


def ragged_tokens() -> TensorDataset:
    """Sequences of 0 to 5 tokens; some microbatches have none at all, and one replica far more than the other."""
    ids, targets = make_tokens(GLOBAL * ACCUMULATE * STEPS).tensors
    lengths = torch.randint(0, 6, (len(ids),), generator=torch.Generator().manual_seed(3))
    lengths[16:20] = lengths[40:44] = 0
    lengths[64:72] = 5
    return TensorDataset(ids, targets.masked_fill(torch.arange(5) >= lengths[:, None], -1))


def run_weighted(schedules: list[str]) -> list[Outcome]:
    return [
        train(
            replicated(schedule=schedule, num_microbatches=2),
            4,
            2,
            make=TokenMean,
            accumulate=ACCUMULATE,
            data=ragged_tokens(),
        )
        for schedule in schedules
    ]


@pytest.mark.filterwarnings("ignore")
def test_token_weighted_means_are_exact_over_microbatches_windows_and_replicas() -> None:
    """With ``loss_weight`` the update is that of the mean over all tokens of a window on one device."""
    one = train("auto", 1, 1, make=TokenMean, batch=GLOBAL * ACCUMULATE, data=ragged_tokens())
    schedules = ["zbv", "1f1b"]
    ranks = run_distributed(run_weighted, 4, (schedules,), timeout=120)
    for position, schedule in enumerate(schedules):
        found = [rank[position] for rank in ranks]
        assert len(one.norms) == STEPS
        assert found[0].norms == pytest.approx(one.norms, rel=1e-5), schedule
        assert largest_difference(one.state, found[0].state) < 1e-5, schedule
        assert_replicas_equal(found)


class Sparse(TiedModel):
    """The embedding's gradient has rows only for the words that occur."""

    sparse = True

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, self.head.out_features, bias=False)
        self.embedding.sparse = self.sparse

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Dense(Sparse):
    """The same, with a gradient for every word."""

    sparse = False


def run_sparse(replicas: int, clip: dict[str, Any], weighted: bool) -> Outcome:
    strategy = D9DStrategy(pipeline_parallel_size=2, data_parallel_size=replicas, num_microbatches=2)
    return train(strategy, 2 * replicas, replicas, make=SparseTokens if weighted else Sparse, **clip)


class SparseTokens(Sparse):
    """Sparse gradients that are divided once, by the pooled weights."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "loss_weight": batch[0].numel()}


BY_NORM = {"gradient_clip_val": 0.1}
BY_VALUE = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}


@pytest.mark.parametrize(
    ("replicas", "clip", "weighted"),
    [(2, BY_NORM, True), (1, BY_VALUE, True), pytest.param(1, BY_NORM, False, marks=pytest.mark.full)],
)
@pytest.mark.filterwarnings("ignore")
def test_sparse_gradients_are_clipped_scaled_and_reduced(replicas: int, clip: dict[str, Any], weighted: bool) -> None:
    """``Embedding(sparse=True)`` trains as a dense one on one device, clipped by norm or value, replicated or not."""
    one = train("auto", 1, 1, make=Dense, **clip)
    ranks = run_distributed(run_sparse, 2 * replicas, (replicas, clip, weighted))
    assert largest_difference(one.state, ranks[0].state) < 1e-5
    assert ranks[0].norms == pytest.approx(one.norms, rel=1e-5)


class OnlySparse(Sparse):
    """An optimizer that takes nothing else."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SparseAdam([self.embedding.weight])


@distributed(ranks=2, init_group=False)
def test_an_optimizer_of_sparse_gradients_is_refused_beside_replicas() -> None:
    """SparseAdam cannot step dense averages, and the message says what can."""
    with pytest.raises(PipelineConfigurationError, match=r"SparseAdam.*dense.*Adagrad"):
        fit(pipeline(data_parallel_size=2), OnlySparse, devices=2)
