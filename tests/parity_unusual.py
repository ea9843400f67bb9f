"""Modules that return unusual structures, are called in unusual ways, or differentiate inside of their step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F

from tests.parity import StepModule
from tests.parity_basics import (
    CLASSES,
    WIDTH,
    Mlp,
    Residual,
    blocks,
)


class ManyValuesBlock(nn.Module):
    """Takes and gives a trained value, a bool mask, int positions and a second trained value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor, order: Tensor, aside: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        y = torch.tanh(self.linear(x)).masked_fill(mask, 0.1)
        return y[:, order], y.detach() > 0.4, order.roll(1), aside + y.mean(-1, keepdim=True)


class ManyValues(StepModule):
    """Several values cross every border, some without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(ManyValuesBlock() for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        mask, order, aside = x > 1, torch.arange(WIDTH), torch.zeros(x.shape[0], 1)
        for layer in self.blocks:
            x, mask, order, aside = layer(x, mask, order, aside)
        return F.cross_entropy(self.head(x) * (1 + mask.float().mean(1, keepdim=True)) + aside, y)


class RawParameters(Residual):
    """Glue reads parameters: positions, scales between layers, and the weight of a layer it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.position = nn.Parameter(torch.randn(WIDTH) * 0.1)
        self.scales = nn.ParameterList(nn.Parameter(torch.tensor(1.0 + 0.1 * i)) for i in range(6))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = x + self.position
        for layer, scale in zip(self.blocks, self.scales, strict=True):
            x = x + scale * layer(x)
        x = F.linear(x, self.blocks[1][0].weight)
        return F.cross_entropy(self.head(x), y) + 0.01 * self.blocks[0][0].weight.square().sum()


@dataclass
class Given:
    """What a layer hands to the next one."""

    hidden: Tensor
    extra: Tensor | None = None
    count: int = 0


class DictBlock(nn.Module):
    """Dataclass in, nested dict out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Given) -> dict[str, Any]:
        hidden = given.hidden + torch.tanh(self.linear(given.hidden))
        return {"hidden": hidden, "nothing": None, "pair": (hidden * 2, [given.extra, "text"]), "count": given.count}


class DataclassBlock(nn.Module):
    """Nested dict in, dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: dict[str, Any]) -> Given:
        hidden = torch.tanh(self.linear(given["hidden"])) + given["pair"][0]
        return Given(hidden, hidden.mean(), given["count"] + 1)


class ModelOutputBlock(nn.Module):
    """A transformers ModelOutput with a field that is None."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, given: Given) -> Any:
        from transformers.modeling_outputs import BaseModelOutput

        hidden = torch.tanh(self.linear(given.hidden))
        return BaseModelOutput(last_hidden_state=hidden, attentions=(hidden.sum(),))


class Structures(StepModule):
    """Units that give dicts, tuples, dataclasses and a ModelOutput, with None among their fields."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([DictBlock(), DataclassBlock(), DictBlock(), DataclassBlock(), ModelOutputBlock()])
        self.head = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        given: Any = Given(batch[0])
        for layer in list(self.layers)[:4]:
            given = layer(given)
        out = self.layers[4](given)
        assert out.hidden_states is None and given.count == 2
        loss = F.cross_entropy(self.head(out[0]) + given.extra + out.attentions[0] * 0.01, batch[1])
        return {"loss": loss, "hidden": out.last_hidden_state.detach()}


class DirectForward(Residual):
    """``forward`` called by name, past ``__call__``."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Mlp().net

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in self.blocks:
            x = layer.forward(x)
        return F.cross_entropy(self.net.forward(x), y)


class Forces(Residual):
    """The gradient of an energy by its own input is a prediction too: every layer lies in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        position = x.clone().requires_grad_()
        energy = self.head(self.body(position)).logsumexp(-1)
        (force,) = torch.autograd.grad(energy.sum(), position, create_graph=True)
        return F.mse_loss(energy, y.float()) + F.mse_loss(force, x)


class HalfwayPenalty(Residual):
    """The gradient by an activation is penalised: only the layers after it lie in between."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        for layer in list(self.blocks)[:4]:
            x = x + layer(x)
        middle = x
        for layer in list(self.blocks)[4:]:
            x = x + layer(x)
        out = self.head(x)
        (slope,) = grad(out.square().sum(), middle, create_graph=True)
        return F.cross_entropy(out, y) + 0.1 * slope.square().mean() + 0.1 * (middle * slope.detach()).mean()


class Reversible(torch.autograd.Function):
    """Runs layers without a graph, and again with one in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layers: Any) -> Tensor:
        ctx.layers = layers
        ctx.save_for_backward(x)
        for layer in layers:
            x = x + layer(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            start = out = x.detach().requires_grad_()
            for layer in ctx.layers:
                out = out + layer(out)
        torch.autograd.backward(out, gradient)
        return start.grad, None


class ReversibleStack(nn.Module):
    """Its layers are called by an autograd function."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = blocks(3)

    def forward(self, x: Tensor) -> Tensor:
        return Reversible.apply(x, self.layers)


class ReversibleNet(Residual):
    """A function of the user's own runs layers, and differentiates through them itself."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = ReversibleStack()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.stack(self.body(x))), y)


class WeightSlope(Residual):
    """Two losses are balanced by the norm of their gradients by the weight of one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(WIDTH, 1)
        self.weights = nn.Parameter(torch.tensor([0.7, 1.2]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        x = self.body(x)
        losses = [F.cross_entropy(self.head(x), y), self.second(x).square().mean()]
        shared = self.blocks[5][0].weight
        norms = [
            torch.autograd.grad(weight * loss, shared, retain_graph=True, create_graph=True)[0].norm()
            for weight, loss in zip(self.weights, losses, strict=True)
        ]
        return losses[0] + losses[1] + (norms[0] - norms[1].detach()).abs()
