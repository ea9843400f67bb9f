"""Faults that users of other pipelines ran into, each on one process: all ranks in simulated order.

The rows that need real processes are in test_user_cases_processes.py; docs/reliability.md lists them all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.schedule import build_program, check_program
from tests.parity import StepModule, adamw, assert_equal_training, train_pipeline, train_plain
from tests.parity_basics import images
from tests.parity_modules import Case
from tests.parity_networks import UNet

WIDTH = 6


def batch_of(size: int = 8, seed: int = 0, width: int = WIDTH) -> dict[str, Tensor]:
    """Features, classes, and a mask of valid features."""
    source = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(size, width, generator=source),
        "y": torch.randint(0, 3, (size,), generator=source),
        "mask": torch.rand(size, width, generator=source) > 0.3,
    }


class Deep(StepModule):
    """Eight layers and a head; other cases change one thing."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(8))
        self.head = nn.Linear(WIDTH, 3)

    def body(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.body(batch)), batch["y"])


def assert_as_on_one_device(
    module: StepModule, batches: list[Any], *, count: int = 4, schedule: str = "zbv", ranks: int = 2, **options: Any
) -> None:
    """Every loss, gradient, parameter and buffer is that of one device that accumulates the same microbatches."""
    expected = train_plain(module, batches, count, **options)
    assert_equal_training(expected, train_pipeline(module, batches, count, schedule=schedule, ranks=ranks, **options))


class TiedHead(Deep):
    """The embedding's weight is the head's, at the other end of the pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.table.weight

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = self.table(batch["y"])
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return F.cross_entropy(self.head(x), (batch["y"] + 1) % 3)


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_row_01_a_tied_head_gets_the_gradient_of_both_uses(schedule: str) -> None:
    """Over five steps a matrix used on the first and the last stage trains as on one device."""
    batches = [batch_of(seed=seed) for seed in range(5)]
    assert_as_on_one_device(TiedHead(), batches, schedule=schedule, make_optimizer=adamw)


class Chunks(Deep):
    """Each layer gives two tensors, of which the later one alone, or both, go on."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x = batch["x"]
        for index, layer in enumerate(self.layers):
            left, right = layer(x).chunk(2, dim=-1)
            x = torch.cat([right, right * left if index % 2 else right.tanh()], dim=-1)
        return F.cross_entropy(self.head(x), batch["y"])


def test_row_03_outputs_of_one_operation_keep_their_own_gradients() -> None:
    """A split of which only the second part is used, or both are, gives plain autograd's gradients under zbv."""
    assert_as_on_one_device(Chunks(), [batch_of()], schedule="zbv")


class MixedBorder(nn.Module):
    """Takes and gives hidden states, a bool mask, int positions and None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[Tensor, Tensor, Tensor, None]) -> tuple[Tensor, Tensor, Tensor, None]:
        hidden, mask, positions, nothing = given
        scaled = torch.tanh(self.linear(hidden)) * mask + positions.unsqueeze(-1).remainder(5) * 0.01
        return hidden + scaled, mask, positions + 1, nothing


class Mixed(Deep):
    """A tuple of all kinds of values crosses every border."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MixedBorder() for _ in range(8))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        given = (batch["x"], batch["mask"], batch["y"], None)
        for layer in self.layers:
            given = layer(given)
        return F.cross_entropy(self.head(given[0]), batch["y"]) + given[2].float().mean() * 0.0


@pytest.mark.parametrize("ranks", [2, 4])
def test_row_06_and_07_masks_positions_and_none_cross_borders_without_a_gradient(ranks: int) -> None:
    """Bool, integer and None values are carried from stage to stage, and only floats get gradients."""
    assert_as_on_one_device(Mixed(), [batch_of()], schedule="1f1b", ranks=ranks)


