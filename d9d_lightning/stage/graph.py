"""Where a stage's autograd graph is cut between input gradients and weight gradients.

Of the nodes behind the roots some lead to an input of the stage, the others only to weights::

    root -> addmm -> gelu -> addmm -> input        lead to the input: run by the input pass
              |                |
              v                v
              t                t                   the weight side: run by the weight pass
              |                |
              v                v
            weight           weight

An edge from the first kind to the second is where a weight gradient starts; the node above such an edge is a *fork*.
The input pass records what arrives at each fork; the weight pass turns that into the gradients on the fork's edges and
lets autograd carry them down the weight side. No edge leads back, so nothing is run twice or counted twice however
weights are shared; what a root reaches only through weights is simply on the weight side as a whole.

Walking the graph is cheap (about a microsecond a node); reasoning about it is not. So a walk also writes down a
*signature* that determines the structure completely, and :func:`find_cut` is a cached function of it.
"""

from __future__ import annotations

import enum
import functools
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction

from d9d_lightning.stage.weight_rules import WEIGHT_RULES

__all__ = ["Cut", "Edge", "Fork", "ForkKind", "Walk", "find_cut", "saved_names", "walk_graph"]

Edge = tuple[Any, int]
"""An autograd node, and which of its inputs (the outputs of the operation it belongs to) the edge leads to."""

Signature = tuple[tuple[Any, ...], tuple[int, ...]]

_ACCUMULATE: type = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
_INPUT, _WEIGHT = "input", "weight"
_PYTHON, _REENTRANT, _COMPILED = "python", "reentrant", "compiled"
_GENERATED = re.compile(r"\w+Backward\d+")
_INDIVISIBLE = frozenset({"MkldnnRnnLayerBackward0"})
"""Nodes whose kernel computes all gradients even if one is wanted: running it twice costs twice as much."""
_MAX_USES = 16
"""A weight used more often, as by a recurrent layer, would have too many gradients waiting to be added up."""


class ForkKind(enum.Enum):
    """How the gradients on a fork's edges to the weight side are found."""

    RULE = "computed from saved tensors by its rule"
    RUN = "computed by running the node once more, outside of the engine"
    PYTHON = "taken from the input pass: a Python function computes all its gradients at once anyway"


