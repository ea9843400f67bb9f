"""One microbatch's backward in two parts: the gradients of a stage's inputs now, those of its weights later.

Zero-bubble schedules (Qi et al., "Zero Bubble Pipeline Parallelism", ICLR 2024) fill idle time with weight gradients,
which no other stage waits for. :func:`split_backward` is exact for every graph: where it cannot cut one (activation
checkpointing, TorchScript) it does the full backward at once and says why in :attr:`WeightPass.reason`.

What holds for hooks, compared with one plain backward:

- Tensor hooks, ``retain_grad``, ``register_post_accumulate_grad_hook`` and module backward hooks fire exactly as often
  and with the same values. Those of activations fire in the first part, those of weights, and of what was computed from
  weights alone, in :meth:`WeightPass.run`.
- A hook that a user put on an autograd *node* (``tensor.grad_fn.register_hook``) fires once, in the part that runs the
  node; for a node of the first part the gradients of its weights may then still be None.
- A custom ``autograd.Function`` runs its backward once, in the first part, since it computes all its gradients at once.

On an accelerator, run both parts on the stream of the forward.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, _engine_run_backward, get_gradient_edge

from d9d_lightning.errors import StageGradientError
from d9d_lightning.stage.graph import Cut, Edge, ForkKind, Walk, find_cut, saved_names, walk_graph
from d9d_lightning.stage.weight_pass import Arrival, ForkPlan, WeightPass
from d9d_lightning.stage.weight_rules import HookedTensorError

__all__ = ["WeightPass", "full_backward", "split_backward"]

_HOOKED = "saved tensors have hooks (activation checkpointing or offloading), which a second pass would run again"


def split_backward(
    roots: Sequence[Tensor], root_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> tuple[list[Tensor | None], WeightPass]:
    """Compute the gradients of ``inputs``; leave the gradients of all other leaves to the returned pass.

    The graph behind ``roots`` is spent afterwards. ``.grad`` of inputs and weights is not touched, unless the pass says
    that it :attr:`~WeightPass.is_full`. What is returned may share memory with ``root_gradients``. Drop the roots
    before :meth:`WeightPass.run`, or they keep alive what nodes without a weight rule have saved.

    Args:
        roots: Tensors to differentiate; those that require no gradient are skipped. Inputs may be among them.
        root_gradients: For each root a gradient of its shape. None means that no gradient arrives, for a scalar too:
            give ``torch.ones_like(loss)`` for a loss.
        inputs: Leaf tensors; one that requires no gradient gets None.

    Returns:
        For each input its gradient, or None where no root depends on it; and the pass.

    Raises:
        StageGradientError: Lengths or shapes do not fit, or an input is not a leaf.
    """
    live = _select_roots(roots, root_gradients, inputs)
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    if not live:
        return [None] * len(inputs), WeightPass()
    edges = [_edge_of(root) for root, _ in live]
    walk = walk_graph(edges, [get_gradient_edge(tensor).node for tensor in wanted])
    cut = find_cut(walk.signature)
    obstacle = _find_obstacle(walk, cut)
    plans = [] if obstacle else _plan_forks(walk, cut)
    if obstacle or plans is None:
        return full_backward(roots, root_gradients, inputs), WeightPass(reason=obstacle or _HOOKED)
    weight_roots = [
        # a copy: below a view autograd would adopt the caller's memory as .grad
        (group, GradientEdge(node, slot), gradient.clone())
        for (node, slot), (_, gradient), group in zip(edges, live, cut.weight_roots, strict=True)
        if group is not None
    ]
    leading = [pair for pair, group in zip(live, cut.weight_roots, strict=True) if group is None]
    arrivals: list[Arrival] = []
    forks = [(plan, walk.nodes[fork.position]) for plan, fork in zip(plans, cut.forks, strict=True)]
    found = iter(_run_input_pass(leading, wanted, forks, arrivals, cut.keeps_graph))
    gradients = [next(found) if tensor.requires_grad else None for tensor in inputs]
    return gradients, WeightPass(arrivals, weight_roots, cut.group_sizes)


def full_backward(
    roots: Sequence[Tensor], root_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[Tensor | None]:
    """Compute the gradients of ``inputs`` and accumulate those of all other leaves, in one ordinary backward.

    Arguments, result and errors are those of :func:`split_backward`. ``.grad`` of an input is afterwards what it was.
    """
    live = _select_roots(roots, root_gradients, inputs)
    if not live:
        return [None] * len(inputs)
    kept = {id(tensor): (tensor, tensor.grad) for tensor in inputs}
    try:
        for tensor in inputs:
            tensor.grad = None
        # no inputs here: reentrant checkpointing refuses them; and the public function would check all shapes again
        gradients = tuple([gradient.clone() for _, gradient in live])
        _engine_run_backward(
            tuple([root for root, _ in live]), gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
        )
        return [tensor.grad for tensor in inputs]
    finally:
        for tensor, gradient in kept.values():
            tensor.grad = gradient


def _select_roots(
    roots: Sequence[Tensor], root_gradients: Sequence[Tensor | None], inputs: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The roots that a gradient arrives at, after all arguments were checked."""
    if len(roots) != len(root_gradients):
        raise StageGradientError(
            f"Got {len(roots)} roots and {len(root_gradients)} gradients. Give one gradient, or None, for each root."
        )
    for index, tensor in enumerate(inputs):
        if not tensor.is_leaf:
            raise StageGradientError(
                f"Input {index} is the result of {tensor.grad_fn}, not a leaf. Give the stage "
                "`tensor.detach().requires_grad_()` and differentiate with respect to that."
            )
    live = []
    for index, (root, gradient) in enumerate(zip(roots, root_gradients, strict=True)):
        if gradient is None or not root.requires_grad:
            continue
        if gradient.shape != root.shape:
            raise StageGradientError(
                f"Root {index} has shape {tuple(root.shape)}, its gradient {tuple(gradient.shape)}. They must be equal."
            )
        live.append((root, gradient))
    return live


