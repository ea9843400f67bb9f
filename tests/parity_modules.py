"""Ordinary modules, each with something that cutting a step into stages could get wrong."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity import StepModule

WIDTH = 8
CLASSES = 3
TOKENS = 13
LENGTH = 6


def block(width: int = WIDTH) -> nn.Sequential:
    """One small layer."""
    return nn.Sequential(nn.Linear(width, width), nn.Tanh())


def blocks(count: int = 6, width: int = WIDTH) -> nn.ModuleList:
    """A list of small layers."""
    return nn.ModuleList(block(width) for _ in range(count))


class Mlp(StepModule):
    """One Sequential."""

    def __init__(self) -> None:
        super().__init__()
        layers = [layer for _ in range(5) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())]
        self.net = nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x), y)


class Residual(StepModule):
    """Blocks with residual adds in glue; other modules change one thing of it."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = blocks()
        self.head = nn.Linear(WIDTH, CLASSES)

    def body(self, x: Tensor) -> Tensor:
        for layer in self.blocks:
            x = x + layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        return F.cross_entropy(self.head(self.body(x)), y)


class GptBlock(nn.Module):
    """Causal attention and an MLP."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH, bias=False), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        q, k, v = (part.view(rows, length, 2, -1).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        rate = self.dropout.p if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=rate, is_causal=True)
        x = x + self.dropout(self.out(mixed.transpose(1, 2).reshape(rows, length, -1)))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Gpt(StepModule):
    """Token and position embeddings, and a head that reads the embedding's weight in glue."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(TOKENS, WIDTH), nn.Embedding(16, WIDTH)
        self.blocks = nn.ModuleList(GptBlock() for _ in range(4))
        self.norm = nn.LayerNorm(WIDTH)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.wte.weight)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        tokens, targets = batch["tokens"], batch["targets"]
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1], device=tokens.device))
        for layer in self.blocks:
            x = layer(x)
        loss = F.cross_entropy(self.logits(self.norm(x)).flatten(0, 1), targets.flatten())
        self.log("loss", loss)
        return loss


class SharedHeadGpt(Gpt):
    """A head module that holds the embedding's weight as its own."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, TOKENS, bias=False)
        self.head.weight = self.wte.weight

    def logits(self, x: Tensor) -> Tensor:
        return self.head(x)


def conv(inputs: int, outputs: int) -> nn.Sequential:
    """A convolution that keeps the size."""
    return nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), nn.SiLU())


class UNet(StepModule):
    """Skips from the first layers to the last; noise and times drawn in the step."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Linear(1, 4)
        self.downs = nn.ModuleList([conv(1, 4), conv(4, 4), conv(4, 4)])
        self.middle = conv(4, 4)
        self.ups = nn.ModuleList([conv(8, 4), conv(8, 4), conv(8, 4)])
        self.out = nn.Conv2d(4, 1, 1)

    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Tensor]:
        image = batch
        times, noise = torch.rand(image.shape[0], 1), torch.randn_like(image)
        x = image + times.view(-1, 1, 1, 1) * noise
        skips = []
        for index, down in enumerate(self.downs):
            x = down(x)
            skips.append(x)
            x = F.avg_pool2d(x, 2) if index < 2 else x
        x = self.middle(x) + self.time(times)[:, :, None, None]
        for index, up in enumerate(self.ups):
            skip = skips.pop()
            x = up(torch.cat([x, skip], 1))
            x = F.interpolate(x, scale_factor=2) if index < 2 else x
        return {"loss": F.mse_loss(self.out(x), noise)}


class EncoderDecoder(StepModule):
    """The encoder's output and two masks reach every decoder layer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.embed_target = nn.Embedding(TOKENS, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.encoder = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, bias=False) for _ in range(3)
        )
        self.decoder = nn.ModuleList(
            nn.TransformerDecoderLayer(WIDTH, 2, 2 * WIDTH, 0.0, batch_first=True, bias=False) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, TOKENS)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        padding = batch["source"] == 0
        causal = nn.Transformer.generate_square_subsequent_mask(batch["target"].shape[1])
        memory = self.embed(batch["source"])
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        x = self.embed_target(batch["target"])
        for layer in self.decoder:
            x = layer(x, memory, tgt_mask=causal, memory_key_padding_mask=padding, tgt_is_causal=True)
        return F.cross_entropy(self.head(x).transpose(1, 2), batch["labels"])


class Siamese(Residual):
    """One tower called for both sides, and a temperature parameter used in glue."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = nn.Parameter(torch.tensor(0.3))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        left, right = (F.normalize(self.head(self.body(side)), dim=-1) for side in (x, x.roll(1, dims=1) * 1.5))
        score = (left * right).sum(-1) * self.temperature.exp()
        return F.binary_cross_entropy_with_logits(score, (y > 0).float())


class BatchNormNet(StepModule):
    """Batch statistics, and buffers that the units update."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(5))
        )
        self.head = nn.Linear(4, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x = self.layers(self.stem(batch)).mean((2, 3))
        return F.mse_loss(self.head(x).squeeze(1), batch.mean((1, 2, 3)))


class FrozenFront(Residual):
    """The first half is not trained."""

    def __init__(self) -> None:
        super().__init__()
        for layer in list(self.blocks)[:3]:
            layer.requires_grad_(False)


class LowRankLinear(nn.Module):
    """A frozen weight with a trained product of two thin ones beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.base(x) + 0.5 * self.up(self.down(x)))


