"""Which stage every unit lives on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.placement import find_oversized, group_units, place_units
from d9d_lightning.stage.planner import Planner
from d9d_lightning.values import Microbatch, Trace, UnitCall, ValueId

Call = tuple[str, Sequence[int], int]
"""Unit, numbers of the calls whose result it needs, floating point operations."""


def trace_of(calls: Sequence[Call], regions: Sequence[int | None] | None = None) -> Trace:
    made = [
        UnitCall(unit, 0, frozenset(ValueId(i, 0) for i in needs), frozenset(), None, (), region=region, flops=flops)
        for (unit, needs, flops), region in zip(calls, regions or [None] * len(calls), strict=True)
    ]
    return Trace(tuple(made), frozenset(), frozenset())


def chain(*flops: int) -> Trace:
    """Each unit needs the one before it."""
    return trace_of([(f"u{i}", [i - 1] if i else [], weight) for i, weight in enumerate(flops)])


def units_of(trace: Trace, *more: str) -> dict[str, nn.Module]:
    return {name: nn.Linear(1, 1) for name in [*dict.fromkeys(call.unit for call in trace.calls), *more]}


def stages(trace: Trace, stage_to_rank: Sequence[int], split_points: Sequence[str] | None = None) -> list[int]:
    """Stage of every called unit, in call order."""
    placement = place_units(trace, units_of(trace), stage_to_rank, split_points)
    return [placement.stage_of(unit) for unit in dict.fromkeys(call.unit for call in trace.calls)]


def test_equal_units_are_cut_evenly() -> None:
    """Stages are contiguous in call order and equally heavy where they can be."""
    assert stages(chain(*[100] * 8), (0, 1, 2, 3)) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_the_heaviest_stage_is_as_light_as_possible() -> None:
    """A heavy unit stands alone, and light ones gather."""
    assert stages(chain(10, 10, 100, 10, 10), (0, 1, 2)) == [0, 0, 1, 2, 2]


def test_the_two_stages_of_a_rank_are_weighed_together() -> None:
    """In a V a rank with a heavy last stage gets a light first one."""
    placed = stages(chain(10, 10, 10, 10, 10, 10, 10, 40), (0, 1, 1, 0))
    weights = [10] * 7 + [40]
    ranks = [0, 0]
    for stage, weight in zip(placed, weights, strict=True):
        ranks[(0, 1, 1, 0)[stage]] += weight
    assert sorted(placed) == placed and set(placed) == {0, 1, 2, 3}
    assert max(ranks) <= 60


def test_too_few_units_leave_empty_stages() -> None:
    """Every unit gets a stage of its own, and the stages that are left over relay."""
    assert stages(chain(10, 10), (0, 1, 2, 3)) == [0, 1]


def test_split_points_decide() -> None:
    """Named units begin the stages, whatever the balance says."""
    assert stages(chain(1, 1, 1, 100), (0, 1, 2), ["u1", "u2"]) == [0, 1, 2, 2]


@pytest.mark.parametrize(
    ("points", "says"),
    [
        (["u1"], r"split_points names 1 units, but 3 stages have 2 borders.*Expected 2 unit names"),
        (["u1", "u9"], r"'u9' is not a unit.*Expected names from \['u0'"),
        (["u2", "u1"], r"'u1' is not a unit, or comes before"),
    ],
)
def test_wrong_split_points_are_told(points: list[str], says: str) -> None:
    """Too few, unknown and unordered split points are errors that show what would do."""
    with pytest.raises(PartitionError, match=says):
        stages(chain(1, 1, 1, 1), (0, 1, 2), points)


def test_units_that_need_each_other_share_a_stage() -> None:
    """A cycle of values through two units, however long, makes one group."""
    trace = trace_of([("a", [], 1), ("b", [0], 1), ("c", [1], 1), ("a", [2], 1), ("d", [3], 1)])
    assert group_units(trace) == [["a", "b", "c"], ["d"]]
    assert stages(trace, (0, 1)) == [0, 0, 0, 1]


def test_units_of_one_recomputed_region_share_a_stage() -> None:
    """A checkpointed region is recomputed whole, so it is not cut."""
    trace = trace_of([("a", [], 1), ("b", [0], 1), ("c", [1], 1)], [None, 0, 0])
    assert group_units(trace) == [["a"], ["b", "c"]]


def test_groups_stand_in_an_order_in_which_values_flow_forward() -> None:
    """A unit called early but again at the end comes after what its second call needs."""
    trace = trace_of([("late", [], 1), ("a", [], 1), ("b", [1], 1), ("late", [2], 1)])
    assert group_units(trace) == [["a"], ["b"], ["late"]]


def test_a_unit_called_twice_in_a_row_is_weighed_twice() -> None:
    """The cost of a unit is that of all its calls."""
    trace = trace_of([("a", [], 10), ("b", [0], 10), ("b", [1], 10), ("b", [2], 10), ("c", [3], 10), ("d", [4], 10)])
    assert stages(trace, (0, 1)) == [0, 0, 1, 1]


def test_uncalled_units_live_with_their_neighbour() -> None:
    """A head that the first batch does not call stands after the trunk that it will read."""
    trace = chain(10, 10)
    placement = place_units(trace, units_of(trace, "extra"), (0, 1))
    assert placement.unit_stage == {"u0": 0, "u1": 1, "extra": 1}


def test_parameters_stand_for_cost_where_no_operator_counts() -> None:
    """Units without counted operators are weighed by their parameters."""
    trace = chain(0, 0, 0)
    units = {"u0": nn.Linear(1, 1), "u1": nn.Linear(1, 1), "u2": nn.Linear(50, 50)}
    assert place_units(trace, units, (0, 1)).unit_stage == {"u0": 0, "u1": 0, "u2": 1}


def test_ranks_of_a_v_get_equal_shares_where_stages_cannot() -> None:
    """Twelve equal layers on a V of four ranks and eight stages are three for each rank, whatever costs nothing."""
    v = (0, 1, 2, 3, 3, 2, 1, 0)
    trace = chain(0, *[10] * 12, 0)
    placed = place_units(trace, units_of(trace), v).unit_stage
    load = [0] * 4
    for unit, stage in placed.items():
        load[v[stage]] += unit not in ("u0", "u13")
    assert load == [3, 3, 3, 3]
    assert set(placed.values()) == set(range(8))


def test_a_unit_worth_more_than_two_stages_is_found() -> None:
    """It must stand alone, draw no random numbers, and not be one that is kept whole."""
    heavy = chain(10, 100, 10, 10)
    assert find_oversized(heavy, 4, ()) == "u1"
    assert find_oversized(heavy, 4, {"u1"}) is None
    assert find_oversized(chain(10, 20, 10, 10), 4, ()) is None
    assert find_oversized(heavy, 1, ()) is None
    drawing = Trace(tuple(replace(call, draws=frozenset({"torch"})) for call in heavy.calls), frozenset(), frozenset())
    assert find_oversized(drawing, 4, ()) is None
    mutual = trace_of([("a", [], 10), ("b", [0], 100), ("a", [1], 10), ("c", [2], 10)])
    assert find_oversized(mutual, 4, ()) is None


class Trunk(nn.Module):
    """Six layers behind one call."""

    def __init__(self) -> None:
        super().__init__()
        self.inside = nn.ModuleList(nn.Linear(4, 4) for _ in range(6))
        self.gate = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inside:
            x = x + layer(x) * self.gate
        return x


class OneLarge(nn.Module):
    """A large module in a list of small ones."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4), Trunk()])
        self.spare = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.sum()


@pytest.mark.parametrize(("ranks", "parts"), [((0,), 0), ((0, 1, 1, 0), 6)])
def test_a_unit_much_larger_than_the_rest_is_split(ranks: tuple[int, ...], parts: int) -> None:
    """Where stages would wait for it, its parts are placed apart; with one stage, or where the user names it, not."""
    root = OneLarge()
    piece = Microbatch(0, 2, (torch.ones(2, 4),))
    planner = Planner(root)
    planner.place(lambda p: root(*p.args), piece, ranks)
    assert sum(name.startswith("layers.3.inside") for name in planner.units) == parts
    named = Planner(root, unit_patterns=["layers.*"])
    named.place(lambda p: root(*p.args), piece, ranks)
    assert list(named.units) == ["layers.0", "layers.1", "layers.2", "layers.3", "spare"]
