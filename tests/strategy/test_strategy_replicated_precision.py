"""Precisions on pipelines and their replicas: overflows are everybody's, and element types are what they say."""

from __future__ import annotations

import math
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning import D9DStrategy
from d9d_lightning.testing import run_distributed
from tests.strategy.replicated_cases import Outcome, TiedModel, assert_replicas_equal, replicated, train
from tests.strategy.strategy_cases import largest_difference

BAD_STEP = 1


class Fragile(nn.Linear):
    """Its gradients are multiplied by :attr:`factor`; nothing else in the module sees that."""

    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        factor = self.factor
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * factor)
        return y


class FragileStart(L.LightningModule):
    """The first unit may overflow; no gradient goes further back than to it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            Fragile(5, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 11)
        )

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ids, targets = batch
        return F.cross_entropy(self.net(ids.float() / 11), targets[:, 0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class BadBatch(L.Callback):
    """Spoils the gradients of the first unit in one step, on the last replica, and keeps what each step made."""

    def __init__(self, factor: float, replicas: int) -> None:
        self.factor, self.replicas = factor, replicas
        self.after: list[dict[str, Tensor]] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        spoils = batch_idx == BAD_STEP and trainer.global_rank % self.replicas == self.replicas - 1
        pl_module.net[0].factor = self.factor if spoils else 1.0

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        own = {name: p.detach().clone() for name, p in pl_module.named_parameters() if type(p) is nn.Parameter}
        self.after.append(own)


def half_precision() -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))


def overflow(replicas: int, factor: float) -> tuple[Outcome, list[dict[str, Tensor]]]:
    bad = BadBatch(factor, replicas)
    strategy = D9DStrategy(schedule="1f1b", pipeline_parallel_size=2, data_parallel_size=replicas, num_microbatches=2)
    outcome = train(
        strategy, 2 * replicas, replicas, make=FragileStart, steps=4, callbacks=[bad], plugins=half_precision()
    )
    return outcome, bad.after


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("factor", [math.inf, pytest.param(math.nan, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_an_overflow_in_one_stage_skips_the_step_everywhere(replicas: int, factor: float) -> None:
    """With fp16, infinity or NaN in the first stage of one replica: no rank steps, all halve the scale, and go on."""
    ranks = run_distributed(overflow, 2 * replicas, (replicas, factor))
    holds = [set(outcome.own) for outcome, _ in ranks]
    assert not holds[0] & holds[-1], "the spoiled stage must be another one than the last"
    for outcome, after in ranks:
        assert outcome.scale == 512.0
        for name in outcome.own:
            assert torch.equal(after[BAD_STEP - 1][name], after[BAD_STEP][name]), name
            assert not torch.equal(after[BAD_STEP][name], after[BAD_STEP + 1][name]), name
            assert outcome.own[name].isfinite().all(), name
    if replicas == 2:
        assert_replicas_equal([outcome for outcome, _ in ranks])


def spoil(clip: float | None) -> tuple[Outcome, list[dict[str, Tensor]]]:
    bad = BadBatch(math.nan, 2)
    strategy = replicated(schedule="1f1b", num_microbatches=2)
    return train(strategy, 4, 2, make=FragileStart, steps=2, callbacks=[bad], gradient_clip_val=clip), bad.after


@pytest.mark.parametrize("clip", [0.1, pytest.param(None, marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_a_nan_in_one_stage_is_the_same_on_all_ranks(clip: float | None) -> None:
    """As on one device: a global norm of NaN spoils every parameter of every rank, without clipping only its own."""
    one_bad = BadBatch(math.nan, 1)
    one = train("auto", 1, 1, make=FragileStart, steps=2, callbacks=[one_bad], gradient_clip_val=clip)
    ranks = run_distributed(spoil, 4, (clip,))
    state = ranks[0][0].state
    for name, expected in one.state.items():
        assert expected.isnan().all() == state[name].isnan().all() == (clip is not None or name.startswith("net.0"))
    for outcome, _ in ranks:
        assert all(torch.equal(tensor.isnan(), state[name].isnan()) for name, tensor in outcome.own.items())
        assert [math.isnan(norm) for norm in outcome.norms] == [math.isnan(norm) for norm in one.norms] == [False, True]


def in_precision(cases: list[tuple[str, int, int]], steps: int = 3) -> list[Outcome]:
    return [
        train(
            D9DStrategy(pipeline_parallel_size=2, data_parallel_size=replicas, num_microbatches=microbatches),
            2 * replicas,
            replicas,
            steps=steps,
            precision=precision,
            gradient_clip_val=None,
        )
        for precision, replicas, microbatches in cases
    ]


@pytest.mark.filterwarnings("ignore")
def test_one_microbatch_has_the_bits_of_one_device_in_true_precisions() -> None:
    """A batch that is not cut is computed by the same operations: parameters and loss have the same bits."""
    precisions = ["32-true", "64-true", "bf16-true"]
    ranks = run_distributed(in_precision, 2, ([(precision, 1, 1) for precision in precisions],), timeout=120)
    for position, precision in enumerate(precisions):
        one = train("auto", 1, 1, precision=precision, gradient_clip_val=None)
        found = ranks[0][position]
        for name, expected in one.state.items():
            assert expected.dtype == found.state[name].dtype, (precision, name)
            assert torch.equal(expected, found.state[name]), (precision, name)
        assert [rank[position].loss for rank in ranks] == [one.loss] * 2, precision


@pytest.mark.filterwarnings("ignore")
def test_autocast_casts_what_it_casts_on_one_device() -> None:
    """With bf16-mixed a step equals one device's up to the order of float32 sums, far below a rounding of bfloat16."""
    one = train("auto", 1, 1, precision="bf16-mixed", gradient_clip_val=None, steps=1)
    ranks = run_distributed(in_precision, 2, ([("bf16-mixed", 1, 1)], 1))
    assert all(tensor.dtype == torch.float32 for tensor in ranks[0][0].state.values())
    assert largest_difference(one.state, ranks[0][0].state) < 1e-6
    full = train("auto", 1, 1, gradient_clip_val=None, steps=1)
    assert largest_difference(full.state, ranks[0][0].state) > 1e-5, "nothing was cast"


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")
def test_double_precision_survives_every_reduction() -> None:
    """In float64 two replicated pipelines with two microbatches differ from one device in the 12th digit at most."""
    ranks = run_distributed(in_precision, 4, ([("64-true", 2, 2)],), timeout=120)
    one = train("auto", 1, 1, precision="64-true", gradient_clip_val=None)
    assert all(tensor.dtype == torch.float64 for tensor in ranks[0][0].state.values())
    assert largest_difference(one.state, ranks[0][0].state) < 1e-12
    assert_replicas_equal([rank[0] for rank in ranks])


