"""Faults that users of other pipelines ran into, and that only show with a Trainer and several processes."""

from __future__ import annotations

import signal
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities import grad_norm as local_grad_norm
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineError
from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.strategy import grad_norm
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET

pytestmark = pytest.mark.timeout(120)

BATCHES = 4


class Watched(L.LightningModule):
    """A classifier that remembers what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)))
        self.head = nn.Linear(6, 3)
        self.seen: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(module: Watched, strategy: Any, devices: int, **options: Any) -> Watched:
    """Fit a module that was built after seeding."""
    source = torch.Generator().manual_seed(5)
    data = TensorDataset(torch.randn(8 * BATCHES, 6, generator=source), torch.arange(8 * BATCHES) % 3)
    settings: dict[str, Any] = {**QUIET, "max_epochs": 1, **options}
    trainer = L.Trainer(devices=devices, strategy=strategy, **settings)
    trainer.fit(module, DataLoader(data, batch_size=8))
    return module


def build(kind: type[Watched]) -> Watched:
    """The same initial values in every process."""
    L.seed_everything(11, verbose=False)
    return kind()


def seen_by_two(kind_name: str, schedule: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor]]:
    """What the module of a class saw on this of two processes, and its parameters after training."""
    strategy = D9DStrategy(schedule, num_microbatches=2)
    module = train(build(globals()[kind_name]), strategy, 2, **options)
    with strategy.whole_module():
        return module.seen, {name: p.detach().clone() for name, p in module.named_parameters()}


def compare_with_one_device(kind: type[Watched], schedule: str = "zbv", **options: Any) -> list[list[Any]]:
    """What each rank saw; parameters must be those of a plain Trainer."""
    plain = train(build(kind), "auto", 1, **options)
    outcomes = run_distributed(seen_by_two, 2, (kind.__name__, schedule, options), init_group=False)
    for _, parameters in outcomes:
        for name, expected in plain.named_parameters():
            torch.testing.assert_close(parameters[name], expected.detach(), rtol=1e-5, atol=1e-6, msg=name)
    return [plain.seen, *[seen for seen, _ in outcomes]]


class LogsNorm(Watched):
    """Logs gradient norms as Lightning's documentation shows."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = grad_norm(self, 2)
        self.log_dict(norms)
        self.seen.append({name: float(norm) for name, norm in norms.items()})


def test_row_24_the_documented_norm_is_that_of_the_whole_module() -> None:
    """``d9d_lightning.strategy.grad_norm`` gives one device's norms and total on every rank."""
    plain, *ranks = compare_with_one_device(LogsNorm)
    assert len(plain) == BATCHES
    for seen in ranks:
        for one, other in zip(plain, seen, strict=True):
            assert list(one) == list(other)
            assert other == pytest.approx(one, rel=1e-4)


class LogsLocalNorm(Watched):
    """Logs what Lightning's own function sees."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(local_grad_norm(self, 2))


def warn_of_norm() -> str:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(build(LogsLocalNorm), D9DStrategy("1f1b", num_microbatches=2), 2)
    return " ".join(str(warning.message) for warning in caught)


def test_row_24_norms_of_one_rank_do_not_pass_in_silence() -> None:
    """Logging Lightning's ``grad_norm``, which sees one rank only, warns and names the function to use."""
    first, _ = run_distributed(warn_of_norm, 2, init_group=False)
    assert "leave out what other ranks hold" in first
    assert "from d9d_lightning.strategy import grad_norm" in first


class SkipsNan(Watched):
    """Skips a step if any gradient is NaN, asking all ranks; the first layer's gradients are NaN in batch 2."""

    def on_after_backward(self) -> None:
        first = self.layers[0][0].weight
        if self.global_step == 2 and first.grad is not None:
            first.grad.fill_(float("nan"))
        bad = any(p.grad is not None and bool(p.grad.isnan().any()) for p in self.parameters())
        bad = self.trainer.strategy.reduce_boolean_decision(bad, all=False)
        self.seen.append(bad)
        if bad:
            self.zero_grad()


