"""What crosses each boundary."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.plan import make_plan, parameter_stages
from d9d_lightning.partition.trace import TraceDepth, trace_step
from d9d_lightning.partition.units import canonical_units
from d9d_lightning.values import Placement, Plan, Trace, ValueId

Step = Callable[[nn.Module, Tensor], Any]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.unused = nn.Parameter(torch.ones(4))


def trace(root: nn.Module, step: Step, depth: TraceDepth = TraceDepth.SHAPES) -> Trace:
    interceptor = Interceptor(canonical_units(root))
    return trace_step(root, interceptor, lambda x: step(root, x), (torch.ones(2, 4),), {}, depth=depth)


def place(*stage_of: int) -> Placement:
    return Placement(max(stage_of) + 1, {f"layers.{index}": stage for index, stage in enumerate(stage_of)})


def plan(step: Step, *stage_of: int) -> Plan:
    root = Net()
    return make_plan(root, canonical_units(root), trace(root, step), place(*stage_of))


def straight(root: Any, x: Tensor) -> Tensor:
    for layer in root.layers:
        x = layer(x)
    return x.sum()


def residual(root: Any, x: Tensor) -> Tensor:
    for layer in root.layers:
        x = x + layer(x)
    return x.sum()


def test_a_chain_sends_one_value_over_each_border() -> None:
    """What a stage makes goes to the next one and no further."""
    borders = plan(straight, 0, 1, 2, 3).boundaries
    assert [border.receives for border in borders] == [(), (ValueId(0, 0),), (ValueId(1, 0),), (ValueId(2, 0),)]
    assert [border.sends for border in borders] == [(ValueId(0, 0),), (ValueId(1, 0),), (ValueId(2, 0),), ()]


def test_values_that_skip_stages_are_relayed() -> None:
    """A value needed later crosses every border on its way, and a value needed nowhere crosses none."""

    def skip(root: Any, x: Tensor) -> Tensor:
        first = root.layers[0](x)
        second = root.layers[1](first)
        root.layers[2](second)  # its result is dropped
        return root.layers[3](second + first).sum()

    borders = plan(skip, 0, 1, 2, 3).boundaries
    assert [border.sends for border in borders] == [
        (ValueId(0, 0),),
        (ValueId(0, 0), ValueId(1, 0)),
        (ValueId(0, 0), ValueId(1, 0)),
        (),
    ]


def test_glue_of_several_values_needs_them_all() -> None:
    """With residual adds in glue each stage receives every earlier value."""
    assert plan(residual, 0, 1, 2, 3).boundaries[3].receives == (ValueId(0, 0), ValueId(1, 0), ValueId(2, 0))


def test_the_end_of_the_step_needs_what_it_reads() -> None:
    """Values that only the tail reads travel to the last stage."""

    def tail(root: Any, x: Tensor) -> Tensor:
        first = root.layers[0](x)
        return root.layers[3](root.layers[2](root.layers[1](x))).sum() + first.norm()

    made = plan(tail, 0, 1, 2, 3)
    assert ValueId(0, 0) in made.boundaries[3].receives and ValueId(0, 0) in made.trace.tail_needs


def test_a_value_that_would_flow_backward_is_refused() -> None:
    """The error names both units, their stages, and ``split_points``."""
    with pytest.raises(PartitionError, match=r"'layers.1' \(stage 0\) needs what 'layers.0' \(stage 1\).*split_points"):
        plan(straight, 1, 0, 1, 1)


def test_the_cut_comes_after_the_last_own_call() -> None:
    """Each stage knows its last call; a stage without units has none."""
    root = Net()
    made = make_plan(root, canonical_units(root), trace(root, straight), replace(place(0, 0, 2, 2), num_stages=3))
    assert made.last_calls == (1, -1, 3)


def test_parameters_live_with_their_units_and_their_readers() -> None:
    """Glue that reads a parameter on another stage shares it; unread ones live on the last stage."""

    def reads(root: Any, x: Tensor) -> Tensor:
        x = root.layers[1](root.layers[0](x) * root.scale)
        return root.layers[3](root.layers[2](x) @ root.layers[0].weight).sum()

    root = Net()
    homes = parameter_stages(root, canonical_units(root), trace(root, reads), place(0, 1, 2, 3))
    assert homes["layers.0.weight"] == (0, 3) and homes["layers.0.bias"] == (0,)
    assert homes["scale"] == (1,) and homes["unused"] == (3,)
    assert plan(reads, 0, 1, 2, 3).shared == {"layers.0.weight": (0, 3)}


def test_a_weight_held_by_two_units_is_shared() -> None:
    """Tied modules on different stages each hold the weight."""
    root = Net()
    root.layers[3].weight = root.layers[0].weight
    made = make_plan(root, canonical_units(root), trace(root, straight), place(0, 1, 2, 3))
    assert made.shared == {"layers.0.weight": (0, 3)}


def test_the_digest_tells_plans_apart() -> None:
    """Equal steps have equal digests, at either depth; another need, shape or placement has another."""
    root = Net()
    units, placement = canonical_units(root), place(0, 1, 2, 3)
    digest = make_plan(root, units, trace(root, straight), placement).digest
    assert make_plan(root, units, trace(root, straight, TraceDepth.VALUES), placement).digest == digest
    assert make_plan(root, units, trace(root, residual), placement).digest != digest
    assert make_plan(root, units, trace(root, straight), place(0, 0, 1, 2)).digest != digest


def test_both_depths_of_a_trace_agree() -> None:
    """Shapes alone find the same needs as real values do."""
    root = Net()
    for step in (straight, residual):
        shapes, values = (trace(root, step, depth) for depth in TraceDepth)
        assert shapes.tail_needs == values.tail_needs and shapes.tail_parameters == values.tail_parameters
        for one, other in zip(shapes.calls, values.calls, strict=True):
            assert (one.unit, one.needs, one.values, one.flops) == (other.unit, other.needs, other.values, other.flops)
