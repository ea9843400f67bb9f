"""Modules that are built, compiled or used in ways of their own."""

from __future__ import annotations

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.tuner import Tuner
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, Classifier, fit, largest_difference, make_loader, pipeline


class Compiled(Classifier):
    """Its layers are compiled, half of them in place and half by the function."""

    def __init__(self) -> None:
        super().__init__(width=16)
        self.net = nn.ModuleList([nn.Linear(4, 16), *(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(6))])
        self.head = nn.Linear(16, 3)
        for index in (1, 3, 5):
            self.net[index].compile(backend="aot_eager")
        for index in (2, 4, 6):
            self.net[index] = torch.compile(self.net[index], backend="aot_eager")

    def loss_of(self, batch: Any) -> tuple[Tensor, Tensor]:
        x = batch[0]
        for layer in self.net:
            x = layer(x)
        return F.cross_entropy(self.head(x), batch[1]), self.head(x)


def train_compiled(folder: str) -> list[float]:
    _, trainer, seen = fit(pipeline(), Compiled, devices=2)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return seen.losses


@pytest.mark.full
def test_compiled_layers_train_as_on_one_device(tmp_path: Any) -> None:
    """With ``torch.compile`` on its layers, two processes give the losses and parameters of one device."""
    plain, _, seen = fit("auto", Compiled)
    for losses in run_distributed(train_compiled, 2, (str(tmp_path),), init_group=False, timeout=240.0):
        assert losses == pytest.approx(seen.losses, abs=2e-6)
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    assert largest_difference(saved, plain.state_dict()) < 5e-6


