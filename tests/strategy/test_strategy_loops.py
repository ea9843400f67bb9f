"""Every way to run a trainer, on a pipeline of two, against one device."""

from __future__ import annotations

import csv
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    DeviceStatsMonitor,
    EarlyStopping,
    EMAWeightAveraging,
    GradientAccumulationScheduler,
    LambdaCallback,
    LearningRateMonitor,
    ModelSummary,
    RichProgressBar,
    ThroughputMonitor,
    Timer,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.tuner import Tuner
from torch.nn import functional as F
from torch.utils.data import DataLoader

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, Losses, largest_difference, make_loader, pipeline

WAYS: dict[str, dict[str, Any]] = {
    "fast_dev_run": {"fast_dev_run": 2},
    "validation inside an accumulation window": {
        "accumulate_grad_batches": 3,
        "val_check_interval": 2,
        "max_epochs": 2,
    },
    "limits": {"limit_train_batches": 0.5, "limit_val_batches": 1, "max_epochs": 2, "check_val_every_n_epoch": 2},
    "overfit_batches": {"overfit_batches": 2, "max_epochs": 2},
    "max_steps": {"max_steps": 5, "max_epochs": -1},
    "min_epochs": {"max_epochs": 3, "min_epochs": 2, "callbacks": ["stop"]},
    "deterministic": {"deterministic": True, "max_epochs": 1},
    "detect_anomaly": {"detect_anomaly": True, "max_epochs": 1},
    "clip by value": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value", "max_epochs": 1},
    "bfloat16": {"precision": "bf16-mixed", "max_epochs": 1},
    "double": {"precision": "64-true", "max_epochs": 1},
    "accumulation scheduler": {"callbacks": ["accumulate"], "max_epochs": 3},
    "callbacks": {"callbacks": ["summary", "timer", "lambda", "lr"], "max_epochs": 2},
    "average": {"callbacks": ["ema"], "max_epochs": 2},
    "bars and monitors": {"callbacks": ["rich", "stats", "throughput"], "enable_progress_bar": True, "max_epochs": 1},
    "overrides": {"kind": "overrides", "max_epochs": 2, "accumulate_grad_batches": 2},
    "fused": {"kind": "fused", "gradient_clip_val": 0.05, "max_epochs": 1},
    "plateau": {"kind": "plateau", "max_epochs": 4},
    "muon": {"kind": "muon", "max_epochs": 1},
    "unfreezing": {"callbacks": ["unfreeze"], "max_epochs": 3, "kind": "plain"},
    "time limit": {"callbacks": ["clock"], "max_epochs": 5},
    "adamw foreach": {"kind": "foreach", "gradient_clip_val": 0.05, "max_epochs": 1},
    "registered name": {"registered": "d9d_zbv", "max_epochs": 1},
    "adam fused": {"kind": "adam", "accumulate_grad_batches": 2, "max_epochs": 1},
}


class Unfreeze(BaseFinetuning):
    """Freezes the first layer and trains it from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, lr=0.01)


class Summary(ModelSummary):
    """Keeps on every rank what it would print."""

    def __init__(self, log: list[Any]) -> None:
        super().__init__(max_depth=2)
        self.kept = log

    def _summary(self, trainer: Any, pl_module: Any) -> Any:
        found = super()._summary(trainer, pl_module)
        self.kept.append((found.total_parameters, found.trainable_parameters, found.model_size))
        self.kept.append(list(zip(found.layer_names, found.param_nums, strict=True)))
        return found


class Clock(Timer):
    """A minute passes with every batch on rank 0, and none on the others."""

    def __init__(self) -> None:
        super().__init__(duration={"minutes": 6})
        self.batches = 0

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        self.batches += trainer.is_global_zero
        super().on_train_batch_end(trainer, *args)

    def time_elapsed(self, stage: Any = "train") -> float:
        return 60.0 * self.batches


def make_callback(name: str, log: list[Any]) -> Any:
    return {
        "stop": lambda: EarlyStopping("val_loss", min_delta=10.0, patience=0),
        "accumulate": lambda: GradientAccumulationScheduler({0: 1, 1: 2}),
        "summary": lambda: Summary(log),
        "timer": lambda: Timer(duration={"hours": 1}),
        "clock": Clock,
        "lambda": lambda: LambdaCallback(
            on_before_optimizer_step=lambda trainer, module, optimizer: log.append(
                [group["lr"] for group in optimizer.param_groups]
            ),
            on_train_start=lambda trainer, module: log.append(
                sorted((name, tuple(p.shape)) for name, p in module.named_parameters())
            ),
        ),
        "lr": lambda: LearningRateMonitor("step"),
        "ema": lambda: EMAWeightAveraging(decay=0.8),
        "unfreeze": Unfreeze,
        "rich": RichProgressBar,
        "stats": DeviceStatsMonitor,
        "throughput": lambda: ThroughputMonitor(batch_size_fn=lambda batch: batch[0].size(0), window_size=2),
    }[name]()


class PlainOptimizer(Classifier):
    """Optimizes only what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


