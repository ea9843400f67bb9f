"""Checkpoints of a pipeline: one plain file, exact to resume from, at any other size and from a plain run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torch import nn
from torch.nn import functional as F

from d9d_lightning.strategy import meeting
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, Losses, fit, largest_difference, make_loader, pipeline

EPOCHS = 4


class Tied(Classifier):
    """Its head is the transpose of its first layer, so one parameter is used by both ends."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 16, bias=False)
        self.middle = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.last = nn.Linear(4, 16, bias=False)
        self.last.weight = self.first.weight
        self.net = nn.Identity()
        self.norm = nn.BatchNorm1d(16)

    def loss_of(self, batch: Any) -> Any:
        hidden = self.norm(self.middle(self.first(batch[0]).tanh()))
        logits = F.linear(hidden, self.last.weight.t())[:, :3]
        return F.cross_entropy(logits, batch[1]), logits

    def configure_optimizers(self) -> Any:
        names = dict(self.named_parameters())
        groups = [
            {"params": [p for n, p in names.items() if "norm" in n], "weight_decay": 0.0},
            {"params": [p for n, p in names.items() if "norm" not in n]},
        ]
        optimizer = torch.optim.AdamW(groups, lr=0.05)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)}


def strategy_of(schedule: str, devices: int) -> Any:
    if schedule == "directory":
        return pipeline(save_distributed_checkpoint=True, num_microbatches=1)
    return "auto" if schedule == "plain" else pipeline(schedule=schedule, num_microbatches=1)


def train(schedule: str, devices: int, path: str, start: str | None, epochs: int) -> dict[str, Any]:
    """Train up to an epoch, from a checkpoint or from the start, and save."""
    L.seed_everything(7, verbose=False)
    seen = Losses()
    trainer = L.Trainer(
        strategy=strategy_of(schedule, devices), devices=devices, max_epochs=epochs, callbacks=[seen], **QUIET
    )
    module = Tied()
    trainer.fit(module, make_loader(22, 6), ckpt_path=start)
    trainer.save_checkpoint(path)
    return {"losses": seen.losses, "step": trainer.global_step}


def run(schedule: str, devices: int, path: Any, start: Any, epochs: int) -> dict[str, Any]:
    arguments = (schedule, devices, str(path), None if start is None else str(start), epochs)
    return run_distributed(train, devices, arguments, init_group=False)[0] if devices > 1 else train(*arguments)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (("zbv", 2), ("1f1b", 2)),
        (("1f1b", 2), ("plain", 1)),
        (("plain", 1), ("zbv", 2)),
        (("zbv", 2), ("gpipe", 1)),
        (("directory", 2), ("zbv", 1)),
        pytest.param(("directory", 1), ("zbv", 2), marks=pytest.mark.full),
        pytest.param(("directory", 4), ("1f1b", 2), marks=pytest.mark.full),
        pytest.param(("directory", 2), ("interleaved_1f1b", 4), marks=pytest.mark.full),
        pytest.param(("zbv", 4), ("dualpipev", 2), marks=pytest.mark.full),
    ],
    ids=lambda v: f"{v[0]}{v[1]}",
)
def test_resuming_at_another_size_continues_the_unbroken_run(tmp_path, first, second):
    """Losses, parameters and optimizer state after a change of size, schedule or strategy are those of no break."""
    unbroken = train("plain", 1, str(tmp_path / "whole.ckpt"), None, EPOCHS)
    begun = run(*first, tmp_path / "half.ckpt", None, EPOCHS // 2)
    resumed = run(*second, tmp_path / "end.ckpt", tmp_path / "half.ckpt", EPOCHS)
    assert begun["losses"] + resumed["losses"] == pytest.approx(unbroken["losses"], abs=1e-5)
    assert resumed["step"] == unbroken["step"]
    whole, end = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True) for name in ("whole", "end"))
    assert largest_difference(whole["state_dict"], end["state_dict"]) < 1e-4
    ours, theirs = end["optimizer_states"][0], whole["optimizer_states"][0]
    assert [group["params"] for group in ours["param_groups"]] == [group["params"] for group in theirs["param_groups"]]
    assert ours["state"].keys() == theirs["state"].keys()
    assert all(torch.equal(ours["state"][key]["step"], theirs["state"][key]["step"]) for key in ours["state"])
    assert end["lr_schedulers"] == whole["lr_schedulers"]


