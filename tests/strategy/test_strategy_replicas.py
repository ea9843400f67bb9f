"""Data-parallel replicas of one rank each, against one device on the same global batches."""

from __future__ import annotations

import os

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.plugins import MixedPrecision

from d9d_lightning.strategy.keys import DifferentKeysError
from d9d_lightning.testing import distributed, run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, fit, largest_difference, make_loader, pipeline


def fit_replicas(folder: str, accumulate: int) -> dict:
    """Train on two replicas with an ordered sampler; each takes every second sample of a batch of 8."""
    module, trainer, _ = fit(
        pipeline(data_parallel_size=2),
        loader=make_loader(24, 4),
        val=make_loader(24, 4),
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
        callbacks=[Unshuffled()],
    )
    trainer.save_checkpoint(f"{folder}/two.ckpt")
    return {
        "state": {key: value.clone() for key, value in module.state_dict().items()},
        "metrics": {key: float(value) for key, value in trainer.callback_metrics.items()},
        "sampler": trainer.distributed_sampler_kwargs,
        "steps": trainer.global_step,
    }


class Unshuffled(L.Callback):
    """Lightning shuffles the sampler that it injects; comparing batches needs an order that one device has too."""

    def on_train_start(self, trainer, pl_module):
        trainer.train_dataloader.sampler.shuffle = False

    def on_train_epoch_start(self, trainer, pl_module):
        trainer.train_dataloader.sampler.shuffle = False


@pytest.mark.parametrize("accumulate", [1, 2])
def test_two_replicas_equal_one_device_on_the_same_batches(tmp_path, accumulate):
    """Parameters, ``sync_dist`` values and torchmetrics of two replicas equal one device with the joined batch."""
    first, second = run_distributed(fit_replicas, 2, (str(tmp_path), accumulate), init_group=False)
    order = torch.tensor([[i + 2 * k for k in range(4)] + [i + 1 + 2 * k for k in range(4)] for i in (0, 8, 16)])
    one, trainer, _ = fit(
        "auto",
        loader=make_loader(24, 8, sampler=order.flatten().tolist()),
        val=make_loader(24, 8, sampler=order.flatten().tolist()),
        accumulate_grad_batches=accumulate,
        gradient_clip_val=0.5,
    )
    assert largest_difference(first["state"], second["state"]) == 0
    assert largest_difference(first["state"], one.state_dict()) < 5e-6
    assert [first["sampler"]["rank"], second["sampler"]["rank"]] == [0, 1]
    for key in ("val_accuracy", "accuracy_epoch"):
        assert first["metrics"][key] == second["metrics"][key] == pytest.approx(float(trainer.callback_metrics[key]))
    saved = torch.load(tmp_path / "two.ckpt", weights_only=True)
    assert largest_difference(saved["state_dict"], first["state"]) == 0
    assert first["steps"] == trainer.global_step


class Collectives(Classifier):
    """Reduces and gathers in every way that Lightning offers."""

    def __init__(self):
        super().__init__()
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch, batch_idx):
        rank = float(self.trainer.global_rank)
        self.log("rank_mean", rank, sync_dist=True, on_epoch=True, on_step=False)
        self.log("rank_sum", rank + 1, sync_dist=True, reduce_fx="sum", on_epoch=True, on_step=False)
        self.mean(torch.tensor(rank))
        self.log("metric", self.mean, on_epoch=True, on_step=False)
        return self.loss_of(batch)[0]

    def on_train_epoch_end(self):
        self.gathered = self.all_gather(torch.tensor([float(self.trainer.global_rank)]))


@distributed(ranks=2, init_group=False)
def test_sync_dist_metrics_and_all_gather_reach_over_replicas():
    """``sync_dist``, torchmetrics and ``all_gather`` see both replicas."""
    L.seed_everything(7, verbose=False)
    module = Collectives()
    trainer = L.Trainer(strategy=pipeline(data_parallel_size=2, num_microbatches=1), devices=2, max_epochs=1, **QUIET)
    trainer.fit(module, make_loader(16, 4))
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    assert metrics["rank_mean"] == 0.5
    assert metrics["rank_sum"] == 2 * 3
    assert metrics["metric"] == 0.5
    assert module.gathered.flatten().tolist() == [0.0, 1.0]