class Overrides(Classifier):
    """Warms up by hand, clips by hand, and asks how many steps there will be."""

    def configure_optimizers(self) -> Any:
        self.steps = self.trainer.estimated_stepping_batches
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.2, total_steps=int(self.steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None) -> None:
        self.clip_gradients(
            optimizer, gradient_clip_val=0.05 * (1 + self.current_epoch), gradient_clip_algorithm="norm"
        )

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure=None) -> None:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.01 * (batch_idx + 1)
        optimizer.step(closure=optimizer_closure)


class Fused(Classifier):
    """Fused AdamW in two groups chosen by name, one of which is empty on a rank."""

    def configure_optimizers(self) -> Any:
        named = dict(self.named_parameters())
        groups = [
            {"params": [p for n, p in named.items() if n.startswith("net.0")], "lr": 0.01},
            {"params": [p for n, p in named.items() if not n.startswith("net.0")]},
        ]
        return torch.optim.AdamW(groups, lr=0.05, fused=True)


class Foreach(Classifier):
    """AdamW over lists of tensors, with the largest second moment kept."""

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1, foreach=True, amsgrad=True)


class FusedAdam(Classifier):
    """Adam in one kernel, with the other kind of weight decay."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.05, weight_decay=0.1, fused=True)


class Plateau(Classifier):
    """Lowers the rate when validation does not improve."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.3, foreach=True)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.3, patience=0, threshold=0.2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}


class Matrices(Classifier):
    """Trains matrices only, with an optimizer that takes nothing else."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Muon([p for p in self.parameters() if p.dim() == 2], lr=0.02)


KINDS: dict[str, type[Classifier]] = {
    "": Classifier,
    "plain": PlainOptimizer,
    "overrides": Overrides,
    "fused": Fused,
    "plateau": Plateau,
    "muon": Matrices,
    "foreach": Foreach,
    "adam": FusedAdam,
}
MEASURED = ("_per_sec", "/time", "_percent", "DeviceStatsMonitor")
"""Parts of the names of columns that hold what a machine measured."""


def run_way(name: str, strategy: Any, devices: int, folder: str) -> dict[str, Any]:
    options = dict(WAYS[name])
    kind, registered = KINDS[options.pop("kind", "")], options.pop("registered", None)
    strategy = registered if registered and devices > 1 else strategy
    log: list[Any] = []
    seen = Losses()
    callbacks = [make_callback(one, log) for one in options.pop("callbacks", [])]
    L.seed_everything(7, verbose=False)
    module = kind()
    needs_logger = {"lr", "stats", "throughput"} & set(WAYS[name].get("callbacks", []))
    logger = CSVLogger(folder, name=None, version=f"{name}-{devices}") if needs_logger else False
    settings = {**QUIET, "logger": logger, "max_epochs": 1, "log_every_n_steps": 1, **options}
    trainer = L.Trainer(strategy=strategy, devices=devices, callbacks=[*callbacks, seen], **settings)
    trainer.fit(module, make_loader(shuffle=True), make_loader())
    path = f"{folder}/{name}-{devices}.ckpt"
    trainer.save_checkpoint(path)
    return {
        "losses": seen.losses,
        "metrics": seen.metrics,
        "step": trainer.global_step,
        "rates": [group["lr"] for group in trainer.optimizers[0].param_groups],
        "epoch": trainer.current_epoch,
        "log": log,
        "modes": [child.training for child in module.modules()],
    }


def run_all_on_two(names: list[str], folder: str) -> dict[str, Any]:
    return {name: run_way(name, pipeline(), 2, folder) for name in names}


def rows_of(path: Any) -> list[dict[str, str]]:
    """Rows of a file of metrics, without what a machine measured and without empty fields."""
    with open(path, newline="") as file:
        rows = list(csv.DictReader(file))
    return [
        {name: value for name, value in row.items() if value and not any(part in name for part in MEASURED)}
        for row in rows
    ]


def assert_files_of_metrics_equal(folder: Any, name: str) -> None:
    """The file of the pipeline against one device's: rows, columns and values."""
    ours, theirs = (rows_of(folder / f"{name}-{devices}" / "metrics.csv") for devices in (2, 1))
    assert len(theirs) > 4
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.keys() == other.keys(), name
        assert [float(mine[key]) for key in other] == pytest.approx([float(v) for v in other.values()], abs=3e-6), name


def columns_of(path: Any) -> set[str]:
    """Names of the columns of a file of metrics."""
    return set(path.read_text().splitlines()[0].split(","))


