"""Every kind of graph that a stage can meet: the two parts together equal one plain backward."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.stage.split_backward_parity import Case, check, leaf, module_case, weight


class Squared(nn.Module):
    """A bilinear layer of its input with itself."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.layer = nn.Bilinear(size, size, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, x)


MODULES = {
    "mlp": lambda: (nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)), (3, 4)),
    "linear without bias, 3d": lambda: (nn.Linear(4, 5, bias=False), (2, 3, 4)),
    "layer norm": lambda: (nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4)), (3, 4)),
    "layer norm without bias": lambda: (nn.LayerNorm(4, bias=False), (3, 4)),
    "rms norm": lambda: (nn.Sequential(nn.RMSNorm(4), nn.Linear(4, 4)), (3, 4)),
    "group norm": lambda: (nn.Sequential(nn.Conv1d(4, 4, 1), nn.GroupNorm(2, 4)), (2, 4, 5)),
    "batch norm": lambda: (nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU()), (2, 2, 5, 5)),
    "strided grouped convolution": lambda: (nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2), (2, 4, 6, 6)),
    "dilated convolution without bias": lambda: (nn.Conv1d(2, 3, 3, dilation=2, bias=False), (2, 2, 9)),
    "transposed convolution": lambda: (nn.ConvTranspose2d(3, 2, 3, stride=2, output_padding=1), (2, 3, 4, 4)),
    "attention": lambda: (nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True), (2, 3, 8)),
    "decoder": lambda: (nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2), (2, 3, 8)),
    "lstm": lambda: (nn.LSTM(4, 5, num_layers=2, bidirectional=True), (3, 2, 4)),
    "gru": lambda: (nn.GRU(4, 5), (3, 2, 4)),
    "instance norm": lambda: (nn.InstanceNorm1d(4, affine=True), (2, 4, 5)),
    "bilinear": lambda: (nn.Sequential(nn.Linear(4, 4), Squared(4)), (3, 4)),
    "prelu": lambda: (nn.Sequential(nn.PReLU(4), nn.Linear(4, 4)), (3, 4)),
    "weight norm": lambda: (nn.utils.parametrizations.weight_norm(nn.Linear(4, 5)), (3, 4)),
    "spectral norm": lambda: (nn.utils.parametrizations.spectral_norm(nn.Linear(4, 5)).eval(), (3, 4)),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", MODULES)
def test_ordinary_layers_split_exactly(name: str) -> None:
    """Each ordinary layer's gradients equal those of plain autograd, and its weight gradients really come later."""
    torch.manual_seed(0)
    module, shape = MODULES[name]()
    weights, build = module_case(module.double(), *shape)
    assert check(weights, build).reasons == [None] * 3


def test_the_fused_recurrent_kernel_is_not_run_twice() -> None:
    """A kernel that computes all gradients of an LSTM at once is exact, and run whole in the first part."""
    weights, build = module_case(nn.LSTM(4, 5), 3, 2, 4, dtype=torch.float32)
    assert all(reason is not None and "one kernel" in reason for reason in check(weights, build).reasons)


@pytest.mark.parametrize("steps, splits", [(8, True), (40, False)])
def test_weights_used_at_every_step_of_a_long_sequence(steps: int, splits: bool) -> None:
    """A weight used very often is not left waiting in as many copies: the backward is then whole, and exact."""
    weights, build = module_case(nn.RNN(4, 5).double(), steps, 2, 4)
    assert (check(weights, build).reasons == [None] * 3) == splits


def test_weights_whose_groups_overlap() -> None:
    """In ``f(x @ (w1 + w3)) @ (w2 + w3)`` the weight that both products share gets both contributions."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [torch.tanh(x @ (w[0] + w[2])) @ (w[1] + w[2])])

    assert check([weight(4, 4, seed=s) for s in range(3)], build).reasons == [None] * 3


@pytest.mark.parametrize("between", ["nothing", "weight", "norm"])
@pytest.mark.parametrize("uses", [2, 3])
def test_a_weight_reused_around_others(between: str, uses: int) -> None:
    """A layer that is called again further down accumulates once, with the sum over its calls."""
    shared, other, norm = (
        nn.Linear(4, 4).double(),
        nn.Linear(4, 4).double(),
        nn.LayerNorm(4).double(),
    )
    middle = {"nothing": nn.Tanh(), "weight": other, "norm": norm}[between]

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = h = leaf(3, 4)
        for _ in range(uses):
            h = middle(shared(h))
        return Case([x], [h])

    weights = [*shared.parameters(), *middle.parameters()]
    assert len(check(weights, build).events) == 3 * len(weights)


def test_one_parameter_object_in_different_roles() -> None:
    """A weight that multiplies, is added and is transposed in one graph gets the sum of all."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(4, 4)
        return Case([x], [((x @ w[0]) * w[0] + w[0].t()) @ w[0].t() + w[0].sum()])

    check([weight(4, 4)], build)


