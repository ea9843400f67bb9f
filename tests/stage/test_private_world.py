"""State that a step changes, seen by each stage as one device would see it."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.parity import StepModule, assert_equal_training, train_pipeline, train_plain


def blocks(count: int = 6, width: int = 8) -> nn.ModuleList:
    return nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))


class Base(StepModule):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.head = nn.Linear(8, 3)

    def body(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class Counter(Base):
    """A counter raised at the end of the step and used at its start."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x * (1.0 + 0.1 * self.count)
        loss = F.cross_entropy(self.head(self.body(x)), y)
        self.count += 1
        return loss


class CounterBuffer(Base):
    """The same as a buffer that glue raises in place."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(self.head(self.body(x * (1.0 + 0.1 * self.count))), y)
        self.count += 1
        return loss


class BatchWriter(Base):
    """An in-place change of the batch, and an entry taken out of it."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch["x"].mul_(0.5)
        y = batch.pop("y")
        return F.cross_entropy(self.head(self.body(batch["x"])), y)


class OwnGenerator(Base):
    """Noise from a generator of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(3)

    def __deepcopy__(self, memo: dict[int, Any]) -> OwnGenerator:
        made = type(self)()
        made.load_state_dict(self.state_dict())
        made.generator.set_state(self.generator.get_state())
        return made

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + 0.1 * torch.randn(x.shape, generator=self.generator)
        return F.cross_entropy(self.head(self.body(x)), y)


class AverageInStep(Base):
    """A teacher that follows the student inside the step."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = blocks()
        for parameter in self.teacher.parameters():
            parameter.requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            for theirs, ours in zip(self.teacher.parameters(), self.blocks.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
            target = x
            for block in self.teacher:
                target = target + block(target)
        out = self.body(x)
        return F.cross_entropy(self.head(out), y) + F.mse_loss(out, target)


class LogsMidStep(Base):
    """A value logged between units, and read back from a list at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.norms: list[Tensor] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for index, block in enumerate(self.blocks):
            x = x + block(x)
            if index == 1:
                self.log("norm", x.norm())
                self.norms.append(x.norm().detach())
        return F.cross_entropy(self.head(x), y)


class CountingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> tuple[Tensor, int]:
        return x + self.linear(x), x.shape[0]


class ReturnsInt(StepModule):
    """A unit that returns an int beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CountingBlock() for _ in range(5))
        self.head = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        total = 0
        for block in self.blocks:
            x, rows = block(x)
            total += rows
        return F.cross_entropy(self.head(x), y) * total


class LateHead(Base):
    """A task head that appears in the third batch only."""

    def __init__(self) -> None:
        super().__init__()
        self.extra = nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        out = self.body(x)
        loss = F.cross_entropy(self.head(out), y)
        return loss + F.cross_entropy(self.extra(out), y) if batch_idx == 2 else loss


class BooleanIndex(Base):
    """Boolean indexing with a different count in every microbatch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        keep = x[:, 0] > x[:, 0].mean() - 0.3
        return F.cross_entropy(self.head(self.body(x[keep])), y[keep])


class WritesReceived(Base):
    """Glue that changes activations in place."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            y_ = block(x) + 0
            y_ += 1
            y_[:, 0] = 0.5
            x = F.relu_(y_)
        return F.cross_entropy(self.head(x), y)


class ReadsActivation(Base):
    """A branch on the value of an activation."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for block in self.blocks:
            x = x + block(x)
            if x.abs().max() > 0.1:
                x = x / x.abs().max().item()
        return F.cross_entropy(self.head(x), y)


def pairs(index: int, size: int = 10) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(index)
    return torch.randn(size, 8, generator=source), torch.randint(0, 3, (size,), generator=source)


def dicts(index: int) -> dict[str, Tensor]:
    x, y = pairs(index)
    return {"x": x, "y": y}


CASES: list[tuple[type[StepModule], Callable[[int], Any]]] = [
    (Counter, pairs),
    (CounterBuffer, pairs),
    (BatchWriter, dicts),
    (OwnGenerator, pairs),
    (AverageInStep, pairs),
    (LogsMidStep, pairs),
    (ReturnsInt, pairs),
    (LateHead, pairs),
    (BooleanIndex, pairs),
    (WritesReceived, pairs),
    (ReadsActivation, pairs),
]


@pytest.mark.parametrize(("module", "batch"), CASES, ids=[case[0].__name__ for case in CASES])
@pytest.mark.parametrize(("schedule", "ranks"), [("zbv", 2), ("1f1b", 3), ("zbv", 1)])
def test_each_stage_sees_the_state_that_one_device_would(
    module: type[StepModule], batch: Callable[[int], Any], schedule: str, ranks: int
) -> None:
    """Whatever the step does to its module, its batch and its generators, training equals one device."""
    torch.manual_seed(0)
    model = module()
    expected = train_plain(model, [batch(i) for i in range(4)], 4)
    got = train_pipeline(model, [batch(i) for i in range(4)], 4, schedule=schedule, ranks=ranks)
    assert_equal_training(expected, got)
    assert [name for name, _ in expected.module.logged] == [name for name, _ in got.module.logged]  # type: ignore[union-attr]


def test_plain_attributes_end_as_on_one_device() -> None:
    """Counters and lists on the module hold after the batches what one device would hold."""
    torch.manual_seed(0)
    counter = train_pipeline(Counter(), [pairs(0), pairs(1)], 4, schedule="zbv", ranks=2)
    logs = train_pipeline(LogsMidStep(), [pairs(0), pairs(1)], 4, schedule="zbv", ranks=2)
    assert counter.module.count == 8
    assert len(logs.module.norms) == 8  # type: ignore[arg-type]


def test_a_trace_leaves_no_trace() -> None:
    """After the placement, attributes, buffers, generators and global random states are what they were."""
    torch.manual_seed(0)
    for kind, batch in CASES:
        model = kind()
        model.train()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        count, states = getattr(model, "count", None), (torch.get_rng_state(), random.getstate())
        count = count.clone() if isinstance(count, Tensor) else count
        from d9d_lightning.stage.planner import Planner
        from tests.parity import microbatches_of

        Planner(model, [(model, "log")]).place(
            lambda piece, model=model: model.training_step(*piece.args),  # type: ignore[misc]
            microbatches_of(batch(0), 4)[0],
            (0, 1, 1, 0),
        )
        assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
        assert count is None or count == model.count
        assert torch.equal(states[0], torch.get_rng_state()) and states[1] == random.getstate()
        assert model.logged == []
        assert all(type(tensor) is torch.Tensor for tensor in model.buffers())
