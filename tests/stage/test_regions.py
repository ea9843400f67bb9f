"""Activation checkpointing in its less common forms, around units and inside them."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from tests.parity import StepModule, assert_same_outcome, train_pipeline, train_plain
from tests.parity_basics import Residual, pairs
from tests.parity_transformers import T5, Gpt2, Llama, causal, seq2seq


class Nested(Residual):
    """Regions in regions, one of them without early stop."""

    def body(self, x: Tensor) -> Tensor:
        def run(x: Tensor, first: int, last: int) -> Tensor:
            for layer in list(self.blocks)[first:last]:
                x = torch.tanh(x + checkpoint(layer, x, use_reentrant=False))
            return x

        x = checkpoint(run, self.blocks[0](x), 1, 3, use_reentrant=False)
        return checkpoint(run, x, 3, 6, use_reentrant=False, early_stop=False)


class Selective(Residual):
    """Regions that keep the results of matrix products."""

    def body(self, x: Tensor) -> Tensor:
        keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])

        def run(x: Tensor, first: int, last: int) -> Tensor:
            for layer in list(self.blocks)[first:last]:
                x = torch.tanh(x + layer(x))
            return x

        x = checkpoint(run, x, 0, 3, use_reentrant=False, context_fn=keep)
        return checkpoint(run, x, 3, 6, use_reentrant=False, context_fn=keep)


class WithoutRandomState(Residual):
    """Regions that do not restore the random state, each in a lambda of its own."""

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            region = lambda x, layer=layer: torch.tanh(x + layer(x))  # noqa: E731
            x = checkpoint(region, x, use_reentrant=False, preserve_rng_state=False)
        return x


class FillsAList(Residual):
    """Regions that put an auxiliary loss into a list around them."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        losses: list[Tensor] = []

        def run(x: Tensor, layer: nn.Module) -> Tensor:
            y = torch.tanh(layer(x))
            losses.append(y.square().mean())
            return x + y

        x = batch[0]
        for layer in self.blocks:
            x = checkpoint(run, x, layer, use_reentrant=False)
        auxiliary = torch.stack(losses[:6]).sum()
        return nn.functional.cross_entropy(self.head(x), batch[1]) + 0.1 * auxiliary


@pytest.mark.parametrize(("schedule", "ranks", "count"), [("zbv", 2, 2), ("1f1b", 3, 3)])
@pytest.mark.parametrize("kind", [Nested, Selective, WithoutRandomState, FillsAList])
def test_regions_train_as_on_one_device(kind: type[StepModule], schedule: str, ranks: int, count: int) -> None:
    """Nested, selective and impure regions give the gradients of one device."""
    torch.manual_seed(0)
    module, batches = kind(), [pairs(index) for index in range(3)]
    got = train_pipeline(module, batches, count, schedule=schedule, ranks=ranks)
    assert_same_outcome(module, train_plain(module, batches, count), got)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("kind", "batch"), [(Llama, causal), (Gpt2, causal), (T5, seq2seq)])
def test_transformers_recompute_their_layers(kind: type[StepModule], batch: Any, reentrant: bool) -> None:
    """With the library's own switch for recomputing layers, training equals one device."""
    torch.manual_seed(0)
    module = kind()
    module.model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    batches = [batch(index) for index in range(2)]
    got = train_pipeline(module, batches, 2, schedule="zbv", ranks=2)
    assert module.model.is_gradient_checkpointing
    assert_same_outcome(module, train_plain(module, batches, 2), got)
