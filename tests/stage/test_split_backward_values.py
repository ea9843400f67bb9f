"""Every kind of value that a stage can meet: frozen, relayed, sparse, complex, missing, compiled."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from d9d_lightning.stage.split_backward import split_backward
from tests.stage.split_backward_parity import Case, check, leaf, module_case, weight


def test_frozen_parts() -> None:
    """Frozen weights get no gradient, and what leads only to them is not computed."""
    module = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4)).double()
    module[0].requires_grad_(False)
    module[2].bias.requires_grad_(False)
    weights, build = module_case(module, 3, 4)
    assert set(check(weights, build).events) == {2, 3, 4}


def test_a_fully_frozen_stage_relays_gradients() -> None:
    """With no trainable weight at all, the input gradient is right and the weight pass does nothing."""
    module = nn.Linear(4, 4).double().requires_grad_(False)
    weights, build = module_case(module, 3, 4)
    assert check(weights, build).events == []


def test_inputs_without_gradient_and_integer_outputs() -> None:
    """Masks among the inputs get None, token ids among the roots are skipped, whatever gradient is given."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x, mask, ids = leaf(3, 4), torch.ones(3, 1, dtype=torch.float64), torch.arange(3)
        return Case([x, mask, ids], [(x @ w[0]) * mask, ids, mask, x.argmax(1)])

    assert check([weight(4, 4)], build).inputs[0][1:] == [None, None]


def test_values_relayed_unchanged() -> None:
    """A root that is an input itself returns its gradient, added to that of its other uses."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x, skip = leaf(3, 4), leaf(3, 4)
        return Case([x, skip], [x @ w[0], skip, x, skip])

    check([weight(4, 4)], build)


def test_an_unreachable_input_gets_none() -> None:
    """An input that no root uses gets None, not zeros."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x, leaf(2)], [x @ w[0]])

    assert check([weight(4, 4)], build).inputs[0][1] is None


def test_the_first_stage_leaves_everything_to_the_weight_pass() -> None:
    """Without inputs that require a gradient, the first part runs no node and the second all of them."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        return Case([torch.arange(3)], [torch.tanh(F.embedding(torch.tensor([1, 3, 1]), w[0])) @ w[1]])

    assert check([weight(5, 4), weight(4, 4)], build).reasons == [None] * 3


def test_one_input_used_and_asked_for_twice() -> None:
    """An input that feeds two branches, and stands twice in the list, gets the whole gradient in both places."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x, x], [(x @ w[0]) * x, x.sin()])

    check([weight(4, 4)], build)


@pytest.mark.parametrize("mixed_in", [False, True])
def test_sparse_embedding_gradients_stay_sparse(mixed_in: bool) -> None:
    """A sparse embedding keeps its sparse gradient, also where it is added to an activation."""
    table = nn.Embedding(7, 4, sparse=True).double()

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        found = table(torch.tensor([1, 5, 1]))
        return Case([x], [x * 2 + found if mixed_in else found, x.exp()])

    plain = check([table.weight], build)
    assert plain.weights[0] is not None and plain.weights[0].is_sparse


def test_products_with_sparse_matrices() -> None:
    """A sparse constant between two weights is exact."""
    adjacency = torch.eye(4, dtype=torch.float64).roll(1, 0).to_sparse()

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(4, 4)
        return Case([x], [torch.sparse.mm(adjacency, x @ w[0]) @ w[1] + torch.mm(adjacency, w[0])])

    check([weight(4, 4), weight(4, 4, seed=1)], build)


def test_complex_weights_and_activations() -> None:
    """Complex products, real weights in complex graphs and scaled products follow autograd's conjugation."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(4, 4, dtype=torch.complex128)
        h = torch.addmm(w[1], x, w[0], beta=2 - 1j, alpha=1j) * w[2] + x * w[2]
        h = torch.sub(h, w[1], alpha=1 + 2j)
        batched = torch.baddbmm(w[3], h[None].conj(), w[3], beta=1j, alpha=2j) + torch.bmm(h[None], w[3])
        return Case([x], [h, batched, torch.view_as_real(h @ w[0].mH), torch.view_as_real(w[3] @ h[None])])

    shapes = (4, 4), (4,), (1, 4, 4)
    matrix, row, batch = (weight(*shape, dtype=torch.complex128) for shape in shapes)
    assert check([matrix, row, weight(4), batch], build).reasons == [None] * 3


def test_weights_on_either_side_of_a_product() -> None:
    """Weights as left factor, right factor and addend of matrix products are exact, scaled or not."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(4, 4)
        h = torch.addmm(w[0], w[1], x, beta=0.5, alpha=2) + w[1].t() @ x + x @ w[1].t()
        b = torch.baddbmm(w[2], w[2], h[None], beta=3, alpha=0.5) + torch.bmm(h[None], w[2])
        return Case([x], [torch.addmm(x, h, w[0]), b - w[2], w[2] - b, torch.sub(x, w[0], alpha=2)])

    check([weight(4, 4), weight(4, 4, seed=1), weight(1, 4, 4)], build)