class Plain(TiedModel):
    """Steps by SGD, so that a rounding of a gradient stays a rounding of a parameter."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Types(L.Callback):
    """Element types of gradients, where callbacks see them."""

    def __init__(self) -> None:
        self.seen: set[tuple[str, torch.dtype]] = set()

    def _note(self, where: str, module: Any) -> None:
        self.seen |= {(where, p.grad.dtype) for p in module.parameters() if p.grad is not None}

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self._note("after backward", pl_module)

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self._note("before step", pl_module)


def widen(pipeline: int, replicas: int, microbatches: int, dtype: torch.dtype | None) -> tuple[Outcome, Any]:
    types = Types()
    strategy = D9DStrategy(
        pipeline_parallel_size=pipeline,
        data_parallel_size=replicas,
        num_microbatches=microbatches,
        gradient_dtype=dtype,
    )
    outcome = train(strategy, pipeline * replicas, replicas, make=Plain, precision="bf16-true", callbacks=[types])
    return outcome, types.seen


@pytest.mark.parametrize("layouts", [[(2, 2)], pytest.param([(1, 4)], marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_wide_gradients_of_narrow_parameters_do_not_depend_on_the_layout(layouts: list[tuple[int, int]]) -> None:
    """``gradient_dtype=float32`` over bf16 parameters: callbacks see float32, and every layout gives the same bits."""
    (one, seen), *_ = run_distributed(widen, 1, (1, 1, 4, torch.float32))
    assert seen == {("after backward", torch.float32), ("before step", torch.float32)}
    for replicas, microbatches in layouts:
        ranks = run_distributed(widen, 2 * replicas, (2, replicas, microbatches, torch.float32))
        for outcome, types in ranks:
            assert types == seen
            assert all(tensor.dtype == torch.bfloat16 for tensor in outcome.own.values())
        for name, expected in one.state.items():
            assert torch.equal(expected, ranks[0][0].state[name]), (replicas, name)
    (narrow, _), *_ = run_distributed(widen, 1, (1, 1, 4, None))
    assert any(not torch.equal(one.state[name], narrow.state[name]) for name in one.state)