def test_tied_weights_stay_tied_in_the_file(tmp_path):
    """Both names of a shared parameter are in the file and share memory, and the file loads strictly."""
    run("zbv", 2, tmp_path / "tied.ckpt", None, 1)
    state = torch.load(tmp_path / "tied.ckpt", weights_only=True)["state_dict"]
    assert state["first.weight"].untyped_storage().data_ptr() == state["last.weight"].untyped_storage().data_ptr()
    Tied().load_state_dict(state, strict=True)


def keep_checkpoints(folder: str) -> dict[str, Any]:
    keep = ModelCheckpoint(
        folder, monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}", save_last="link"
    )
    _, trainer, _ = fit(
        pipeline(), val=make_loader(), devices=2, max_epochs=4, callbacks=[keep], enable_checkpointing=True
    )
    tested = trainer.test(ckpt_path="best", dataloaders=make_loader(), verbose=False)
    with trainer.strategy.whole_module() as module:
        outputs = module.net(torch.ones(2, 4))
        state = {key: value.clone() for key, value in module.state_dict().items()}
    return {"best": keep.best_model_path, "tested": tested, "outputs": outputs.detach(), "state": state}


def test_model_checkpoint_and_the_whole_module_after_fit(tmp_path):
    """Top-k, the link to the last one, ``ckpt_path="best"`` and ``whole_module()`` work on every rank."""
    first, second = run_distributed(keep_checkpoints, 2, (str(tmp_path),), init_group=False)
    plain = ModelCheckpoint(tmp_path / "one", monitor="val_loss", save_top_k=2, filename="{epoch}-{val_loss:.3f}")
    fit("auto", val=make_loader(), max_epochs=4, callbacks=[plain], enable_checkpointing=True)
    names = {path.name for path in tmp_path.glob("epoch*.ckpt")}
    assert names == {path.name for path in (tmp_path / "one").glob("*.ckpt")}
    assert (tmp_path / "last.ckpt").is_symlink()
    assert first["best"] == second["best"]
    assert first["tested"] == second["tested"]
    assert largest_difference(first["state"], second["state"]) == 0
    torch.testing.assert_close(first["outputs"], second["outputs"], rtol=0, atol=0)
    best = Classifier.load_from_checkpoint(first["best"], weights_only=True)
    torch.testing.assert_close(best.net(torch.ones(2, 4)), first["outputs"])