class Greedy(nn.Module):
    """Has no memory for more than ten samples."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        if len(x) > 10 and type(x) is Tensor:  # a fake tensor needs no memory
            raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate too much")
        return self.linear(x)


class GreedyClassifier(Classifier):
    """Runs out of memory in its first or its last layer."""

    def __init__(self, first: bool) -> None:
        super().__init__()
        greedy, other = Greedy(), nn.Linear(8, 8)
        self.net = nn.Sequential(nn.Linear(4, 8), *((greedy, other) if first else (other, greedy)), nn.Linear(8, 3))
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return make_loader(44, self.batch_size)

    def val_dataloader(self) -> Any:
        return make_loader(6, 3)


def find_batch_size(strategy: Any, devices: int, first: bool) -> tuple[int, int]:
    L.seed_everything(7, verbose=False)
    module = GreedyClassifier(first)
    trainer = L.Trainer(strategy=strategy, devices=devices, max_epochs=1, **QUIET)
    found = Tuner(trainer).scale_batch_size(module, steps_per_trial=1, max_trials=6)
    trainer.fit(module)
    return found, trainer.global_step


def find_on_two(first: bool) -> tuple[int, int]:
    return find_batch_size(pipeline(num_microbatches=1, schedule="1f1b"), 2, first)


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.full)])
def test_the_batch_size_finder_goes_back_where_one_rank_has_no_memory(first: bool) -> None:
    """Where one rank runs out of memory, all ranks find the batch size of one device, and train on."""
    expected = find_batch_size("auto", 1, first)
    assert expected == (8, 6)
    assert run_distributed(find_on_two, 2, (first,), init_group=False) == [expected, expected]


class Writer(L.LightningModule):
    """A transformers GPT-2 that writes in validation, and after the fit."""

    def __init__(self) -> None:
        super().__init__()
        transformers = pytest.importorskip("transformers")
        config = transformers.GPT2Config(
            n_layer=4,
            n_head=2,
            n_embd=16,
            vocab_size=32,
            n_positions=32,
            bos_token_id=0,
            eos_token_id=31,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
        self.model = transformers.GPT2LMHeadModel(config)
        self.written: list[list[int]] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch, labels=batch, use_cache=False).loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        text = self.model.generate(batch[:, :3], max_new_tokens=5, do_sample=False, pad_token_id=31)
        self.log("length", float(text.shape[1]))
        self.log("first", text[:, 3].float().mean())

    def on_train_end(self) -> None:
        text = self.model.generate(
            torch.ones(1, 2, dtype=torch.long), max_new_tokens=6, do_sample=False, pad_token_id=31
        )
        self.written = text.tolist()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def write(strategy: Any, devices: int) -> dict[str, Any]:
    words = torch.randint(1, 31, (8, 8), generator=torch.Generator().manual_seed(0))
    loader = DataLoader(words, batch_size=4)
    module, trainer, seen = fit(strategy, Writer, loader=loader, val=loader, devices=devices, max_epochs=3)
    metrics = {key: float(value) for key, value in trainer.callback_metrics.items()}
    return {"written": module.written, "metrics": metrics, "losses": seen.losses}


def write_on_two() -> dict[str, Any]:
    return write(pipeline(num_microbatches=2), 2)


def test_a_transformers_model_generates_in_validation_and_after_the_fit() -> None:
    """``generate()`` in ``validation_step`` and ``on_train_end`` writes what one device writes, on each rank."""
    one = write("auto", 1)
    for rank in run_distributed(write_on_two, 2, init_group=False, timeout=240.0):
        assert rank["written"] == one["written"]
        assert rank["metrics"] == pytest.approx(one["metrics"], abs=1e-5)
        assert rank["losses"] == pytest.approx(one["losses"], abs=1e-5)


class Looks(L.Callback):
    """Reads the module as callbacks do, and counts the sanity check."""

    def __init__(self) -> None:
        self.sane = 0
        self.names: list[str] = []

    def on_sanity_check_end(self, trainer: Any, pl_module: Any) -> None:
        self.sane += 1

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        assert trainer.model is pl_module is trainer.lightning_module
        assert not pl_module.net[0].training or pl_module.training
        self.names = [name for name, _ in trainer.model.named_parameters()]


def look(folder: str) -> dict[str, Any]:
    looks = Looks()
    options = {"callbacks": [looks, TQDMProgressBar(1)], "enable_progress_bar": True, "num_sanity_val_steps": 2}
    _, _, seen = fit(pipeline(), val=make_loader(), devices=2, max_epochs=1, **options)
    return {"sane": looks.sane, "names": looks.names, "losses": seen.losses}


def test_the_sanity_check_and_the_bar_leave_training_alone(tmp_path: Any) -> None:
    """With a sanity check, a TQDM bar and a callback that reads ``trainer.model``, all is as on one device."""
    plain, _, seen = fit("auto", val=make_loader(), max_epochs=1, num_sanity_val_steps=2)
    for rank in run_distributed(look, 2, (str(tmp_path),), init_group=False):
        assert rank["sane"] == 1
        assert rank["names"] == [name for name, _ in plain.named_parameters()]
        assert rank["losses"] == pytest.approx(seen.losses, abs=2e-6)


def predict(folder: str) -> list[Tensor] | None:
    L.seed_everything(7, verbose=False)
    module = Classifier()
    trainer = L.Trainer(strategy=pipeline(data_parallel_size=2), devices=4, **QUIET)
    predicted = trainer.predict(module, make_loader(22, 6))
    return [batch.clone() for batch in predicted] if trainer.is_global_zero else None


@pytest.mark.full
def test_predict_on_two_replicas_of_two_gives_every_sample_once() -> None:
    """With ``data_parallel_size=2`` rank 0 gets every sample once and in order, in the batches of the loader."""
    L.seed_everything(7, verbose=False)
    expected = Classifier().net(make_loader().dataset.tensors[0])
    predicted = run_distributed(predict, 4, ("",), init_group=False)[0]
    assert [len(batch) for batch in predicted] == [6, 6, 6, 4]
    torch.testing.assert_close(torch.cat(predicted), expected)


class Empty(Classifier):
    """Has what ``empty_init`` leaves uninitialised filled by a checkpoint."""


def resume_empty(path: str) -> list[float]:
    trainer = L.Trainer(strategy=pipeline(), devices=2, max_epochs=2, **QUIET)
    with trainer.init_module(empty_init=True):
        module = Empty()
    trainer.fit(module, make_loader(), ckpt_path=path)
    with trainer.strategy.whole_module():
        return [float(value.sum()) for value in module.state_dict().values()]


def test_a_module_built_under_init_module_is_filled_by_its_checkpoint(tmp_path: Any) -> None:
    """``trainer.init_module(empty_init=True)`` and ``ckpt_path`` give the parameters of one device."""
    _, trainer, _ = fit("auto", Empty, loader=make_loader(), max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    whole, _, _ = fit("auto", Empty, loader=make_loader(), max_epochs=2, ckpt=tmp_path / "one.ckpt")
    expected = [float(value.sum()) for value in whole.state_dict().values()]
    for sums in run_distributed(resume_empty, 2, (str(tmp_path / "one.ckpt"),), init_group=False):
        assert sums == pytest.approx(expected, abs=1e-4)