def test_row_39_a_nan_on_one_rank_is_a_decision_of_all() -> None:
    """``strategy.reduce_boolean_decision(bad, all=False)`` makes every rank skip the step that one saw NaN in."""
    plain, *ranks = compare_with_one_device(SkipsNan)
    assert plain == [False, False, True, False]
    assert all(seen == plain for seen in ranks)


class SkipsNanAlone(Watched):
    """Skips a step if a gradient of this rank is NaN, as those of the first layer are in batch 2."""

    def on_train_start(self) -> None:
        weight = self.layers[0][0].weight
        if not isinstance(weight, Placeholder):
            weight.register_post_accumulate_grad_hook(self.spoil)

    def spoil(self, weight: Tensor) -> None:
        if self.global_step == 2 and weight.grad is not None:
            weight.grad.fill_(float("nan"))

    def on_after_backward(self) -> None:
        if any(p.grad is not None and bool(p.grad.isnan().any()) for p in self.parameters()):
            self.zero_grad()


class ClearsNan(SkipsNanAlone):
    """Replaces what is not finite, which means the same on every rank as on one device."""

    def on_after_backward(self) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.nan_to_num_()


def error_of(kind_name: str) -> str:
    try:
        train(build(globals()[kind_name]), D9DStrategy("1f1b", num_microbatches=2), 2)
    except PipelineError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def test_row_39_a_nan_that_one_rank_decides_about_alone_is_an_error() -> None:
    """A hook that drops the gradients of one rank for a NaN that only this rank saw is refused on all ranks."""
    for error in run_distributed(error_of, 2, ("SkipsNanAlone",), init_group=False, fresh=True):
        assert error.startswith("RanksDisagreeError: a hook dropped the gradients on ranks [1]"), error
        assert "kept them on ranks [0]" in error and "reduce_boolean_decision(bad, all=False)" in error


@pytest.mark.full
def test_row_39_a_rule_for_single_gradients_is_no_error() -> None:
    """A hook that replaces numbers that are not finite works on each rank by itself, and passes."""
    assert run_distributed(error_of, 2, ("ClearsNan",), init_group=False) == ["", ""]


class OverflowingLoss(Watched):
    """The loss of one batch is infinite."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * float("inf") if batch_idx == BATCHES - 1 else loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(str(float(outputs["loss"])))


def losses_of(kind_name: str) -> list[Any]:
    return train(build(globals()[kind_name]), D9DStrategy("1f1b", num_microbatches=2), 2).seen


@pytest.mark.full
def test_an_infinite_loss_is_seen_by_every_rank() -> None:
    """Every rank's callbacks get the same losses, the infinite one included."""
    first, second = run_distributed(losses_of, 2, ("OverflowingLoss",), init_group=False)
    assert first == second
    assert first[-1] == "inf"


