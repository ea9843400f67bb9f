"""What a split backward promises beyond its numbers: hooks, memory, order, sharing, errors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from d9d_lightning.errors import StageGradientError
from d9d_lightning.stage import graph, weight_pass
from d9d_lightning.stage import split_backward as split_module
from d9d_lightning.stage.split_backward import full_backward, split_backward
from tests.stage.split_backward_parity import Case, check, run_way


def mlp(width: int = 4, depth: int = 2) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh()) for _ in range(depth)]
    return nn.Sequential(*layers).double()


def leaf(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, requires_grad=True)


def start(module: nn.Module, x: Tensor):
    y = module(x)
    return split_backward([y], [torch.ones_like(y)], [x])


def test_weight_hooks_see_the_sum_of_all_uses_once() -> None:
    """A tensor hook on a shared weight, and a hook on its accumulation node, fire once a microbatch, in the W part."""
    layer = nn.Linear(4, 4, bias=False).double()
    seen, node_calls = [], []
    layer.weight.register_hook(lambda gradient: seen.append(gradient.clone()))
    node = layer.weight.expand_as(layer.weight).grad_fn.next_functions[0][0]
    node.register_hook(lambda *_: node_calls.append(1))
    _, later = start(lambda x: layer(torch.tanh(layer(x))), leaf(3, 4))
    assert seen == [] and node_calls == []
    later.run()
    assert len(seen) == len(node_calls) == 1
    torch.testing.assert_close(seen[0], layer.weight.grad)


def test_module_and_activation_hooks_fire_once_in_the_first_part() -> None:
    """Full backward hooks of modules and retain_grad of activations are served by the input pass, and only there."""
    module, calls = mlp(), []
    module[0].register_full_backward_hook(lambda m, i, o: calls.append("module"))
    module[1].register_full_backward_pre_hook(lambda m, o: calls.append("pre"))
    x = leaf(3, 4)
    h = module[0](x)
    h.retain_grad()
    h.register_hook(lambda _: calls.append("tensor"))
    _, later = split_backward([module[1](h)], [torch.ones(3, 4).double()], [x])
    assert calls == ["pre", "tensor", "module"] and h.grad is not None
    kept = h.grad.clone()
    later.run()
    assert len(calls) == 3
    torch.testing.assert_close(h.grad, kept)


def test_large_weights_finish_in_the_order_of_a_plain_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    """Post-accumulate hooks come last layer first, so gradient reduction can overlap the rest of the pass."""
    monkeypatch.setattr(weight_pass, "_FLUSH_BYTES", 1)
    module = mlp(depth=3)
    weights = list(module.parameters())

    def build(_: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(3, 4)
        return Case([x], [module(x)])

    layers = [[number // 4 for number in run_way(way, weights, build, 1).events] for way in ("plain", "split")]
    assert layers[0] == layers[1] == sorted(layers[1], reverse=True)


def test_weight_passes_may_run_late_and_in_any_order() -> None:
    """Input passes of three microbatches followed by their weight passes, last one first, give the plain gradients."""
    module, plain = mlp(), mlp()
    batches = [leaf(3, 4) for _ in range(3)]
    passes = []
    for x in batches:
        passes.append(start(module, x)[1])
        gc.collect()
    for later in reversed(passes):
        later.run()
    for x in batches:
        plain(x).sum().backward()
    for expected, actual in zip(plain.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad)


def test_running_a_pass_twice_is_an_error() -> None:
    """A second run() would count the weights twice, and raises instead."""
    _, later = start(mlp(), leaf(3, 4))
    later.run()
    with pytest.raises(StageGradientError, match="once"):
        later.run()


def test_the_input_pass_frees_what_only_it_needed() -> None:
    """Between the parts only what weight gradients need is alive, even while the caller holds the root."""
    module = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.GELU(), nn.Linear(8, 4)).double()
    kept: dict[str, weakref.ref[Tensor]] = {}
    for name, layer in module.named_children():
        layer.register_forward_hook(lambda _m, _i, output, name=name: kept.update({name: weakref.ref(output)}))
    x = leaf(3, 4)
    y = module(x)
    assert kept["0"]() is not None and kept["1"]() is not None  # each GELU has saved its input
    _, later = split_backward([y], [torch.ones_like(y)], [x])
    assert kept["0"]() is None and kept["1"]() is None
    assert later.held_bytes() == 8 * (3 * 4 + 3 * 8 + 3 * 8 + 3 * 4)
    later.run()
    assert later.held_bytes() == 0


class Token(torch.autograd.Function):
    """Identity that ties the lifetime of an object to its autograd node."""

    @staticmethod
    def forward(ctx, value: Tensor, token: object) -> Tensor:
        ctx.token = token
        return value.view_as(value)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None


class Something:
    """An object that can be weakly referenced."""


@pytest.mark.parametrize("kind", ["rule", "run twice", "python"])
def test_nothing_is_retained_after_the_run(kind: str) -> None:
    """Once run() returns, the pass itself keeps no node of the graph alive, without the garbage collector's help."""
    layer, scale = nn.Linear(4, 4).double(), nn.Parameter(torch.ones(4, dtype=torch.float64))
    tokens = [Something(), Something()]
    references = [weakref.ref(token) for token in tokens]
    gc.disable()
    try:
        x = leaf(3, 4)
        h = Token.apply(layer(x), tokens[0])
        w = Token.apply(scale * 2, tokens[1])
        y = {"rule": torch.mul, "run twice": torch.div, "python": Both.apply}[kind](h, w)
        gradients, later = split_backward([y], [torch.ones_like(y)], [x])
        del h, w, y, tokens
        assert references[1]() is not None
        later.run()
        assert [reference() for reference in references] == [None, None]
        assert gradients[0] is not None and not later.is_full
    finally:
        gc.enable()


