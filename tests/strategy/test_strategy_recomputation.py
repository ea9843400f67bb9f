"""``D9DStrategy(activation_checkpointing=...)`` in a real run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_lightning import D9DStrategy
from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.testing import run_distributed
from tests.strategy.strategy_cases import Classifier, fit, largest_difference, pipeline


class Block(nn.Module):
    """A layer with dropout; counts its runs where no snapshot sees it."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3))

    def forward(self, x: Tensor) -> Tensor:
        Block.runs += 1
        return x + self.net(x)


class Blocks(Classifier):
    """Eight of them."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), *(Block() for _ in range(8)), nn.Linear(8, 3))


def train(folder: str, devices: int, options: dict[str, Any]) -> tuple[list[float], int]:
    Block.runs = 0
    _, trainer, seen = fit(pipeline(**options), Blocks, devices=devices, max_epochs=1)
    trainer.save_checkpoint(f"{folder}/end.ckpt")
    return seen.losses, Block.runs


@pytest.mark.parametrize("options", [{"activation_checkpointing": Block}, {"activation_checkpointing_policy": {Block}}])
def test_recomputed_layers_train_as_on_one_process_without(tmp_path: Any, options: dict[str, Any]) -> None:
    """With dropout, two processes that recompute give the losses and the file of one that does not."""
    (tmp_path / "one").mkdir()
    one, _ = train(str(tmp_path / "one"), 1, {})
    _, plain = train(str(tmp_path), 1, {"schedule": "zbv"})
    _, twice = train(str(tmp_path), 1, {"schedule": "zbv", **options})
    assert twice - plain == 8 * 3 * 3 + 8 * 3  # 8 layers; 3 batches of 3 microbatches and one of 4 samples, 3 too
    for losses, _ in run_distributed(train, 2, (str(tmp_path), 2, options), init_group=False):
        assert losses == pytest.approx(one, abs=2e-6)
    ours, theirs = (
        torch.load(tmp_path / name, weights_only=True)["state_dict"] for name in ("end.ckpt", "one/end.ckpt")
    )
    assert list(ours) == list(theirs)
    assert largest_difference(ours, theirs) < 5e-6


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"activation_checkpointing": Block, "activation_checkpointing_policy": {Block}}, "Give one of"),
        ({"activation_checkpointing": ["Block"]}, "classes of modules"),
        ({"activation_checkpointing": []}, "classes of modules"),
        ({"activation_checkpointing_policy": {3}}, "classes of modules"),
        ({"activation_checkpointing_policy": "blocks"}, "classes of modules"),
    ],
)
def test_what_is_no_policy_is_refused(options: dict[str, Any], told: str) -> None:
    """Anything but classes of modules or a policy is refused with a line to type."""
    with pytest.raises(PipelineConfigurationError, match=told):
        D9DStrategy(**options)