def test_outputs_that_depend_on_weights_only() -> None:
    """A penalty on the weights, and a weight handed out as it is, are differentiated in the weight pass."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [torch.tanh(x @ w[0]), (w[0] ** 2).sum() + w[1].exp().sum(), w[1], w[1].t()])

    assert check([weight(4, 4), weight(2, 3)], build).reasons == [None] * 3


def test_outputs_that_are_views() -> None:
    """Chunks, transposes and reshapes of one result can be roots, alone or together."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        whole = x @ w[0]
        q, k = whole.chunk(2, dim=-1)
        return Case([x], [q, k.t(), whole[0], whole.view(-1)])

    check([weight(4, 8)], build)


def test_outputs_changed_in_place_through_views() -> None:
    """Weights written into a view of an activation, and activations into a view of weights, get their gradients."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        h = x * 2
        h[:, 0] = w[0]
        h[1:].mul_(w[1])
        table = w[2] * 1
        table[0] += x[0]
        return Case([x], [h, table])

    check([weight(3), weight(4), weight(2, 4)], build)


class TwoOutputs(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, factor: float, x: Tensor, w: Tensor):
        ctx.save_for_backward(x, w)
        ctx.factor = factor
        return x * w * factor, (x > 0).long(), x + w

    @staticmethod
    def backward(ctx, product: Tensor, _: None, total: Tensor):
        TwoOutputs.calls += 1
        x, w = ctx.saved_tensors
        return None, product * w * ctx.factor + total, product * x * ctx.factor + total


@pytest.mark.parametrize("used", [(0, 2), (0,), (2,)])
def test_custom_functions_with_several_outputs(used: tuple[int, ...]) -> None:
    """A custom function with differentiable and integer outputs is exact, and its backward runs once a microbatch."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        results = TwoOutputs.apply(2.0, x @ w[0], w[1])
        return Case([x], [results[0] if used == (0,) else results[2], results[1]] if len(used) == 1 else list(results))

    TwoOutputs.calls = 0
    assert check([weight(4, 4), weight(3, 4)], build).reasons == [None] * 3
    assert TwoOutputs.calls == 9  # three ways of three microbatches


def test_multi_output_operations_with_missing_gradients() -> None:
    """Of an operation with several outputs only those that a root uses contribute."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 6)
        a, _, c = (x @ w[0]).split(2, dim=1)
        values, indices = (c * w[1]).sort(dim=1)
        u, s, v = torch.linalg.svd(x.t() @ x + torch.eye(6, dtype=x.dtype) * w[1].sum().exp())
        return Case([x], [a, values, indices, s, u.sum(), v.abs()])

    check([weight(6, 6), weight(3, 2)], build)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_regions_run_whole_and_once(reentrant: bool) -> None:
    """A stage with a checkpointed region does the full backward at once, recomputes once, and says why."""
    inner, outer = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double(), nn.Linear(4, 4).double()
    calls = []
    inner[0].register_forward_pre_hook(lambda *_: calls.append(1))

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [outer(checkpoint(inner, outer(x), use_reentrant=reentrant))])

    split = check([*inner.parameters(), *outer.parameters()], build)
    assert all(reason is not None and "checkpointing" in reason for reason in split.reasons)
    assert len(calls) == 18  # forward and one recomputation, for three microbatches of three ways


def test_a_checkpointed_region_without_weights_is_no_obstacle() -> None:
    """Where the recomputed region holds no trainable weight, the split is made and recomputes once."""
    calls = []

    def region(x: Tensor) -> Tensor:
        calls.append(1)
        return torch.tanh(x).exp()

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [checkpoint(region, x @ w[0], use_reentrant=False) @ w[1]])

    assert check([weight(4, 4), weight(4, 2)], build).reasons == [None] * 3
    assert len(calls) == 18


def test_offloaded_activations_are_unpacked_once() -> None:
    """Under user hooks on saved tensors the backward is whole, and unpacks as often as plain autograd."""
    unpacked = []

    def unpack(tensor: Tensor) -> Tensor:
        unpacked.append(1)
        return tensor

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.detach(), unpack):
            return Case([x], [torch.tanh(x @ w[0])])

    split = check([weight(4, 4)], build, microbatches=1)
    assert split.reasons[0] is not None
    assert len(unpacked) == 9
