"""The second part of a split backward: what arrived at the forks becomes weight gradients.

The engine is entered once per batch of finished groups, from the edges below the forks, so every weight accumulates
once and its hooks see the sum over all its uses, as in a plain backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, _engine_run_backward
from torch.utils.hooks import RemovableHandle

from d9d_lightning.errors import StageGradientError
from d9d_lightning.stage.graph import Fork, ForkKind
from d9d_lightning.stage.scratch import Scratch
from d9d_lightning.stage.weight_rules import WEIGHT_RULES, WeightRule

__all__ = ["Arrival", "ForkPlan", "WeightPass"]

Gradients = Sequence[Tensor | None]

# Weight gradients of this many bytes may wait before they are accumulated: few engine calls, little memory.
_FLUSH_BYTES = 2 * 2**20


class ForkPlan:
    """What one fork needs to give its weight gradients after the input pass; made before that pass frees the graph."""

    __slots__ = ("edges", "group", "node", "rule", "saved", "slots")

    def __init__(self, fork: Fork, nodes: Sequence[Any]) -> None:
        node = nodes[fork.position]
        self.slots = fork.slots
        self.group = fork.group
        self.edges = [GradientEdge(nodes[number], slot) for number, slot in fork.edges]
        self.rule: WeightRule | None = None
        self.saved: tuple[Any, ...] = ()
        self.node: Any = node if fork.kind is ForkKind.RUN else None
        if fork.kind is ForkKind.RULE:
            self.rule = WEIGHT_RULES[type(node).__name__]
            self.saved = self.rule.read(node, fork.slots)

    def listen(self, node: Any, arrivals: list[Arrival]) -> RemovableHandle:
        """Have ``node`` append to ``arrivals`` what the weight pass needs of it."""
        if self.rule is not None:
            handle = node.register_prehook(lambda given: arrivals.append(Arrival(self, given, ())))
        else:
            keeps_given = self.node is not None

            def record(computed: tuple[Tensor | None, ...], given: tuple[Tensor | None, ...]) -> None:
                arrivals.append(Arrival(self, given if keeps_given else (), _select(computed, given, self.slots)))

            handle = node.register_hook(record)
        return handle  # type: ignore[no-any-return]

    def gradients(self, given: Gradients, computed: Gradients, scratch: Scratch) -> Gradients:
        """One gradient for each slot, that nobody else owns."""
        if self.rule is not None:
            return [None] * len(self.slots) if given[0] is None else self._apply(self.rule, given[0], scratch)
        if self.node is None or all(gradient is not None for gradient in computed):
            return computed
        outcome = self.node(*given)
        every = outcome if isinstance(outcome, tuple) else (outcome,)
        results = [(every[slot], edge) for slot, edge in zip(self.slots, self.edges, strict=True)]
        return [r if r is None else _settle(r, edge, _shares_memory(r, given)) for r, edge in results]

    def _apply(self, rule: WeightRule, arrived: Tensor, scratch: Scratch) -> Gradients:
        # slot by slot where possible: a bias is summed up while the gradient that its weight needs next is read anyway
        batches = [self.slots] if rule.is_joint else [(slot,) for slot in self.slots]
        edges = iter(self.edges)
        return [
            # a rule hands on the gradient itself or computes a new one
            _settle(result, next(edges), result is arrived)
            for slots in batches
            for result in rule.gradients(self.saved, slots, arrived, scratch)
        ]

    def tensors(self) -> list[Tensor]:
        """The tensors that were read from the graph."""
        flat = [value for item in self.saved for value in (item if isinstance(item, tuple) else (item,))]
        return [value for value in flat if isinstance(value, Tensor)]


@dataclass(frozen=True, slots=True)
class Arrival:
    """What the input pass left at one fork: the gradients that arrived, and those of its slots that it computed."""

    plan: ForkPlan
    given: Gradients
    computed: Gradients


class WeightPass:
    """The weight gradients that a split backward has left for later.

    Attributes:
        reason: Why everything was computed at once, or None if the weight gradients are still to come.
    """

    __slots__ = ("_arrivals", "_group_sizes", "_is_spent", "_roots", "reason")

    def __init__(
        self,
        arrivals: list[Arrival] | None = None,
        roots: Sequence[tuple[int, GradientEdge, Tensor]] = (),
        group_sizes: Sequence[int] = (),
        reason: str | None = None,
    ) -> None:
        self.reason = reason
        self._arrivals = arrivals or []
        self._roots = roots
        self._group_sizes = group_sizes
        self._is_spent = False

    @property
    def is_full(self) -> bool:
        """Whether the weight gradients were accumulated in the first part, so that nothing is left to run."""
        return self.reason is not None

    def held_bytes(self) -> int:
        """Memory that waits for :meth:`run`, in bytes: gradients that arrived, and tensors read from the graph.

        What nodes without a rule saved stays in the graph until then and is not counted.
        """
        tensors: list[Any] = [gradient for _, _, gradient in self._roots]
        for arrival in self._arrivals:
            tensors += [*arrival.plan.tensors(), *arrival.given, *arrival.computed]
        storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def run(self) -> None:
        """Accumulate the weight gradients into ``.grad`` and let go of everything.

        Raises:
            StageGradientError: It has been run before.
        """
        if self._is_spent:
            raise StageGradientError(
                "The weight gradients of this microbatch were already accumulated. Call split_backward once for each "
                "microbatch, and run() once on what it returns."
            )
        self._is_spent = True
        arrivals, roots, group_sizes = self._arrivals, self._roots, self._group_sizes
        self._arrivals, self._roots, self._group_sizes = [], (), ()
        with torch.no_grad():
            _Descent(roots, group_sizes).take_all(arrivals)


class _Descent:
    """One run of a weight pass: gradients wait here until their group is complete, then go down to the weights."""

    def __init__(self, roots: Sequence[tuple[int, GradientEdge, Tensor]], group_sizes: Sequence[int]) -> None:
        self._missing = list(group_sizes)
        self._parts: list[list[tuple[GradientEdge, Tensor]]] = [[] for _ in group_sizes]
        self._sums: dict[GradientEdge, Tensor] = {}
        self._ready: list[tuple[GradientEdge, Tensor]] = []
        self._num_bytes = 0
        self._scratch = Scratch()
        for group, edge, gradient in roots:
            self._parts[group].append((edge, gradient))
            self._complete(group)

    def take_all(self, arrivals: list[Arrival]) -> None:
        """Empty ``arrivals``, first come first served: the last layers finish first, as in a plain backward."""
        arrivals.reverse()
        while arrivals:
            self._take(arrivals.pop())
            if self._num_bytes >= _FLUSH_BYTES:
                self._flush()
            self._scratch.recycle()
        self._flush()

    def _take(self, arrival: Arrival) -> None:
        plan = arrival.plan
        gradients = plan.gradients(arrival.given, arrival.computed, self._scratch)
        for edge, gradient in zip(plan.edges, gradients, strict=True):
            if gradient is not None and not self._add_up(plan, edge, gradient):
                self._parts[plan.group].append((edge, gradient))
                self._num_bytes += gradient.nbytes
        self._complete(plan.group)

    def _add_up(self, plan: ForkPlan, edge: GradientEdge, gradient: Tensor) -> bool:
        """Add to what waits at the same edge: a weight used at each of many time steps needs one buffer, not many."""
        if plan.rule is None or gradient.layout is not torch.strided:
            return False  # the result of a node may be spread out by strides of 0, which cannot be added to
        earlier = self._sums.setdefault(edge, gradient)
        if earlier is gradient or earlier.shape != gradient.shape or earlier.dtype != gradient.dtype:
            return False
        earlier.add_(gradient)
        return True

    def _complete(self, group: int) -> None:
        self._missing[group] -= 1
        if self._missing[group] == 0:
            self._ready += self._parts[group]
            self._parts[group] = []

    def _flush(self) -> None:
        """Run the weight side. The public ``backward`` costs more per edge than a small layer does."""
        self._num_bytes = 0
        if self._ready:
            edges, gradients = zip(*self._ready, strict=True)
            for edge in edges:
                self._sums.pop(edge, None)
            self._ready = []
            _engine_run_backward(edges, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True)


def _settle(gradient: Tensor, edge: GradientEdge, is_shared: bool) -> Tensor:
    """Make a gradient real where the edge is, and its memory its own; the engine reduces and casts it."""
    if gradient.is_complex() and not edge.node._input_metadata[edge.output_nr].dtype.is_complex:
        gradient = gradient.real
    if not is_shared:
        return gradient
    reduced = gradient.sum_to_size(edge.node._input_metadata[edge.output_nr].shape)
    return reduced.clone() if _shares_memory(reduced, [gradient]) else reduced


def _select(computed: Gradients, given: Gradients, slots: Sequence[int]) -> Gradients:
    """Those gradients of a node that belong to the weight side, sharing no memory with the others."""
    found = []
    for slot in slots:
        gradient = computed[slot]
        others = (*given, *computed[:slot], *computed[slot + 1 :])
        found.append(gradient.clone() if gradient is not None and _shares_memory(gradient, others) else gradient)
    return found


def _shares_memory(gradient: Tensor, others: Iterable[Tensor | None]) -> bool:
    """Whether a gradient must be copied before it goes down to a weight.

    Below a view autograd adopts a gradient's memory as ``.grad`` and later adds to it in place; the other tensor may
    still be on its way to the previous stage.
    """
    if gradient.layout is not torch.strided:
        return False
    memory = gradient.untyped_storage().data_ptr()
    strided = (other for other in others if other is not None and other.layout is torch.strided)
    return any(other.untyped_storage().data_ptr() == memory for other in strided)
