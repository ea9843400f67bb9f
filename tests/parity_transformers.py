"""Small models of the transformers library, trained by their own loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.parity import StepModule
from tests.parity_basics import TOKENS, translation
from tests.parity_basics import tokens as token_pairs
from tests.parity_modules import Case

SMALL = {"vocab_size": 16, "hidden_size": 8, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 16}


class Model(StepModule):
    """A transformers model; the batch holds its keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.model = self.build()

    def build(self) -> nn.Module:
        raise NotImplementedError

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        out = self.model(**batch)
        self.log("loss", out.loss)
        return out.loss


class Llama(Model):
    def build(self) -> nn.Module:
        from transformers import LlamaConfig, LlamaForCausalLM

        return LlamaForCausalLM(LlamaConfig(**SMALL, num_key_value_heads=1, max_position_embeddings=32))


class Gpt2(Model):
    def build(self) -> nn.Module:
        from transformers import GPT2Config, GPT2LMHeadModel

        silent = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(vocab_size=16, n_embd=8, n_layer=3, n_head=2, n_positions=32, **silent))


class T5(Model):
    def build(self) -> nn.Module:
        from transformers import T5Config, T5ForConditionalGeneration

        sizes = {"d_model": 8, "d_kv": 4, "d_ff": 16, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        return T5ForConditionalGeneration(T5Config(vocab_size=16, decoder_start_token_id=0, **sizes))


class Vit(Model):
    def build(self) -> nn.Module:
        from transformers import ViTConfig, ViTForImageClassification

        sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
        return ViTForImageClassification(
            ViTConfig(
                **sizes,
                image_size=8,
                patch_size=4,
                num_channels=1,
                num_labels=3,
                qkv_bias=False,
                hidden_dropout_prob=0.0,
                attention_probs_dropout_prob=0.0,
            )
        )


class Bert(Model):
    def build(self) -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        silent = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        return BertForMaskedLM(BertConfig(**SMALL, max_position_embeddings=32, **silent))


def causal(index: int, size: int = 8, length: int = 6) -> dict[str, Tensor]:
    """Tokens that are their own labels."""
    ids = token_pairs(index, size, length)["tokens"]
    return {"input_ids": ids, "labels": ids.clone()}


def seq2seq(index: int, size: int = 8, length: int = 6) -> dict[str, Tensor]:
    """Padded source tokens with their mask, and labels."""
    batch = translation(index, size, length)
    return {"input_ids": batch["source"], "attention_mask": (batch["source"] != 0).long(), "labels": batch["labels"]}


def masked(index: int, size: int = 8, length: int = 6) -> dict[str, Tensor]:
    """Two masked tokens in every sample."""
    ids = token_pairs(index, size, length)["tokens"]
    labels = torch.full_like(ids, -100)
    labels[:, 1:3] = ids[:, 1:3]
    shown = ids.clone()
    shown[:, 1:3] = TOKENS
    return {"input_ids": shown, "attention_mask": torch.ones_like(ids), "labels": labels}


def pictures(index: int, size: int = 8) -> dict[str, Tensor]:
    """Images and classes."""
    source = torch.Generator().manual_seed(index)
    return {
        "pixel_values": torch.randn(size, 1, 8, 8, generator=source),
        "labels": torch.randint(0, 3, (size,), generator=source),
    }


CASES: dict[str, Case] = {
    case.name: case
    for case in [
        Case(Llama, causal),
        Case(Gpt2, causal, key_bias=("c_attn.bias", slice(8, 16))),
        Case(T5, seq2seq),
        Case(Vit, pictures),
        Case(Bert, masked, key_bias=("key.bias", slice(None))),
    ]
}