@dataclass(frozen=True, slots=True)
class Fork:
    """A node that leads to an input and, by other edges, to weights.

    Attributes:
        position: Number of the node in the walk.
        kind: How the gradients of its ``slots`` are found.
        slots: The arguments of the operation that lie on the weight side.
        edges: For each slot, the number of the node that it leads to, and which input of that node.
        group: Forks whose weight sides touch share a group; a group is run down to its weights at once.
    """

    position: int
    kind: ForkKind
    slots: tuple[int, ...]
    edges: tuple[tuple[int, int], ...]
    group: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The structure of one graph, as far as its split backward needs it.

    Attributes:
        forks: In the order of the walk.
        weight_roots: For each root, the group of its node if that is on the weight side, else None.
        group_sizes: For each group, the number of its forks and roots.
        keeps_graph: Some fork is run a second time and needs its saved tensors until then.
        watched: Numbers of the nodes that run outside of the input pass and have saved tensors.
        obstacle: Why this graph cannot be cut; None if it can.
    """

    forks: tuple[Fork, ...]
    weight_roots: tuple[int | None, ...]
    group_sizes: tuple[int, ...]
    keeps_graph: bool
    watched: tuple[int, ...]
    obstacle: str | None


@dataclass(frozen=True, slots=True)
class Walk:
    """Every node behind the roots, numbered, with the signature of how they hang together."""

    nodes: list[Any]
    signature: Signature


def walk_graph(roots: Sequence[Edge], inputs: Iterable[Any]) -> Walk:
    """Visit every autograd node behind ``roots`` once.

    Args:
        roots: The edge where each root's gradient enters.
        inputs: ``AccumulateGrad`` nodes of the stage's inputs.
    """
    nodes: list[Any] = []
    numbers: dict[Any, int] = {}
    entries: list[Any] = []
    ends = set(inputs)
    root_numbers = []
    for node, _ in roots:
        if node not in numbers:
            numbers[node] = len(nodes)
            nodes.append(node)
        root_numbers.append(numbers[node])
    for node in nodes:  # grows while it is read
        kind = type(node)
        if kind is _ACCUMULATE:
            entries.append(_INPUT if node in ends else _WEIGHT)
            continue
        entry = [_mark(node, kind)]
        for child, slot in node.next_functions:
            if child is None:
                entry.append(None)
                continue
            number = numbers.get(child)
            if number is None:
                number = numbers[child] = len(nodes)
                nodes.append(child)
            entry.append((number, slot))
        entries.append(tuple(entry))
    return Walk(nodes, (tuple(entries), tuple(root_numbers)))


def _mark(node: Any, kind: type) -> Any:
    """What the structure must say of a node. Classes of Python functions can be made anew in every call: not those."""
    if not issubclass(kind, BackwardCFunction):
        return kind if kind.__name__ != "CppFunction" else node.name()
    if kind.__name__ == "CheckpointFunctionBackward":
        return _REENTRANT
    return _COMPILED if kind.__name__ == "CompiledFunctionBackward" else _PYTHON


@functools.lru_cache(maxsize=256)
def find_cut(signature: Signature) -> Cut:
    """Find the forks of the graph with this signature, and which of them must be run together."""
    entries, roots = signature
    leading = _find_leading(entries)
    sides = _join_weight_sides(entries, leading)
    forks = []
    for position in sorted(leading):
        entry = entries[position]
        if entry == _INPUT:
            continue
        slots = tuple(s for s, link in enumerate(entry[1:]) if link is not None and link[0] not in leading)
        if slots:
            edges = tuple(entry[1 + slot] for slot in slots)
            forks.append(Fork(position, _kind_of(entry[0]), slots, edges, sides[edges[0][0]]))
    weight_roots = [None if root in leading else sides[root] for root in roots]
    used = [fork.group for fork in forks] + [group for group in weight_roots if group is not None]
    dense = {group: number for number, group in enumerate(dict.fromkeys(used))}
    forks = [Fork(f.position, f.kind, f.slots, f.edges, dense[f.group]) for f in forks]
    rerun = [entries[f.position][0] for f in forks if f.kind is ForkKind.RUN]
    keeps_graph = any(not _holds_no_tensor(mark) for mark in rerun)
    return Cut(
        forks=tuple(forks),
        weight_roots=tuple(None if group is None else dense[group] for group in weight_roots),
        group_sizes=tuple(used.count(group) for group in dense),
        keeps_graph=keeps_graph,
        watched=_find_watched(entries, leading, forks),
        obstacle=_find_obstacle(entries, leading, forks, keeps_graph),
    )


def _links(entry: Any) -> list[tuple[int, int]]:
    return [] if isinstance(entry, str) else [link for link in entry[1:] if link is not None]


def _find_leading(entries: Sequence[Any]) -> set[int]:
    """Numbers of the nodes from which an input can be reached, the inputs included."""
    parents: list[list[int]] = [[] for _ in entries]
    for number, entry in enumerate(entries):
        for child, _ in _links(entry):
            parents[child].append(number)
    found = {number for number, entry in enumerate(entries) if entry == _INPUT}
    waiting = list(found)
    while waiting:
        for parent in parents[waiting.pop()]:
            if parent not in found:
                found.add(parent)
                waiting.append(parent)
    return found


def _join_weight_sides(entries: Sequence[Any], leading: set[int]) -> list[int]:
    """For each node a representative; two nodes of the weight side have the same one if their gradients ever meet."""
    chief = list(range(len(entries)))

    def find(number: int) -> int:
        while chief[number] != number:
            chief[number] = chief[chief[number]]
            number = chief[number]
        return number

    for number, entry in enumerate(entries):
        below = [child for child, _ in _links(entry) if child not in leading]
        anchor = below[:1] if number in leading else [number]
        for child in below:
            chief[find(child)] = find(anchor[0])
    return [find(number) for number in range(len(entries))]


def _kind_of(mark: Any) -> ForkKind:
    if isinstance(mark, type):
        return ForkKind.RULE if mark.__name__ in WEIGHT_RULES else ForkKind.RUN
    return ForkKind.PYTHON if mark in (_PYTHON, _COMPILED, _REENTRANT) else ForkKind.RUN


def _holds_no_tensor(mark: Any) -> bool:
    """Whether nodes of this type can be run after the engine has freed what they saved."""
    return isinstance(mark, type) and bool(_GENERATED.fullmatch(mark.__name__)) and not saved_names(mark)


@functools.cache
def saved_names(kind: type) -> tuple[str, ...]:
    """Attributes of a node type that give its saved tensors as they are stored."""
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def _find_watched(entries: Sequence[Any], leading: set[int], forks: Sequence[Fork]) -> tuple[int, ...]:
    aside = [number for number in range(len(entries)) if number not in leading]
    outside = [fork.position for fork in forks if fork.kind is ForkKind.RUN] + aside
    return tuple(n for n in outside if not isinstance(entries[n], str) and _saves_tensors(entries[n][0]))


def _saves_tensors(mark: Any) -> bool:
    return mark in (_PYTHON, _COMPILED) or (isinstance(mark, type) and bool(saved_names(mark)))


def _find_obstacle(entries: Sequence[Any], leading: set[int], forks: Sequence[Fork], keeps_graph: bool) -> str | None:
    marks = [(number, entry[0]) for number, entry in enumerate(entries) if not isinstance(entry, str)]
    if any(mark == _REENTRANT for _, mark in marks):
        return "a region uses reentrant activation checkpointing, which allows nothing but a full backward"
    for mark in (entries[fork.position][0] for fork in forks if fork.kind is ForkKind.RUN):
        if isinstance(mark, str):
            return f"{mark} is a C++ function that may compute all its gradients at once"
        if mark.__name__ in _INDIVISIBLE:
            return f"{mark.__name__} computes all its gradients in one kernel"
    uses = _count_uses(entries, forks)
    if uses > _MAX_USES:
        return f"one weight is used {uses} times, and each use would keep a gradient of its size waiting"
    if keeps_graph and any(mark == _COMPILED and number in leading for number, mark in marks):
        return "a compiled region frees its memory during the backward, but another node must be run twice"
    return None


def _count_uses(entries: Sequence[Any], forks: Sequence[Fork]) -> int:
    """How many forks the busiest weight has, directly or through one view of it for each use."""
    uses: Counter[int] = Counter()
    for number, _ in (edge for fork in forks for edge in fork.edges):
        below = [number, *(child for child, _ in _links(entries[number]))]
        uses.update({weight for weight in below if entries[weight] == _WEIGHT and weight != number})
    return max(uses.values(), default=0)
