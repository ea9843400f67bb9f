"""Placeholders know geometry and origin, refuse reads, and never let a write pass unseen."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from d9d_lightning.errors import PlaceholderReadError
from d9d_lightning.partition.placeholder import (
    Placeholder,
    ReplayCut,
    cured_afterwards,
    is_placeholder,
    reads_end_the_replay,
)
from d9d_lightning.partition.shapes import Geometry


def placeholder(*shape: int, dtype: torch.dtype = torch.float32, requires_grad: bool = False) -> Placeholder:
    geometry = Geometry.of(torch.empty(shape, dtype=dtype))
    return Placeholder(geometry, "net.layers.3", requires_grad=requires_grad)


READS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).all()),
    "if": lambda x: 1 if x.mean() > 0 else 2,
    "float": lambda x: float(x.sum()),
    "int": lambda x: int(x.sum()),
    "numpy": lambda x: x.numpy(),
    "asarray": lambda x: np.asarray(x),
    "tolist": lambda x: x.tolist(),
    "format": lambda x: f"{x.sum():.3f}",
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "unique": lambda x: x.unique(),
    "index": lambda x: [10, 20][x.argmax()],
    "iterate": lambda x: [10 for _ in range(x.sum().long())],
    "equal": lambda x: torch.equal(x, torch.zeros(x.shape)),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_a_read_names_the_line_the_unit_and_the_remedy(read: Callable[[Tensor], Any]) -> None:
    """Reading a value raises one error with the user's own line, the unit that made the value, and what to do."""
    with pytest.raises(PlaceholderReadError, match=r"test_placeholder\.py:\d+.*net\.layers\.3.*units=\[") as caught:
        read(placeholder(4))
    assert "lambda x" in str(caught.value)


def test_a_read_can_end_the_replay_instead() -> None:
    """Past a stage's own work a read is no error: it ends the run, and no ``except Exception`` stops that."""
    with reads_end_the_replay(), pytest.raises(ReplayCut):
        try:
            placeholder(3).sum().item()
        except Exception:
            pytest.fail("an ordinary except clause caught the cut")
    with pytest.raises(PlaceholderReadError):
        placeholder(3).sum().item()


OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "matmul": lambda x: x @ torch.ones(6, 2),
    "transpose": lambda x: x.transpose(0, 1),
    "view": lambda x: x.view(2, 2, 6),
    "slice": lambda x: x[1:3, ::2],
    "expand": lambda x: x[:, None].expand(4, 5, 6),
    "chunk": lambda x: x.chunk(2, -1),
    "sort": lambda x: x.sort(-1),
    "cat": lambda x: torch.cat([x, torch.zeros(1, 6)]),
    "where": lambda x: torch.where(torch.ones(6) > 0, x, 0.0),
    "half": lambda x: x.half() + 1,
    "compare": lambda x: x > 1,
    "embedding": lambda x: F.embedding(torch.tensor([[1, 2]]), x),
    "attention": lambda x: F.scaled_dot_product_attention(x[None, None], x[None, None], x[None, None]),
    "norm": lambda x: F.layer_norm(x, (6,)),
    "einsum": lambda x: torch.einsum("ab,cb->ac", x, x),
    "topk": lambda x: x.topk(2),
    "complex": lambda x: torch.fft.rfft(x),
    "mask_of_the_batch": lambda x: x[torch.tensor([True, False, True, False])],
}


@pytest.mark.parametrize("operator", OPERATORS.values(), ids=OPERATORS)
def test_operators_answer_with_the_geometry_of_the_real_result(operator: Callable[[Tensor], Any]) -> None:
    """Shape, strides, dtype and ``requires_grad`` of a result are those that real tensors give, twice in a row."""
    for _ in range(2):
        expected = operator(torch.rand(4, 6, requires_grad=True))
        got = operator(placeholder(4, 6, requires_grad=True))
        pairs = [(expected, got)] if isinstance(expected, Tensor) else list(zip(expected, got, strict=True))
        for real, unknown in pairs:
            assert isinstance(unknown, Placeholder) and unknown.origin == "net.layers.3"
            assert (unknown.shape, unknown.dtype) == (real.shape, real.dtype)
            assert unknown.stride() == real.stride()
            assert unknown.requires_grad == real.requires_grad


def test_a_write_into_a_real_tensor_poisons_it() -> None:
    """From then on the tensor, and what is computed from it, is unknown, and its shape stays readable."""
    target = torch.zeros(3, 4)
    target[0] = placeholder(4)
    assert is_placeholder(target) and target.shape == (3, 4)
    assert is_placeholder(target.sum())
    with pytest.raises(PlaceholderReadError, match=r"net\.layers\.3"):
        target.sum().item()


