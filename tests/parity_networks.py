"""Networks of ordinary kinds, each with something that cutting a step into stages could get wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.parity import StepModule
from tests.parity_basics import (
    CLASSES,
    TOKENS,
    WIDTH,
    Residual,
    blocks,
)


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
