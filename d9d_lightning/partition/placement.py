"""Deciding which stage every unit lives on.

Units keep the order of their first call. Units that exchange values both ways, and units of one checkpointed region,
form one group; groups are cut into contiguous stages so that the most expensive rank is as cheap as possible.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache

from torch import nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.units import parameter_count
from d9d_lightning.values import Placement, Trace

__all__ = ["find_oversized", "group_units", "place_units"]


def group_units(trace: Trace) -> list[list[str]]:
    """Groups of units that must share a stage, in an order in which values only flow forward."""
    order: list[str] = list(dict.fromkeys(call.unit for call in trace.calls))
    after: dict[str, set[str]] = {unit: set() for unit in order}
    regions: dict[int, str] = {}
    for call in trace.calls:
        for value in call.needs:
            producer = trace.calls[value.call].unit
            if producer != call.unit:
                after[producer].add(call.unit)
        if call.region is not None:
            _join(after, regions.setdefault(call.region, call.unit), call.unit)
    for together in trace.joined:
        first = trace.calls[min(together)].unit
        for number in together:
            _join(after, first, trace.calls[number].unit)
    reach = {unit: _reachable(unit, after) for unit in order}
    groups: list[list[str]] = []
    grouped: set[str] = set()
    for unit in order:
        if unit not in grouped:
            group = [other for other in order if other == unit or (other in reach[unit] and unit in reach[other])]
            grouped.update(group)
            groups.append(group)
    return _topological(groups, reach)


def _join(after: Mapping[str, set[str]], one: str, other: str) -> None:
    """Give two units one stage, as if each needed the other."""
    if one != other:
        after[one].add(other)
        after[other].add(one)


def _reachable(start: str, after: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    stack = [start]
    while stack:
        for following in after[stack.pop()]:
            if following not in seen:
                seen.add(following)
                stack.append(following)
    return seen


def _topological(groups: list[list[str]], reach: Mapping[str, set[str]]) -> list[list[str]]:
    ordered: list[list[str]] = []
    left = list(groups)
    while left:
        chosen = next(g for g in left if not any(g[0] in reach[other[0]] for other in left if other is not g))
        left.remove(chosen)
        ordered.append(chosen)
    return ordered


def find_oversized(trace: Trace, num_stages: int, kept: Collection[str]) -> str | None:
    """The largest unit that alone is worth more than two fair stages, or None.

    A unit that draws random numbers is left alone, since splitting it would change its numbers with the number of
    stages.

    Args:
        trace: A trace of the step.
        num_stages: Number of stages.
        kept: Units that are not to be split.
    """
    flops: dict[str, int] = {}
    for call in trace.calls:
        flops[call.unit] = flops.get(call.unit, 0) + call.flops
    drawing = {call.unit for call in trace.calls if call.draws}
    alone = {group[0] for group in group_units(trace) if len(group) == 1}
    largest = max(alone - drawing - set(kept), key=lambda unit: (flops[unit], unit), default=None)
    if largest is None or flops[largest] * num_stages <= 2 * sum(flops.values()):
        return None
    return largest


def place_units(
    trace: Trace,
    units: Mapping[str, nn.Module],
    stage_to_rank: Sequence[int],
    split_points: Sequence[str] | None = None,
) -> Placement:
    """Place every unit.

    Args:
        trace: A trace of the step.
        units: All units, called or not.
        stage_to_rank: Rank of each stage; the stages of one rank are weighed together.
        split_points: Names of the units that each stage but the first begins with; overrides the balance.

    Raises:
        PartitionError: ``split_points`` names no unit, or is in an order that values cannot flow in.
    """
    groups = group_units(trace)
    flops: dict[str, int] = {}
    for call in trace.calls:
        flops[call.unit] = flops.get(call.unit, 0) + call.flops
    known = sum(flops.values()) > 0
    weights = [float(sum(flops[unit] if known else parameter_count(units[unit]) for unit in group)) for group in groups]
    # a unit without any counted operator still costs something: its parameters are read once
    scale = max(sum(weights), 1.0) * 1e-3 / max(1, sum(parameter_count(unit) for unit in units.values()))
    weights = [w + scale * sum(parameter_count(units[u]) for u in g) for w, g in zip(weights, groups, strict=True)]
    num_stages = len(stage_to_rank)
    if split_points:
        cuts = _given_cuts(groups, split_points, num_stages)
    else:
        cuts = _balanced_cuts(weights, tuple(stage_to_rank))
    stage_of: dict[str, int] = {}
    for stage in range(num_stages):
        for group in groups[cuts[stage] : cuts[stage + 1]]:
            stage_of.update(dict.fromkeys(group, stage))
    stage_of.update({unit: stage_of[host] for unit, host in trace.lodgers.items() if host in stage_of})
    _house_uncalled(stage_of, units, num_stages)
    return Placement(num_stages, stage_of)


def _house_uncalled(stage_of: dict[str, int], units: Mapping[str, nn.Module], num_stages: int) -> None:
    """A unit that the first batch does not call lives with the one registered before it.

    Heads of other tasks stand after the trunk that they read, so a later batch that calls them finds values flowing
    forward.
    """
    called = [unit for unit in units if unit in stage_of]
    stage = stage_of[called[0]] if called else num_stages - 1
    for unit in units:
        stage = stage_of.setdefault(unit, stage)


def _given_cuts(groups: list[list[str]], split_points: Sequence[str], num_stages: int) -> list[int]:
    if len(split_points) != num_stages - 1:
        raise PartitionError(
            f"split_points names {len(split_points)} units, but {num_stages} stages have {num_stages - 1} borders. "
            f"Expected {num_stages - 1} unit names, in call order."
        )
    cuts = [0]
    for name in split_points:
        position = next((i for i, group in enumerate(groups) if name in group), None)
        if position is None or position < cuts[-1]:
            names = [unit for group in groups for unit in group]
            raise PartitionError(
                f"split_points={list(split_points)!r}: {name!r} is not a unit, or comes before the one named ahead of "
                f"it. Expected names from {names!r}, in this order."
            )
        cuts.append(position)
    return [*cuts, len(groups)]


def _balanced_cuts(weights: Sequence[float], stage_to_rank: tuple[int, ...]) -> list[int]:
    """Cut points ``[0, ..., len(weights)]`` that minimise the largest stage, then refine for the heaviest rank."""
    count, stages = len(weights), len(stage_to_rank)
    sums = [0.0]
    for weight in weights:
        sums.append(sums[-1] + weight)

    @cache
    def best(start: int, stage: int) -> tuple[float, int]:
        """Cheapest largest stage for the groups from ``start`` on stages ``stage``..., and the end of this stage."""
        if stage == stages - 1:
            return sums[count] - sums[start], count
        must_leave = min(stages - 1 - stage, max(0, count - start - 1))
        options = range(min(start + 1, count), count - must_leave + 1)
        found = [(max(sums[end] - sums[start], best(end, stage + 1)[0]), end) for end in options]
        return min(found) if found else (0.0, start)

    cuts = [0]
    for stage in range(stages):
        cuts.append(best(cuts[-1], stage)[1])
    return _refine_for_ranks(cuts, sums, stage_to_rank)


def _refine_for_ranks(cuts: list[int], sums: Sequence[float], stage_to_rank: tuple[int, ...]) -> list[int]:
    """Even out what ranks do, then what stages do: one group moves over one border, or over several in a row."""
    total = max(sums[-1], 1e-30)

    def shares(candidate: Sequence[int]) -> tuple[list[float], list[float]]:
        stages = [(sums[end] - sums[begin]) / total for begin, end in itertools.pairwise(candidate)]
        ranks = [0.0] * (max(stage_to_rank) + 1)
        for share, rank in zip(stages, stage_to_rank, strict=True):
            ranks[rank] += share
        return ranks, stages

    def unevenness(candidate: Sequence[int]) -> tuple[float, float]:
        ranks, stages = shares(candidate)
        return round(sum(x * x for x in ranks), 9), round(sum(x * x for x in stages), 9)

    def worst(candidate: Sequence[int]) -> tuple[float, float]:
        ranks, stages = shares(candidate)
        return round(max(ranks), 9), round(max(stages), 9)

    best = list(cuts)
    here, found = unevenness(best), True
    while found:
        found = False
        for moved in _neighbours(best):
            if (there := unevenness(moved)) < here:
                best, here, found = moved, there, True
    return min(cuts, best, key=worst)


def _neighbours(cuts: Sequence[int]) -> Iterator[list[int]]:
    for first in range(1, len(cuts) - 1):
        for last in range(first, len(cuts) - 1):
            for step in (-1, 1):
                moved = [*cuts[:first], *(cut + step for cut in cuts[first : last + 1]), *cuts[last + 1 :]]
                if moved[first - 1] < moved[first] and moved[last] < moved[last + 1]:
                    yield moved
