"""One run whose resident memory is measured, in every process of it; ``run.py`` starts it and reads what it writes."""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from d9d_lightning import D9DStrategy

BLOCKS = 12
WORDS = 1000
LENGTH = 16


class Block(nn.Module):
    """The usual two linear layers of a transformer block, which hold most of its parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(LightningModule):
    """Equal blocks between a small embedding and a small head."""

    def __init__(self, width: int, on_meta: bool) -> None:
        super().__init__()
        self.width, self.on_meta = width, on_meta
        self.net: nn.Sequential | None = None
        if not on_meta:
            self.net = self.build()

    def build(self) -> nn.Sequential:
        blocks = [Block(self.width) for _ in range(BLOCKS)]
        return nn.Sequential(nn.Embedding(WORDS, self.width), *blocks, nn.Linear(self.width, WORDS))

    def configure_model(self) -> None:
        if self.net is None:
            with torch.device("meta"):
                self.net = self.build()

    def training_step(self, batch: tuple[Tensor], batch_idx: int) -> Tensor:
        assert self.net is not None
        return F.cross_entropy(self.net(batch[0][:, :-1]).flatten(0, 1), batch[0][:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-4)


def status(name: str) -> int:
    """An entry of this process's status, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise KeyError(name)


class Peak:
    """The largest anonymous memory within a block, above what was there before it; looked at every 2 ms."""

    def __enter__(self) -> Peak:
        gc.collect()
        self.before = self.largest = status("RssAnon")
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._ends.is_set():
            self.largest = max(self.largest, status("RssAnon"))
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join()

    @property
    def rise(self) -> int:
        """In bytes."""
        return self.largest - self.before


def make_trainer(ranks: int, folder: Path) -> Trainer:
    """A plain Trainer for one device, else this strategy."""
    strategy: Any = D9DStrategy(schedule="1f1b", num_microbatches=4) if ranks > 1 else "auto"
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=ranks,
        max_steps=3,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )


def main() -> None:
    warnings.filterwarnings("ignore")
    ranks, width, on_meta, folder = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "meta", Path(sys.argv[4])
    torch.set_num_threads(1)
    seed_everything(0, verbose=False)
    data = TensorDataset(torch.randint(0, WORDS, (48, LENGTH)))
    trainer = make_trainer(ranks, folder)
    with Peak() as training:
        model = Model(width, on_meta)
        trainer.fit(model, DataLoader(data, batch_size=16))
        gc.collect()
        left = status("RssAnon") - training.before
    parameters = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    with Peak() as saving:
        trainer.save_checkpoint(folder / "end.ckpt")
    found = {"peak": training.rise, "left": left, "saving": saving.rise, "parameters": parameters}
    ends = sum(p.numel() for part in (model.net[0], model.net[-1]) for p in part.parameters()) * 4
    found["ends"] = ends
    (folder / f"rank{trainer.global_rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