def test_grouped_products_of_expert_layers() -> None:
    """Products of a mixture of experts are exact for weights in either memory order, and on either side."""
    ends = torch.tensor([3, 8], dtype=torch.int32)

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(8, 16, dtype=torch.float32)
        h = F.grouped_mm(x, w[0], offs=ends) + F.grouped_mm(x, w[1].mT, offs=ends)
        return Case([x], [h, F.grouped_mm(w[2], h.tanh().reshape(2, 4, 16).repeat(1, 4, 1), offs=ends)])

    shapes = (2, 16, 16), (2, 16, 16), (8, 16)
    assert check([weight(*shape, dtype=torch.float32) for shape in shapes], build).reasons == [None] * 3


def test_broadcast_and_cast_weights() -> None:
    """Gradients of weights that broadcast, or are used in a lower precision, arrive in the weight's shape and type."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(2, 3, 4, dtype=torch.float32)
        h = x * w[0] + w[1] - w[2]
        with torch.autocast("cpu", dtype=torch.bfloat16):
            low = F.linear(h, w[3], w[1].reshape(4))
        return Case([x], [h.double() * w[1].double(), low, torch.cat([w[2].expand(2, 1, 4), x], dim=1)])

    check([weight(*s, dtype=torch.float32) for s in ((3, 1), (1, 4), (1, 1, 1), (4, 4))], build)


def test_missing_root_gradients_contribute_nothing() -> None:
    """A root without a gradient, a scalar one too, leaves the weights that only it uses untouched."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        roots = [x @ w[0], (x @ w[1]).sum()]
        return Case([x], roots, [torch.ones(3, 4, dtype=torch.float64), None])

    split = check([weight(4, 4), weight(4, 4, seed=1)], build)
    assert split.weights[1] is None


def test_no_root_gradient_at_all() -> None:
    """If no gradient arrives, inputs get None, weights nothing, and running the pass is allowed."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [x @ w[0]], [None])

    split = check([weight(4, 4)], build)
    assert split.weights == [None] and split.inputs == [[None]] * 3


@pytest.mark.filterwarnings("ignore:.*torch.jit")
def test_torchscript_submodules() -> None:
    """A scripted function inside a stage is exact, split or not."""

    def gate(x: Tensor, w: Tensor) -> Tensor:
        return torch.sigmoid(x @ w) * torch.tanh(x)

    scripted = torch.jit.trace(gate, (torch.randn(3, 4).double(), torch.randn(4, 4).double()))

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [scripted(x @ w[0], w[1])])

    check([weight(4, 4), weight(4, 4, seed=1)], build, microbatches=4)


@pytest.mark.parametrize("has_rerun_node", [False, True])
def test_compiled_submodules(has_rerun_node: bool) -> None:
    """A compiled block inside a stage is exact, also beside a node that must be run twice."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
    compiled = torch.compile(block, backend="aot_eager")

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        h = x / w[0] if has_rerun_node else x * w[0]
        return Case([x], [compiled(h)])

    split = check([weight(4), *block.parameters()], build)
    assert (split.reasons[0] is not None) == has_rerun_node


def test_double_backward_inside_the_step() -> None:
    """A gradient penalty, whose graph contains a backward, is exact."""

    def build(w: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        value = torch.tanh(x @ w[0]) @ w[1]
        (slope,) = torch.autograd.grad(value.sum(), x, create_graph=True)
        return Case([x], [value, (slope**2).sum()])

    check([weight(4, 4), weight(4, 4, seed=1)], build)


def test_checks_against_finite_differences() -> None:
    """The split gradients agree with numerical differentiation, not only with autograd's own backward."""
    w = [weight(4, 4), weight(4, 3, seed=1), weight(4, 4, seed=2)]

    def loss(x: Tensor) -> Tensor:
        return (torch.tanh(x @ (w[0] + w[2])) @ (w[1] + w[2][:, :3])).pow(2).sum()

    x = leaf(2, 4)
    value = loss(x)
    found, later = split_backward([value], [torch.ones_like(value)], [x])
    later.run()
    for tensor, gradient in [(x, found[0]), *((each, each.grad) for each in w)]:
        for index in range(0, tensor.numel(), 3):
            with torch.no_grad():
                flat, step = tensor.view(-1), 1e-6
                flat[index] += step
                above = loss(x)
                flat[index] -= 2 * step
                below = loss(x)
                flat[index] += step
            torch.testing.assert_close(gradient.view(-1)[index], (above - below) / (2 * step), rtol=1e-6, atol=1e-7)