class Both(torch.autograd.Function):
    """A sum whose backward hands the very same tensor to both arguments."""

    @staticmethod
    def forward(ctx, left: Tensor, right: Tensor) -> Tensor:
        return left + right

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, gradient


@pytest.mark.parametrize("kind", ["add", "cat", "python", "root"])
def test_weight_gradients_share_no_memory_with_what_is_sent(kind: str) -> None:
    """Below a view autograd adopts a gradient's memory; it must not be that of a gradient on its way to a neighbour."""
    p = nn.Parameter(torch.randn(3, 4, dtype=torch.float64))
    x, given = leaf(1, 3, 4), torch.ones(1, 3, 4, dtype=torch.float64)
    y = {
        "add": lambda: x + p.unsqueeze(0),
        "cat": lambda: torch.cat([x, p.unsqueeze(0)], dim=2)[:, :, 4:] + x,
        "python": lambda: Both.apply(x, p.unsqueeze(0)),
        "root": lambda: p.unsqueeze(0),
    }[kind]()
    (found,), later = split_backward([y], [given], [x])
    later.run()
    memory = p.grad.untyped_storage().data_ptr()
    assert memory != given.untyped_storage().data_ptr()
    assert found is None or memory != found.untyped_storage().data_ptr()
    p.grad = None
    full_backward([p.unsqueeze(0)], [given], [])
    assert p.grad.untyped_storage().data_ptr() != given.untyped_storage().data_ptr()


def test_recycled_memory_never_reaches_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """Large weight gradients reuse one buffer; gradients that a hook keeps, and .grad itself, are never overwritten."""
    torch.manual_seed(0)
    layers = nn.Sequential(*[nn.Linear(256, 256, bias=False) for _ in range(3)])
    kept: list[Tensor] = []
    copies: list[Tensor] = []

    def keep(gradient: Tensor) -> None:
        kept.append(gradient)
        copies.append(gradient.clone())

    layers[1].weight.register_hook(keep)
    taken = []
    original = weight_pass.Scratch._take
    monkeypatch.setattr(
        weight_pass.Scratch, "_take", lambda self, *a: taken.append(len(self._free)) or original(self, *a)
    )
    monkeypatch.setattr(weight_pass, "_FLUSH_BYTES", 1)

    def build(_: Sequence[Tensor], microbatch: int) -> Case:
        x = torch.randn(8, 256, requires_grad=True)
        return Case([x], [layers(x)])

    check(list(layers.parameters()), build)
    assert any(taken), "no buffer was ever used again"
    for gradient, copy in zip(kept, copies, strict=True):
        torch.testing.assert_close(gradient, copy, rtol=0, atol=0)


