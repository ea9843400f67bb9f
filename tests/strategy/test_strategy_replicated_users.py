"""What users do to gradients, on two replicated pipelines: one device gives the same parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from d9d_lightning.testing import run_distributed
from tests.strategy.replicated_cases import (
    Outcome,
    TiedModel,
    assert_replicas_equal,
    make_tokens,
    replicated,
    train,
)
from tests.strategy.strategy_cases import largest_difference

HALF, STEPS = 8, 4


def mask_rows(parameter: Tensor) -> None:
    """A mask gives the same result whether it meets every microbatch or their sum."""
    parameter.grad[: len(parameter.grad) // 2] = 0.0


class HookedFromTheStart(TiedModel):
    """Hooks on parameters, put there before the strategy has seen them: one stage, another, and a shared one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0][0].weight.register_hook(lambda gradient: gradient * 2)
        self.blocks[3][2].weight.register_hook(lambda gradient: gradient * 3)
        self.embedding.weight.register_hook(lambda gradient: -gradient)
        self.blocks[1][0].weight.register_post_accumulate_grad_hook(mask_rows)
        self.blocks[3][0].bias.register_post_accumulate_grad_hook(mask_rows)


class HookedLate(TiedModel):
    """The same, put there when the fit begins."""

    def on_train_start(self) -> None:
        self.blocks[0][0].weight.register_hook(lambda gradient: gradient * 2)
        self.blocks[1][0].weight.register_post_accumulate_grad_hook(mask_rows)
        self.blocks[3][0].bias.register_post_accumulate_grad_hook(mask_rows)


class Replacing(TiedModel):
    """Drops, replaces and repoints gradients in hooks, on the rank that has them."""

    def on_after_backward(self) -> None:
        parameters = dict(self.named_parameters())
        for name in ("blocks.0.0.weight", "blocks.3.0.weight"):
            if parameters[name].grad is not None:
                parameters[name].grad = parameters[name].grad * 0.5
        for name in ("blocks.0.2.bias", "blocks.3.2.bias"):
            parameters[name].grad = None

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for name, parameter in self.named_parameters():
            if name in ("blocks.1.0.weight", "blocks.2.0.weight") and parameter.grad is not None:
                parameter.grad.data = parameter.grad.data * 2


class Routed(TiedModel):
    """Every other batch of a replica takes another unit and, inside a unit, other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 8)
        self.expert = Expert()
        self.never = nn.Linear(8, 8)

    def logits(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids)
        for number, block in enumerate(self.blocks):
            x = x + block(x)
            if number == 1 and bool((ids[:, 0] == 0).all()):
                x = x + self.extra(x)
        return self.head(self.norm(self.expert(x, ids)))


class Expert(nn.Module):
    """Two linear layers, of which one takes a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        chosen = self.left if bool((ids[:, 0] == 0).all()) else self.right
        return x + chosen(x)


class Unfreeze(BaseFinetuning):
    """The first two blocks train from the second epoch on."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze([pl_module.blocks[0], pl_module.blocks[1]])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([pl_module.blocks[0], pl_module.blocks[1]], optimizer, lr=0.01)


class Thawing(L.Callback):
    """Thaws a block between two batches; the optimizer has had its parameters all along."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.blocks[1].requires_grad_(False)

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        pl_module.blocks[1].requires_grad_(trainer.global_step >= 2)


class Trainable(TiedModel):
    """Optimizes what is not frozen."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1, momentum=0.9)


def routed_tokens() -> TensorDataset:
    """Half batches whose first word says where they go: together, apart, and the other way round."""
    ids, targets = make_tokens(2 * HALF * STEPS).tensors
    for half, kind in enumerate([0, 1, 1, 0, 0, 0, 1, 0]):
        ids[half * HALF : (half + 1) * HALF, 0] = kind
    return TensorDataset(ids, targets)


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "hooks from the start": lambda: {"make": HookedFromTheStart},
    "late hooks": lambda: {"make": HookedLate},
    "replaced gradients": lambda: {"make": Replacing},
    "unfrozen by a callback": lambda: {"make": Trainable, "callbacks": [Unfreeze()], "max_epochs": 3},
    "thawed between batches": lambda: {"callbacks": [Thawing()]},
    "routed": lambda: {"make": Routed, "data": routed_tokens()},
}


def run(schedule: str) -> dict[str, Outcome]:
    found = {}
    for name, case in CASES.items():
        # a batch that shows every unit: one that is never called has no place between the others
        example = [tensor[:HALF] for tensor in routed_tokens().tensors] if name == "routed" else None
        strategy = replicated(schedule=schedule, num_microbatches=2, example_batch=example)
        found[name] = train(strategy, 4, 2, batch=2 * HALF, steps=STEPS, **case())
    return found


@pytest.mark.parametrize("schedule", ["zbv", pytest.param("1f1b", marks=pytest.mark.full)])
@pytest.mark.filterwarnings("ignore")
def test_users_cannot_break_replicated_pipelines(schedule: str) -> None:
    """Hooks on parameters, replaced gradients, thawed and routed layers end as on one device."""
    ranks: list[dict[str, Outcome]] = run_distributed(run, 4, (schedule,), timeout=200)
    for name, case in CASES.items():
        # what depends on the batch has to see each replica's part by itself
        halves = 2 if name == "routed" else 1
        one = train("auto", 1, 1, batch=2 * HALF // halves, steps=STEPS, accumulate=halves, **case())
        found = [rank[name] for rank in ranks]
        assert len(one.norms) >= STEPS, name
        assert largest_difference(one.state, found[0].state) < 1e-5, name
        assert found[0].norms == pytest.approx(one.norms, rel=1e-5), name
        assert_replicas_equal(found)