class SavesAlone(L.Callback):
    """The widespread mistake."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.is_global_zero:
            trainer.save_checkpoint("alone.ckpt")


def save_alone() -> str:
    meeting.WAIT_SECONDS = 1.0
    with pytest.raises(Exception, match=r"save_checkpoint was called on 1 of 2 ranks") as told:
        fit(pipeline(), devices=2, callbacks=[SavesAlone()])
    return str(told.value)


def test_saving_on_rank_zero_only_is_an_error_and_no_hang():
    """``if trainer.is_global_zero: trainer.save_checkpoint()`` says that every rank must call it."""
    from d9d_lightning.testing import collect_outcomes

    outcomes = collect_outcomes(save_alone, 2, init_group=False, timeout=60.0, fresh=True)
    assert outcomes[0].error is None
    assert "is_global_zero" in outcomes[0].value
    assert outcomes[1].exit_code is not None
    assert "save_checkpoint was called on 1 of 2 ranks" in outcomes[1].output


def test_a_directory_checkpoint_is_consolidated_by_lightnings_own_tool(tmp_path):
    """Lightning's ``consolidate_checkpoint`` makes one file of the directory, which loads strictly."""
    run("directory", 2, tmp_path / "parts.ckpt", None, 1)
    run("zbv", 2, tmp_path / "file.ckpt", None, 1)
    assert (tmp_path / "parts.ckpt").is_dir()
    tool = "lightning.pytorch.utilities.consolidate_checkpoint"
    command = [sys.executable, "-m", tool, str(tmp_path / "parts.ckpt"), "--output_file", str(tmp_path / "one.ckpt")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    one, plain = (torch.load(tmp_path / f"{name}.ckpt", weights_only=True)["state_dict"] for name in ("one", "file"))
    Tied().load_state_dict(one, strict=True)
    assert largest_difference(one, plain) == 0
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def middle(make: Any, folder: Any) -> tuple[list[float], list[float]]:
    """Stop in the middle of an epoch, and go on from there."""
    keep = ModelCheckpoint(folder, every_n_train_steps=6, save_top_k=-1, filename="{step}")
    _, _, whole = fit(make(), loader=make_loader(), callbacks=[keep], enable_checkpointing=True, max_epochs=3)
    _, _, rest = fit(make(), loader=make_loader(), max_epochs=3, ckpt=str(folder / "step=6.ckpt"))
    return whole.losses, rest.losses


def test_a_run_resumed_in_the_middle_of_an_epoch_goes_on_as_lightning_does(tmp_path):
    """After step 6 of an epoch of 4 batches, the same batches come and give the same losses as on one device."""
    plain = middle(lambda: "auto", tmp_path / "plain")
    ours = middle(pipeline, tmp_path / "ours")
    assert ours[0] == pytest.approx(plain[0], abs=2e-6)
    assert ours[1] == pytest.approx(plain[1], abs=2e-6)


def decide(strategy: Any, devices: int, folder: str, epochs: int, start: str | None, average: bool) -> list[float]:
    """Train with callbacks that remember; the loss that does not grow stops the run after its fourth epoch."""
    callbacks: list[Any] = [
        EarlyStopping("val_loss", mode="max", patience=3),
        ModelCheckpoint(f"{folder}/top", monitor="val_loss", save_top_k=2, filename="{epoch}", save_last=True),
    ]
    if average:
        callbacks.append(EMAWeightAveraging(decay=0.8))
    _, trainer, seen = fit(
        strategy,
        loader=make_loader(),
        val=make_loader(),
        ckpt=start,
        devices=devices,
        max_epochs=epochs,
        callbacks=callbacks,
        enable_checkpointing=True,
    )
    trainer.save_checkpoint(f"{folder}/{epochs}.ckpt")
    return seen.losses


def decide_twice(devices: int, folder: str, average: bool) -> list[float]:
    begun, ended = (pipeline(), pipeline(schedule="1f1b")) if devices > 1 else ("auto", "auto")
    losses = decide(begun, devices, folder, 2, None, average)
    # the average takes the place of the parameters at the end of training: go on from within the fit
    start = f"{folder}/top/last.ckpt" if average else f"{folder}/2.ckpt"
    return losses + decide(ended, devices, folder, 8, start, average)


def decide_in_both_ways(folder: str) -> list[list[float]]:
    return [decide_twice(2, f"{folder}/{average}", average) for average in (False, True)]


def plainly(value: Any) -> Any:
    """The value with names of files for paths and numbers for tensors."""
    if isinstance(value, dict):
        return {plainly(key): plainly(one) for key, one in value.items()}
    if isinstance(value, torch.Tensor):
        return float(value)
    return Path(value).name if isinstance(value, str) and "/" in value else value


def close(value: Any) -> Any:
    """The value, every float of which stands for those near it."""
    if isinstance(value, dict):
        return {key: close(one) for key, one in value.items()}
    return pytest.approx(value, abs=1e-5) if isinstance(value, float) else value


def assert_decisions_equal(ours: Path, theirs: Path) -> None:
    """Files that are kept, states of callbacks, parameters and their averages."""
    assert {path.name for path in (ours / "top").iterdir()} == {path.name for path in (theirs / "top").iterdir()}
    mine, other = (torch.load(folder / "8.ckpt", weights_only=True) for folder in (ours, theirs))
    stop = next(state for name, state in other["callbacks"].items() if "EarlyStopping" in name)
    assert (stop["wait_count"], stop["stopped_epoch"]) == (3, 3)
    assert list(mine["callbacks"]) == list(other["callbacks"])
    assert plainly(mine["callbacks"]) == close(plainly(other["callbacks"]))
    for key in {"state_dict", "current_model_state", "averaging_state"} & other.keys():
        assert largest_difference(mine[key], other[key]) < 1e-5, key


@pytest.mark.full
def test_callbacks_go_on_from_where_they_were(tmp_path):
    """EarlyStopping, ModelCheckpoint and the weight average on two ranks decide after a resume as on one device."""
    ranks = run_distributed(decide_in_both_ways, 2, (str(tmp_path / "two"),), init_group=False)
    resumed = decide_twice(1, str(tmp_path / "plain" / "False"), average=False)
    averaged = decide_twice(1, str(tmp_path / "plain" / "True"), average=True)
    assert len(resumed) == len(averaged) == 16
    for losses in ranks:
        assert losses[0] == pytest.approx(resumed, abs=5e-6)
        assert losses[1] == pytest.approx(averaged, abs=5e-6)
    for average in ("False", "True"):
        assert_decisions_equal(tmp_path / "two" / average, tmp_path / "plain" / average)