def test_small_flushes_do_not_split_a_shared_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """However often gradients go down to the weights, those of one weight go together."""
    monkeypatch.setattr(weight_pass, "_FLUSH_BYTES", 1)
    shared, other = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()

    def build(_: Sequence[Tensor], microbatch: int) -> Case:
        x = leaf(4, 4)
        return Case([x], [shared(torch.tanh(other(shared(x)))) / (2 + shared.weight**2)])

    events = check([*shared.parameters(), *other.parameters()], build).events
    assert sorted(events) == sorted([0, 1, 2, 3] * 3)


def test_structure_is_analysed_once() -> None:
    """Further microbatches of one structure reuse its analysis; another structure is seen at once."""
    module = mlp(depth=3)
    graph.find_cut.cache_clear()
    for _ in range(4):
        start(module, leaf(3, 4))[1].run()
    assert (graph.find_cut.cache_info().misses, graph.find_cut.cache_info().hits) == (1, 3)
    module[1].requires_grad_(False)
    start(module, leaf(3, 4))[1].run()
    assert graph.find_cut.cache_info().misses == 2


@pytest.mark.parametrize(
    "joins, keeps", [(torch.mul, False), (lambda h, w: torch.cat([h, w]), False), (torch.div, True)]
)
def test_the_graph_is_kept_only_where_a_node_must_be_run_again(joins: object, keeps: bool) -> None:
    """Saved tensors outlive the input pass only if a node that saved some has no weight rule."""
    x = leaf(3, 4)
    y = joins(x * 2, nn.Parameter(torch.ones(3, 4, dtype=torch.float64)))
    ends = [torch.autograd.graph.get_gradient_edge(x).node]
    assert graph.find_cut(graph.walk_graph([(y.grad_fn, 0)], ends).signature).keeps_graph == keeps


def test_a_long_chain_is_walked_without_recursion() -> None:
    """A graph of ten thousand nodes is cut without reaching Python's recursion limit."""
    w = nn.Parameter(torch.ones(1, dtype=torch.float64))
    x = h = leaf(1)
    for _ in range(5000):
        h = h + w
    (found,), later = split_backward([h], [torch.ones(1, dtype=torch.float64)], [x])
    later.run()
    assert found.item() == 1 and w.grad.item() == 5000


def test_gradients_of_inputs_are_left_alone() -> None:
    """What stood in .grad of an input before stands there afterwards, for both kinds of backward."""
    module, mark = mlp(), torch.full((3, 4), 7.0, dtype=torch.float64)
    for backward in (split_backward, full_backward):
        x = leaf(3, 4)
        x.grad = mark
        y = module(x)
        backward([y], [torch.ones_like(y)], [x])
        assert x.grad is mark


def test_an_error_in_a_users_hook_leaves_the_weights_untouched() -> None:
    """If the input pass fails, its error comes out as it is and no weight has a gradient."""
    module, x = mlp(), leaf(3, 4)
    h = module[0](x)
    h.register_hook(lambda _: (_ for _ in ()).throw(KeyError("mine")))
    y = module[1](h)
    with pytest.raises(KeyError, match="mine"):
        split_backward([y], [torch.ones_like(y)], [x])
    assert all(weight.grad is None for weight in module.parameters())


def test_wrong_arguments_are_named() -> None:
    """Unequal counts, wrong shapes and non-leaf inputs say what was given and what to do."""
    module, x = mlp(), leaf(3, 4)
    y = module(x)
    for backward in (split_backward, full_backward):
        with pytest.raises(StageGradientError, match="1 roots and 2 gradients"):
            backward([y], [torch.ones_like(y), None], [x])
        with pytest.raises(StageGradientError, match=r"shape \(3, 4\), its gradient \(4,\)"):
            backward([y], [torch.ones(4, dtype=torch.float64)], [x])
        with pytest.raises(StageGradientError, match=r"detach\(\)"):
            backward([y], [torch.ones_like(y)], [x * 2])


def test_a_torch_that_lets_functions_skip_gradients_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """If custom functions no longer compute all gradients at once, stages that use them are not split."""
    assert split_module._python_functions_compute_everything()
    monkeypatch.setattr(split_module, "_python_functions_compute_everything", lambda: False)
    p, x = nn.Parameter(torch.ones(3, 4, dtype=torch.float64)), leaf(3, 4)
    y = Both.apply(x, p)
    _, later = split_backward([y], [torch.ones_like(y)], [x])
    assert later.is_full and "custom autograd.Function" in str(later.reason) and p.grad is not None