class LowRank(Residual):
    """Adapters beside frozen weights in every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(LowRankLinear() for _ in range(6))
        self.head.requires_grad_(False)


class ThreeTimes(Residual):
    """One layer called three times in a row, between others."""

    def body(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.blocks):
            for _ in range(3 if index == 2 else 1):
                x = x + layer(x)
        return x


class Checkpointed(Residual):
    """Every layer but the first recomputed in the backward pass."""

    reentrant = False

    def body(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        for layer in list(self.blocks)[1:]:
            x = x + checkpoint(layer, x, use_reentrant=self.reentrant)
        return x


class CheckpointedReentrant(Checkpointed):
    """The same with the older, reentrant implementation."""

    reentrant = True


class CheckpointedRegion(Residual):
    """One recomputed region around several layers and glue."""

    def body(self, x: Tensor) -> Tensor:
        def run(x: Tensor) -> Tensor:
            for layer in list(self.blocks)[1:4]:
                x = x + layer(x)
            return x

        x = x + self.blocks[0](x)
        x = checkpoint(run, x, use_reentrant=False)
        return x + self.blocks[5](self.blocks[4](x))


class NoGradBranch(Residual):
    """A branch through the same layers without a graph, and one through a detached activation."""

    def __init__(self) -> None:
        super().__init__()
        self.probe = nn.Linear(WIDTH, CLASSES)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        with torch.no_grad():
            target = self.head(self.body(x * 0.5)).softmax(-1)
        middle = self.blocks[0](x)
        out = self.body(middle)
        loss = F.cross_entropy(self.probe(middle.detach()), y) + F.cross_entropy(self.head(out), y)
        return loss + F.mse_loss(self.head(out).softmax(-1), target)


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


class Contrastive(StepModule):
    """Two towers whose samples are compared with all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = blocks(3), blocks(3)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        left, right = batch[0], batch[0].flip(1)
        for one, other in zip(self.left, self.right, strict=True):
            left, right = left + one(left), right + other(right)
        scores = F.normalize(left, dim=-1) @ F.normalize(right, dim=-1).T * self.scale.exp()
        labels = torch.arange(scores.shape[0])
        return (F.cross_entropy(scores, labels) + F.cross_entropy(scores.T, labels)) / 2


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


def pairs(index: int, size: int = 8) -> tuple[Tensor, Tensor]:
    """Samples and classes."""
    source = torch.Generator().manual_seed(index)
    return torch.randn(size, WIDTH, generator=source), torch.randint(0, CLASSES, (size,), generator=source)


def tokens(index: int, size: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Token numbers and the next ones."""
    drawn = torch.randint(1, TOKENS, (size, length + 1), generator=torch.Generator().manual_seed(index))
    return {"tokens": drawn[:, :-1], "targets": drawn[:, 1:]}


def translation(index: int, size: int = 8, length: int = LENGTH) -> dict[str, Tensor]:
    """Source tokens of unequal length, padded with zeros, and targets of equal length."""
    source = torch.Generator().manual_seed(index)
    drawn = torch.randint(1, TOKENS, (3, size, length), generator=source)
    lengths = torch.randint(2, length + 1, (size, 1), generator=source)
    return {"source": drawn[0] * (torch.arange(length) < lengths), "target": drawn[1], "labels": drawn[2]}


def images(index: int, size: int = 8) -> Tensor:
    """Small images."""
    return torch.randn(size, 1, 8, 8, generator=torch.Generator().manual_seed(index))


WHOLE = "one device, the whole batch"
SAME_MICROBATCHES = "one device that accumulates the same microbatches"
SIZE_ONE = "a pipeline of one rank, the same microbatches"


@dataclass(frozen=True)
class Case:
    """A module, its batches, and what it must equal.

    Attributes:
        make: Builds the module.
        batch: The batch of a number.
        reference: What it must equal.
        key_bias: How the names of attention's key biases end, and which part of them is that of the keys. Softmax does
            not see it, so its gradient is rounding noise, of which AdamW makes whole steps.
    """

    make: Callable[[], StepModule]
    batch: Callable[..., Any]
    reference: str = WHOLE
    key_bias: tuple[str, slice] | None = None

    @property
    def name(self) -> str:
        return self.make.__name__


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case(Mlp, pairs),
        Case(Gpt, tokens),
        Case(SharedHeadGpt, tokens),
        Case(UNet, images, SIZE_ONE),
        Case(EncoderDecoder, translation),
        Case(Siamese, pairs),
        Case(BatchNormNet, images, SAME_MICROBATCHES),
        Case(FrozenFront, pairs),
        Case(LowRank, pairs),
        Case(ThreeTimes, pairs),
        Case(Checkpointed, pairs),
        Case(CheckpointedReentrant, pairs),
        Case(CheckpointedRegion, pairs),
        Case(NoGradBranch, pairs),
        Case(ManyValues, pairs),
        Case(RawParameters, pairs),
        Case(Structures, pairs),
        Case(DirectForward, pairs),
        Case(Contrastive, pairs, SAME_MICROBATCHES),
        Case(Forces, pairs, SAME_MICROBATCHES),
        Case(HalfwayPenalty, pairs, SAME_MICROBATCHES),
        Case(WeightSlope, pairs, SAME_MICROBATCHES),
        Case(ReversibleNet, pairs),
    ]
}
