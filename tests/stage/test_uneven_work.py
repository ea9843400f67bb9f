"""Microbatches, batches and sequences of unequal size train as on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from tests.parity import StepModule, assert_same_outcome, train_pipeline, train_plain
from tests.parity_basics import Residual, pairs, tokens, translation
from tests.parity_networks import EncoderDecoder, Gpt, SharedHeadGpt
from tests.parity_transformers import Llama, causal

LAYOUTS = [("gpipe", 2), ("1f1b", 4), ("zbv", 2), ("zbv", 4)]


def assert_equal_to_one_device(
    kind: type[StepModule], batches: Sequence[Any], layout: tuple[str, int], count: int = 4
) -> list[int]:
    """Train on whole batches and in pieces; returns the number of microbatches of each batch."""
    torch.manual_seed(0)
    module = kind()
    expected = train_plain(module, batches, 1)
    got = train_pipeline(module, batches, count, schedule=layout[0], ranks=layout[1])
    assert_same_outcome(module, expected, got)
    return [len(losses) for losses in got.losses]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("kind", "batch"), [(Residual, pairs), (Gpt, tokens), (EncoderDecoder, translation)])
def test_ten_samples_in_four_microbatches(kind: type[StepModule], batch: Any, layout: tuple[str, int]) -> None:
    """Ten samples make microbatches of 3, 3, 2 and 2, each weighed by its size."""
    assert assert_equal_to_one_device(kind, [batch(i, 10) for i in range(3)], layout) == [4, 4, 4]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_last_batch_with_fewer_samples_than_microbatches(layout: tuple[str, int]) -> None:
    """A last batch of three samples makes three microbatches, and the epoch before it is not disturbed."""
    assert assert_equal_to_one_device(Gpt, [tokens(0), tokens(1), tokens(2, 3)], layout) == [4, 4, 3]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_batch_of_one_sample(layout: tuple[str, int]) -> None:
    """A single sample passes through all stages as one microbatch."""
    assert assert_equal_to_one_device(Residual, [pairs(0, 1), pairs(1), pairs(2, 1)], layout) == [1, 4, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("kind", "batch"), [(Gpt, tokens), (SharedHeadGpt, tokens), (EncoderDecoder, translation), (Llama, causal)]
)
def test_lengths_that_change_from_batch_to_batch(kind: type[StepModule], batch: Any, layout: tuple[str, int]) -> None:
    """Sequences of 7, 3 and 11 tokens in turn, then 7 again, each find their own shapes."""
    assert_equal_to_one_device(kind, [batch(i, 4, length) for i, length in enumerate((7, 3, 11, 7))], layout)


def test_lengths_that_differ_between_microbatches() -> None:
    """Each microbatch may cut its padding off by itself, because shapes are looked up for each."""

    class Trimmed(Gpt):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            length = int((batch["tokens"] != 0).sum(1).max())
            return super().training_step({name: tensor[:, :length] for name, tensor in batch.items()}, batch_idx)

    def ragged(index: int) -> dict[str, torch.Tensor]:
        batch = tokens(index, 4, 8)
        for row, length in enumerate((8, 3, 5, 1)):
            batch["tokens"][row, length:] = 0
        return batch

    torch.manual_seed(0)
    module, batches = Trimmed(), [ragged(i) for i in range(3)]
    got = train_pipeline(module, batches, 4, schedule="zbv", ranks=2)
    assert_same_outcome(module, train_plain(module, batches, 4), got)
