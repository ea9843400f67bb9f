"""Weights that come from files: read where they are owned, from pretrained models and from checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.pipeline import Pipeline
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import QUIET, fit, largest_difference, make_loader, pipeline

WIDTH = 1024
BLOCKS = 8
BLOCK_BYTES = 4 * WIDTH * WIDTH


class Wide(L.LightningModule):
    """Eight square layers of four megabytes each, built on the meta device where asked."""

    def __init__(self, on_meta: bool = True) -> None:
        super().__init__()
        self.on_meta = on_meta
        self.net: nn.Sequential | None = None

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta" if self.on_meta else "cpu"):
                layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(BLOCKS)]
                self.net = nn.Sequential(nn.Linear(4, WIDTH), *layers, nn.Linear(WIDTH, 3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def characters_read() -> int:
    """Bytes that this process has read from files so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])


class Watched:
    """Counts what giving values to the module reads."""

    def __init__(self) -> None:
        self.read = 0
        self._release = Pipeline.release

    def __enter__(self) -> Watched:
        def release(*args: Any, **kwargs: Any) -> None:
            before = characters_read()
            self._release(*args, **kwargs)
            self.read = characters_read() - before

        Pipeline.release = release  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        Pipeline.release = self._release  # type: ignore[method-assign]


def fine_tune(weights: str, folder: str) -> tuple[list[float], int]:
    with Watched() as watched:
        strategy = pipeline(schedule="1f1b", pretrained_weights={"net": weights})
        _, trainer, seen = fit(strategy, Wide, devices=2, max_epochs=1, loader=make_loader())
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return seen.losses, watched.read


def test_pretrained_weights_are_read_where_they_are_owned(tmp_path: Path) -> None:
    """Each rank reads its half of the file, and training equals one device that has loaded all of it."""
    save_file = pytest.importorskip("safetensors.torch").save_file
    torch.manual_seed(1)
    start = Wide(on_meta=False)
    start.configure_model()
    weights = {name: tensor.clone() for name, tensor in start.net.state_dict().items()}
    save_file(weights, tmp_path / "model.safetensors")

    def loaded() -> Wide:
        module = Wide(on_meta=False)
        module.configure_model()
        module.net.load_state_dict(weights)
        return module

    plain, _, seen = fit("auto", loaded, max_epochs=1, loader=make_loader())
    ranks = run_distributed(fine_tune, 2, (str(tmp_path / "model.safetensors"), str(tmp_path)), init_group=False)
    for losses, read in ranks:
        assert losses == pytest.approx(seen.losses, abs=2e-6)
        assert read < 0.6 * BLOCKS * BLOCK_BYTES
    assert sum(read for _, read in ranks) >= BLOCKS * BLOCK_BYTES
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    assert largest_difference(saved, plain.state_dict()) < 5e-6


class LooksAtMapping(L.Callback):
    """How much of the checkpoint file this process has touched when its module is restored."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.touched = -1

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        text = Path("/proc/self/smaps").read_text()
        found = re.findall(rf"{re.escape(self.path)}\n(?:.*\n)*?Rss: +(\d+) kB", text)
        self.touched = sum(map(int, found)) * 1024


def resume(path: str, on_meta: bool) -> tuple[list[float], int]:
    looks = LooksAtMapping(path)
    options = {"devices": 2, "max_epochs": 2, "callbacks": [looks], "loader": make_loader()}
    _, trainer, seen = fit(pipeline(schedule="1f1b"), lambda: Wide(on_meta), ckpt=path, **options)
    trainer.save_checkpoint(f"{Path(path).parent}/end.ckpt")
    return seen.losses, looks.touched


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "memory"])
def test_a_checkpoint_is_read_where_it_is_owned(tmp_path: Path, on_meta: bool) -> None:
    """Resuming touches this rank's half of the file, built on the meta device or not, and equals one device."""
    make = lambda: Wide(on_meta=False)  # noqa: E731
    path = str(tmp_path / "half.ckpt")
    _, trainer, _ = fit("auto", make, max_epochs=1, loader=make_loader())
    trainer.save_checkpoint(path)
    whole, _, seen = fit("auto", make, max_epochs=2, ckpt=path, loader=make_loader())
    for losses, touched in run_distributed(resume, 2, (path, on_meta), init_group=False):
        assert losses == pytest.approx(seen.losses, abs=2e-6)
        # the kernel maps up to two megabytes around what is touched
        assert BLOCK_BYTES < touched < 0.75 * BLOCKS * BLOCK_BYTES
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)["state_dict"]
    assert largest_difference(saved, whole.state_dict()) < 5e-6


def test_a_meta_built_module_is_restored_in_one_process(tmp_path: Path) -> None:
    """With one process too, ``ckpt_path`` fills a module that was built on the meta device."""
    _, trainer, _ = fit(pipeline(), Wide, max_epochs=1)
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)["state_dict"]
    module = Wide()
    L.Trainer(strategy=pipeline(), devices=1, max_epochs=1, **QUIET).fit(
        module, make_loader(), ckpt_path=tmp_path / "one.ckpt"
    )
    assert largest_difference(saved, module.state_dict()) == 0


@pytest.mark.parametrize("value", [3, {}, {"net": 3}, {3: "weights"}, ["weights"]], ids=str)
def test_what_is_no_path_is_refused(value: Any) -> None:
    """Anything but a path, or a path for each submodule, is refused with a line to type."""
    with pytest.raises(PipelineConfigurationError, match="pretrained_weights="):
        pipeline(pretrained_weights=value)