def test_every_way_to_fit_equals_one_device(tmp_path):
    """Loop options, precisions and Lightning's callbacks give one device's losses, metrics, counts and parameters."""
    ranks = run_distributed(run_all_on_two, 2, (list(WAYS), str(tmp_path)), init_group=False, timeout=240.0)
    for name in WAYS:
        one = run_way(name, "auto", 1, str(tmp_path))
        tolerance = 2e-2 if name == "bfloat16" else 3e-6
        for rank in ranks:
            ours = rank[name]
            assert ours["losses"] == pytest.approx(one["losses"], abs=tolerance), name
            for key in ("step", "epoch", "rates", "log", "modes"):
                assert ours[key] == one[key], (name, key)
            for mine, theirs in zip(ours["metrics"], one["metrics"], strict=True):
                assert mine == pytest.approx(theirs, abs=max(tolerance, 0.2 if name == "bfloat16" else 0)), name
        files = [torch.load(tmp_path / f"{name}-{n}.ckpt", weights_only=True) for n in (1, 2)]
        assert largest_difference(files[0]["state_dict"], files[1]["state_dict"]) < 10 * tolerance, name
        assert files[0].keys() == files[1].keys(), name
        if "current_model_state" in files[0]:
            assert largest_difference(*(file["current_model_state"] for file in files)) < 1e-5
        if (tmp_path / f"{name}-1" / "metrics.csv").exists():
            assert_files_of_metrics_equal(tmp_path, name)
    assert len(list(tmp_path.glob("*-2/metrics.csv"))) == 2
    monitors = [columns_of(tmp_path / f"bars and monitors-{devices}" / "metrics.csv") for devices in (1, 2)]
    assert {"train/samples", "train/batches"} < monitors[0]
    assert monitors[0] <= monitors[1]
    assert all(column.endswith("_per_sec") for column in monitors[1] - monitors[0])
    assert (ranks[1]["time limit"]["step"], len(ranks[1]["time limit"]["losses"])) == (6, 6)
    assert ranks[1]["callbacks"]["log"][0][:2] == (139, 139)


class Tuned(Classifier):
    """Has what the tuner changes."""

    def __init__(self) -> None:
        super().__init__()
        self.lr, self.batch_size = 0.05, 2

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def train_dataloader(self) -> Any:
        return make_loader(22, self.batch_size)

    def val_dataloader(self) -> Any:
        return make_loader(6, 3)


def tune(strategy: Any, devices: int) -> dict[str, Any]:
    L.seed_everything(7, verbose=False)
    module = Tuned()
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=4, **QUIET)
    tuner = Tuner(trainer)
    finder = tuner.lr_find(module, num_training=30, early_stop_threshold=None)
    found = {"lrs": finder.results["lr"], "losses": finder.results["loss"], "suggestion": finder.suggestion()}
    found["batch_size"] = tuner.scale_batch_size(module, max_trials=2, steps_per_trial=1)
    trainer.fit(module)
    found["step"] = trainer.global_step
    return found


def tune_on_two() -> dict[str, Any]:
    return tune(pipeline(), 2)


def test_the_tuner_finds_what_it_finds_on_one_device():
    """``lr_find`` and ``scale_batch_size`` give one device's values, and a fit afterwards starts anew."""
    one = tune("auto", 1)
    for rank in run_distributed(tune_on_two, 2, init_group=False):
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)
        assert rank["lrs"] == one["lrs"]
        assert rank["suggestion"] == one["suggestion"]
        assert (rank["batch_size"], rank["step"]) == (one["batch_size"], one["step"])


class Ragged(Classifier):
    """Takes batches of any size and kind."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = F.cross_entropy(self.net(batch["x"]), batch["y"])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


def same(batch: Any) -> Any:
    return batch


def ragged_batches() -> list[Any]:
    x, y = make_loader(20).dataset.tensors
    sizes = [10, 3, 1, 6]
    starts = [0, 10, 13, 14]
    return [
        {"x": x[s : s + n], "y": y[s : s + n], "names": ["a"] * n, "note": "text", "none": None}
        for s, n in zip(starts, sizes, strict=True)
    ]


def fit_ragged(strategy: Any, devices: int, folder: str) -> list[float]:
    L.seed_everything(7, verbose=False)
    module, seen = Ragged(), Losses()
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=2, callbacks=[seen], **QUIET)
    trainer.fit(module, DataLoader(ragged_batches(), batch_size=None, collate_fn=same))
    trainer.save_checkpoint(f"{folder}/ragged-{devices}.ckpt")
    return seen.losses


def fit_ragged_on_two(folder: str) -> list[float]:
    return fit_ragged(pipeline(num_microbatches=4), 2, folder)


def test_batches_of_ten_three_one_and_six_equal_one_device(tmp_path):
    """Batches that are smaller than the number of microbatches, beside strings and None, train as on one."""
    ranks = run_distributed(fit_ragged_on_two, 2, (str(tmp_path),), init_group=False)
    one = fit_ragged("auto", 1, str(tmp_path))
    assert ranks[0] == ranks[1] == pytest.approx(one, abs=2e-6)
    files = [torch.load(tmp_path / f"ragged-{n}.ckpt", weights_only=True)["state_dict"] for n in (1, 2)]
    assert largest_difference(*files) < 5e-6