@distributed(ranks=2, init_group=False)
def test_predict_loses_no_sample_with_replicas():
    """Every replica predicts every sample, in order."""
    L.seed_everything(7, verbose=False)
    module = Classifier()
    trainer = L.Trainer(strategy=pipeline(data_parallel_size=2), devices=2, **QUIET)
    predicted = torch.cat(trainer.predict(module, make_loader(22, 6)))
    expected = module.net(make_loader().dataset.tensors[0])
    torch.testing.assert_close(predicted, expected)


class Uneven(torch.utils.data.IterableDataset):
    """One sample more on every further rank, and no length."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        yield from ((torch.ones(4), torch.tensor(0)) for _ in range(8 + 4 * rank))


@distributed(ranks=2, init_group=False)
def test_uneven_loaders_end_together():
    """Replicas with 2 and 3 batches, with and without a length, both train on 2."""
    for kind in ("length", "no length"):
        module = Classifier()
        if kind == "no length":
            loader = torch.utils.data.DataLoader(Uneven(), batch_size=4)
        else:
            loader = make_loader(8 + 4 * int(os.environ["RANK"]), 4)
        strategy = pipeline(data_parallel_size=2, num_microbatches=1)
        trainer = L.Trainer(strategy=strategy, devices=2, max_epochs=1, use_distributed_sampler=False, **QUIET)
        trainer.fit(module, loader)
        assert trainer.global_step == 2, kind


class LogsSometimes(Classifier):
    """Logs a key on one replica only."""

    def training_step(self, batch, batch_idx):
        if self.trainer.global_rank == 1:
            self.log("rare", 1.0, sync_dist=True)
        return super().training_step(batch, batch_idx)


@distributed(ranks=2, init_group=False)
def test_a_key_that_one_replica_logs_is_named():
    """A key on one replica only raises on all of them, with the key, its hook and the ranks that have it."""
    with pytest.raises(DifferentKeysError, match=r"'rare' \(in training_step\) on ranks \[1\]"):
        fit(pipeline(data_parallel_size=2), LogsSometimes, devices=2, max_epochs=1)


class Overflows(Classifier):
    """One replica meets an infinite gradient once."""

    def training_step(self, batch, batch_idx):
        loss = self.loss_of(batch)[0]
        if self.trainer.global_step == 1 and self.trainer.global_rank == 1:
            loss = loss * float("inf")
        return loss


def scale_losses(replicas: int) -> dict:
    """Train with a loss scaler; one batch overflows on one rank."""
    precision = MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))
    kind = Overflows if replicas == 2 else Classifier
    strategy = pipeline(data_parallel_size=replicas, num_microbatches=1)
    module, trainer, seen = fit(
        strategy, kind, devices=2, max_epochs=1, plugins=precision, gradient_clip_val=0.5, loader=make_loader(12, 3)
    )
    state = {key: value.clone() for key, value in module.state_dict().items()} if replicas == 2 else {}
    return {"scale": trainer.precision_plugin.scaler.get_scale(), "state": state, "losses": seen.losses}


def test_an_overflow_on_one_replica_skips_the_step_on_all():
    """With fp16 the scale and the parameters stay equal on all ranks after an overflow on one."""
    first, second = run_distributed(scale_losses, 2, (2,), init_group=False)
    assert first["scale"] == second["scale"] == 512.0
    assert largest_difference(first["state"], second["state"]) == 0
    assert all(bool(torch.isfinite(value).all()) for value in first["state"].values())


def test_a_loss_scaler_works_over_the_stages_of_a_pipeline():
    """With fp16 the rank without the loss knows the scale too, and losses are finite and equal."""
    first, second = run_distributed(scale_losses, 2, (1,), init_group=False)
    assert first["scale"] == second["scale"] == 1024.0
    assert first["losses"] == second["losses"]
    assert first["losses"][-1] < first["losses"][0] + 0.5