class PassThrough(nn.Module):
    """Returns its second argument as it came."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, extra: Tensor) -> tuple[Tensor, Tensor]:
        return x + torch.tanh(self.linear(x)), extra


class Passes(Deep):
    """What the first layer makes is handed through all others to the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(PassThrough() for _ in range(8))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        x, extra = batch["x"], self.first(batch["x"])
        for layer in self.layers:
            x, extra = layer(x, extra)
        return F.cross_entropy(self.head(x * extra), batch["y"])


def test_row_09_tensors_that_are_passed_through_reach_the_last_stage() -> None:
    """A tensor that blocks return unchanged reaches the loss, and its maker gets its gradient."""
    assert_as_on_one_device(Passes(), [batch_of()], ranks=4)


class Masked(Deep):
    """Every layer uses the mask of the batch."""

    def body(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = x + torch.tanh(layer(x.masked_fill(~batch["mask"], 0.0)))
        return x


def test_row_10_a_mask_is_there_on_middle_stages() -> None:
    """A mask of the batch is applied on every stage, and each stage sees the rows of its microbatch."""
    assert_as_on_one_device(Masked(), [batch_of(), batch_of(seed=1)], ranks=4, schedule="1f1b")


def test_row_12_uneven_microbatches_are_sent_with_their_true_sizes() -> None:
    """Eight samples in three microbatches train as on one device."""
    assert_as_on_one_device(Masked(), [batch_of(8), batch_of(7, seed=1)], count=3, ranks=4)


@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "gpipe"])
def test_row_13_fewer_microbatches_than_ranks_run(schedule: str) -> None:
    """A batch of one sample on four ranks trains and does not hang."""
    assert_as_on_one_device(Deep(), [batch_of(1)], count=1, ranks=4, schedule=schedule)


def test_row_16_the_last_incomplete_batch_is_trained_and_weighted() -> None:
    """After two batches of 16, the last one, of 2 samples, gives one device's gradients in fewer microbatches."""
    batches = [batch_of(16), batch_of(16, seed=1), batch_of(2, seed=2)]
    assert_as_on_one_device(Deep(), batches, count=4)


@pytest.mark.parametrize("schedule", ["zbv", "1f1b", "gpipe", "zb_h1", "interleaved_1f1b"])
def test_row_18_no_order_of_transfers_deadlocks(schedule: str) -> None:
    """Every program ends even if each send and each receive blocks both ranks, in program order."""
    for ranks, count in ((2, 2), (4, 4), (4, 8), (8, 16)):
        check_program(build_program(schedule, pp_size=ranks, num_microbatches=count))