class HalfPrecisionLoss(Watched):
    """Returns and logs a loss of bfloat16."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx).bfloat16()
        self.log("loss", loss)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((str(outputs["loss"].dtype), float(outputs["loss"])))


@pytest.mark.full
def test_row_30_a_loss_of_another_type_arrives_as_it_is() -> None:
    """A bfloat16 loss of the last stage reaches every rank with its type and value."""
    first, second = run_distributed(losses_of, 2, ("HalfPrecisionLoss",), init_group=False)
    assert first == second
    assert all(0.5 < value < 3.0 for _, value in first), first


class NamedGroups(Watched):
    """One group matches parameters of the last stage only."""

    def configure_optimizers(self) -> Any:
        head = [p for name, p in self.named_parameters() if name.startswith("head")]
        rest = [p for name, p in self.named_parameters() if not name.startswith("head")]
        self.seen.append((len(head), len(rest)))
        return torch.optim.AdamW([{"params": head, "weight_decay": 0.0}, {"params": rest, "lr": 0.01}], lr=0.05)


def test_row_43_a_group_that_only_one_stage_has_parameters_of() -> None:
    """Groups chosen by name see the whole module on every rank, and each parameter trains in its own group."""
    plain, *ranks = compare_with_one_device(NamedGroups, schedule="1f1b")
    assert all(seen == plain for seen in ranks)


class Requeued(Watched):
    """Rank 1 gets the signal by which SLURM announces the end of its time, in the middle of a batch."""

    def on_train_start(self) -> None:
        connector = self.trainer._signal_connector
        handler = connector._slurm_sigusr_handler_fn
        signal.signal(signal.SIGUSR1, lambda number, frame: handler(number, frame))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_rank == 1 and batch_idx == 1 and not self.seen:
            self.seen.append("signal")
            signal.raise_signal(signal.SIGUSR1)
        return super().training_step(batch, batch_idx)


def requeue(folder: str) -> None:
    from lightning.pytorch.trainer.connectors.signal_connector import _SignalConnector

    def save(self: Any, number: int, frame: Any) -> None:
        self.trainer.save_checkpoint(f"{folder}/requeued.ckpt")

    _SignalConnector._slurm_sigusr_handler_fn = save  # SLURM itself is not here
    train(build(Requeued), D9DStrategy("zbv", num_microbatches=2), 2)


def test_row_22_a_checkpoint_asked_for_by_a_signal_waits_for_the_end_of_the_step(tmp_path: Path) -> None:
    """A signal to one rank in the middle of a step saves a whole checkpoint behind that step, on all ranks."""
    run_distributed(requeue, 2, (str(tmp_path),), init_group=False, fresh=True)
    saved = torch.load(tmp_path / "requeued.ckpt", weights_only=False)
    assert saved["global_step"] == 2
    assert len(saved["state_dict"]) == len(Watched().state_dict())


def replicas() -> dict[str, Tensor]:
    strategy = D9DStrategy("zbv", num_microbatches=2, data_parallel_size=2)
    train(module := build(Watched), strategy, 4)
    return {name: p.detach().clone() for name, p in module.named_parameters() if type(p.data) is Tensor}


@pytest.mark.full
def test_row_04_replicas_stay_equal_under_a_split_backward() -> None:
    """With two pipelines of two ranks under zbv, both replicas of every parameter end equal."""
    parts = run_distributed(replicas, 4, init_group=False)
    held: dict[str, list[Tensor]] = {}
    for part in parts:
        for name, value in part.items():
            held.setdefault(name, []).append(value)
    assert set(held) == {name for name, _ in Watched().named_parameters()}
    assert all(len(copies) == 2 and torch.equal(*copies) for copies in held.values())


class Detached(Watched):
    """Loses the graph."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx).detach()


class SometimesWithoutTargets(Watched):
    """One microbatch has no targets, and so a loss without a graph; the other one has."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        keep = batch[0][:, 0] > batch[0][:, 0].mean() + 100.0 * (batch[0].sum() < 0)
        if not bool(keep.any()):
            return torch.zeros(())
        return F.cross_entropy(self.head(self.layers(batch[0])), batch[1])


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_loss_without_a_graph_says_so(precision: Any) -> None:
    """A detached loss trains nothing on any device, and raises with the usual reasons instead of passing in silence."""
    with pytest.raises(PipelineError, match=r"no trained parameter has a part in.*detach"):
        train(build(Detached), D9DStrategy("zbv", num_microbatches=2), 1, precision=precision)


def test_a_microbatch_without_targets_is_no_mistake() -> None:
    """A step that returns a bare zero for some microbatches trains on the others."""
    module = train(build(SometimesWithoutTargets), D9DStrategy("zbv", num_microbatches=4), 1)
    assert any(not torch.equal(a, b) for a, b in zip(module.parameters(), build(Watched).parameters(), strict=True))