def test_a_write_through_a_view_poisons_the_base() -> None:
    """A row written through a view makes the whole tensor unknown."""
    target = torch.zeros(3, 4)
    target[1].add_(placeholder(4))
    assert is_placeholder(target)


def test_poison_is_cured_after_a_trace() -> None:
    """A trace works on copies, so that tensors it wrote placeholders into are ordinary afterwards."""
    target = torch.zeros(3)
    with cured_afterwards():
        target.add_(placeholder(3))
        assert is_placeholder(target)
    assert type(target) is Tensor and target.sum().item() == 0


def test_a_view_shares_the_memory_of_its_base() -> None:
    """A write through a view counts as a write into the base; a write into a copy does not."""
    base = placeholder(4, 6)
    view, copied = base.view(24)[3:], base.clone()
    before = base.cell.version
    view.mul_(2)
    assert base.cell is view.cell and base.cell.version == before + 1  # type: ignore[attr-defined]
    copied.add_(1)
    assert base.cell.version == before + 1


def test_geometry_changes_in_place() -> None:
    """``squeeze_`` and its like change the placeholder itself and return it."""
    tensor = placeholder(1, 4, 1)
    assert tensor.squeeze_() is tensor and tensor.shape == (4,)
    assert tensor.unsqueeze_(0).transpose_(0, 1).shape == (4, 1)


DRAWS: dict[str, Callable[[Tensor], Any]] = {
    "randn_like": torch.randn_like,
    "rand_like": torch.rand_like,
    "dropout": lambda x: F.dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "uniform_": lambda x: x.clone().uniform_(-1, 1),
    "normal_": lambda x: x.clone().normal_(),
    "multinomial": lambda x: torch.multinomial(x.abs() + 1, 2),
    "normal": lambda x: torch.normal(x, x.exp()),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_random_operators_advance_the_generator_exactly(draw: Callable[[Tensor], Any]) -> None:
    """After a random operator on a placeholder the next real draw is what follows the same operator on a tensor."""
    states = []
    for tensor in (torch.zeros(5, 7), placeholder(5, 7)):
        torch.manual_seed(3)
        draw(tensor)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


@pytest.mark.parametrize("draw", [torch.poisson, lambda x: F.rrelu(x, training=True), torch._standard_gamma])
def test_draws_that_depend_on_values_are_reads(draw: Callable[[Tensor], Any]) -> None:
    """An operator that draws as many numbers as the values demand cannot be followed without them."""
    with pytest.raises(PlaceholderReadError, match=r"test_placeholder\.py.*net\.layers\.3"):
        draw(placeholder(4))


def test_fused_kernels_without_dropout_draw_nothing() -> None:
    """Attention with a dropout of zero leaves the generator alone."""
    torch.manual_seed(3)
    before = torch.get_rng_state()
    x = placeholder(1, 2, 4, 8)
    F.scaled_dot_product_attention(x, x, x)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("copier", [copy.deepcopy, lambda value: pickle.loads(pickle.dumps(value))])
def test_placeholders_are_copied_and_pickled(copier: Callable[[Any], Any]) -> None:
    """A module that holds placeholder parameters survives copying and pickling, with names, kinds and origins."""
    module = nn.Linear(4, 3)
    module.weight = nn.Parameter(Placeholder.like(module.weight.detach(), "other.weight"), requires_grad=False)
    made = copier(module)
    weight = made.weight
    assert isinstance(weight, Placeholder) and isinstance(weight, nn.Parameter)
    assert (weight.shape, weight.origin, weight.requires_grad) == ((3, 4), "other.weight", False)
    assert list(made.state_dict()) == ["weight", "bias"]


def test_a_non_leaf_may_be_changed_in_place() -> None:
    """A value that requires grad is handed to glue as a non-leaf, with its own strides."""
    made = Placeholder.non_leaf(Geometry((2, 3), (1, 2), 0, torch.float32, torch.device("cpu")), "unit")
    assert made.requires_grad and not made.is_leaf and made.stride() == (1, 2)
    made.relu_()


def test_a_placeholder_prints_itself() -> None:
    """Printing shows what is known and is no read."""
    text = repr(placeholder(2, 3))
    assert "shape=(2, 3)" in text and "net.layers.3" in text
    assert f"{placeholder(2)}" == repr(placeholder(2))