class TokenSum(Deep):
    """A sum over valid labels, divided by their number in the whole batch, which the batch carries."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        losses = F.cross_entropy(self.head(self.body(batch)), batch["y"], reduction="none")
        valid = batch["mask"][:, 0]
        # a microbatch counts by its samples, so the mean over the batch is undone
        return (losses * valid).sum() / len(valid) / batch["share"][0]


def test_row_25_a_sum_over_ragged_labels_divided_by_all_tokens_is_exact() -> None:
    """Unequal numbers of labels in the microbatches give the gradient of the whole batch at once."""
    batch = batch_of(8)
    batch["share"] = batch["mask"][:, 0].float().mean().expand(8)
    module = TokenSum()
    expected = train_plain(module, [batch], 1)
    got = train_pipeline(module, [batch], 4, schedule="zbv", ranks=2)
    for one, other in zip(expected.module.parameters(), got.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_row_27_the_gradient_does_not_depend_on_the_number_of_microbatches() -> None:
    """One, two, four and eight microbatches give the same gradient norm."""
    module = Deep()
    norms = []
    for count in (1, 2, 4, 8):
        got = train_pipeline(module, [batch_of()], count, schedule="zbv", ranks=2)
        norms.append(torch.stack([g.norm() for g in got.gradients[0].values() if g is not None]).norm())
    torch.testing.assert_close(torch.stack(norms), norms[0].expand(4), rtol=1e-5, atol=1e-7)


def test_row_28_accumulation_survives_a_change_of_shape() -> None:
    """Two batches of different sizes, accumulated, keep the gradients of both."""
    assert_as_on_one_device(Deep(), [batch_of(8), batch_of(12, seed=1)], count=2, accumulate=2)


class Adapted(Deep):
    """Everything is frozen except thin matrices beside the later layers; the first stage trains nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(WIDTH, 2, bias=False) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(2, WIDTH, bias=False) for _ in range(3))

    def body(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for index, layer in enumerate(self.layers):
            out = layer(x)
            if index >= 5:
                out = out + self.up[index - 5](self.down[index - 5](x))
            x = x + torch.tanh(out)
        return x


@pytest.mark.parametrize("schedule", ["zbv", "1f1b"])
def test_row_42_adapters_on_a_frozen_base_train(schedule: str) -> None:
    """A first stage without any trained parameter takes part, and only the adapters change."""
    module = Adapted()
    assert_as_on_one_device(module, [batch_of()], schedule=schedule)
    got = train_pipeline(module, [batch_of()], 4, schedule=schedule, ranks=2)
    for (name, before), after in zip(module.named_parameters(), got.module.parameters(), strict=True):
        assert torch.equal(before, after) == (not name.startswith(("up", "down"))), name


class Compiled(Deep):
    """Every layer is compiled."""

    def __init__(self) -> None:
        super().__init__()
        for layer in self.layers:
            layer.compile(backend="eager")


def test_row_51_compiled_layers_train_under_a_split_backward() -> None:
    """Layers that were compiled one by one train as on one device under zbv."""
    assert_as_on_one_device(Compiled(), [batch_of()], schedule="zbv")


class Recomputed(Deep):
    """Layers with dropout, stored or recomputed in the backward pass."""

    def __init__(self, recompute: bool) -> None:
        super().__init__()
        self.recompute = recompute
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)) for _ in range(8))

    def body(self, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"]
        for layer in self.layers:
            x = x + torch.tanh(checkpoint(layer, x, use_reentrant=False) if self.recompute else layer(x))
        return x


def test_row_52_recomputation_draws_the_masks_of_the_forward_pass() -> None:
    """Gradients of recomputed layers with dropout equal those of stored ones, under a split backward too."""
    stored, recomputed = Recomputed(False), Recomputed(True)
    recomputed.load_state_dict(stored.state_dict())
    runs = [train_pipeline(one, [batch_of()] * 2, 4, schedule="zbv", ranks=2) for one in (stored, recomputed)]
    assert_equal_training(runs[0], runs[1])


def test_row_54_skips_from_the_first_to_the_last_layers_are_routed() -> None:
    """A U-Net trains on four ranks as on one rank of the same pipeline."""
    case = Case(UNet, images)
    module, batches = case.make(), [case.batch(index) for index in range(2)]
    one = train_pipeline(module, batches, 4, schedule="gpipe", ranks=1)
    assert_equal_training(one, train_pipeline(module, batches, 4, schedule="zbv", ranks=4))


def test_row_55_each_microbatch_keeps_its_own_loss() -> None:
    """Four microbatches with four different losses give all four, in order."""
    assert_as_on_one_device(Deep(), [batch_of()], schedule="gpipe")
    losses = train_pipeline(Deep(), [batch_of()], 4, schedule="gpipe", ranks=2).losses[0]
    assert len(set(losses)) == 4


class Pops(Deep):
    """Takes fields out of the batch, as many data pipelines of steps do."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        labels = batch.pop("y")
        batch["x"].mul_(0.5)
        return F.cross_entropy(self.head(self.body(batch)), labels)


def test_trap_a_step_may_empty_its_batch() -> None:
    """``batch.pop()`` and writes into the batch are seen by one run of the step only."""
    batch = batch_of()
    module = Pops()
    expected = train_plain(module, [dict(batch, x=batch["x"].clone())], 1)
    got = train_pipeline(module, [batch], 2, schedule="zbv", ranks=2)
    for one, other in zip(expected.module.parameters(), got.module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert not any(is_placeholder(parameter) for parameter in got.module.parameters())