def _edge_of(tensor: Tensor) -> Edge:
    if tensor.grad_fn is not None:
        return tensor.grad_fn, tensor.output_nr
    edge = get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def _run_input_pass(
    leading: Sequence[tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    forks: Sequence[tuple[ForkPlan, Any]],
    arrivals: list[Arrival],
    keeps_graph: bool,
) -> Sequence[Tensor | None]:
    """Run the nodes that lead to inputs, each once, and note in ``arrivals`` what reaches the forks."""
    if not leading:
        return [None] * len(inputs)
    roots, gradients = zip(*leading, strict=True)
    handles = [plan.listen(node, arrivals) for plan, node in forks]
    try:
        return _engine_run_backward(
            roots, gradients, keeps_graph, False, tuple(inputs), allow_unreachable=True, accumulate_grad=False
        )
    finally:
        # a hook refers to its plan and the plan to its node: left there, nothing would ever be freed
        for handle in handles:
            handle.remove()


def _plan_forks(walk: Walk, cut: Cut) -> list[ForkPlan] | None:
    """Read what the forks have saved, while the graph is whole; None if that would run somebody's hook."""
    try:
        return [ForkPlan(fork, walk.nodes) for fork in cut.forks]
    except HookedTensorError:
        return None


def _find_obstacle(walk: Walk, cut: Cut) -> str | None:
    """Why a split would not be exact, if so."""
    if cut.obstacle is not None:
        return cut.obstacle
    if any(fork.kind is ForkKind.PYTHON for fork in cut.forks) and not _python_functions_compute_everything():
        return "this version of torch lets a custom autograd.Function compute only some of its gradients"
    return _HOOKED if any(_has_hooked_tensor(walk.nodes[position]) for position in cut.watched) else None


def _has_hooked_tensor(node: Any) -> bool:
    """Whether reading a saved tensor runs user code; non-reentrant checkpointing then recomputes its region."""
    names = ("_raw_saved_tensors",) if isinstance(node, BackwardCFunction) else saved_names(node.__class__)
    for name in names:
        stored = getattr(node, name)
        for saved in stored if isinstance(stored, tuple | list) else (stored,):
            if saved is not None and saved.unpack_hook is not None:
                return True
    return False


@functools.cache
def _python_functions_compute_everything() -> bool:
    """Whether a custom function sees all gradients as needed although only some are, as up to torch 2.13."""
    seen: list[tuple[bool, ...]] = []

    class Probe(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, left: Tensor, right: Tensor) -> Tensor:
            return left + right

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
            seen.append(ctx.needs_input_grad)
            return gradient, gradient

    left, right = (torch.zeros(1, requires_grad=True) for _ in range(2))
    with torch.enable_grad():
        torch.autograd.grad(Probe.apply(left, right), [left], torch.ones(1))
    return seen == [(True, True)]
