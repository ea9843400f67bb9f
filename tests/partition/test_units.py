"""Which submodules become units."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.units import (
    canonical_units,
    parameter_count,
    parameter_owners,
    split_largest,
    split_unit,
)


def layer(width: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.layers = nn.ModuleList(layer() for _ in range(4))
        self.norm = nn.LayerNorm(4)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.head = nn.Linear(4, 2)
        self.activation = nn.ReLU()
        self.scale = nn.Parameter(torch.ones(()))


def test_the_walk_stops_at_the_layers_of_the_long_list() -> None:
    """The container of the layer list is entered, its layers and what stands beside them are units."""
    layers = [f"net.layers.{index}" for index in range(4)]
    assert list(canonical_units(Root())) == ["net.embed", *layers, "net.norm", "head"]


def test_a_sequential_of_plain_layers_is_entered() -> None:
    """The parameter-holding members of one Sequential are units of their own."""
    root = nn.Module()
    root.net = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    assert list(canonical_units(root)) == ["net.0", "net.1", "net.2"]


def test_patterns_override_the_walk() -> None:
    """Named modules are units whatever the walk would choose, and nothing inside them is."""
    units = canonical_units(Root(), ["net.layers.*", "net"][1:])
    assert list(units) == ["net", "head"]
    assert list(canonical_units(Root(), ["net.layers.*.0"]))[1:3] == ["net.layers.0.0", "net.layers.0.2"]


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    """The error shows the pattern and names that would do."""
    with pytest.raises(PartitionError, match=r"'net\.blocks\.\*' matches no submodule with parameters.*'net'"):
        canonical_units(Root(), ["net.blocks.*"])


def test_a_module_under_two_names_is_one_unit() -> None:
    """The first name counts."""
    root = Root()
    root.again = root.head
    assert "again" not in canonical_units(root) and "head" in canonical_units(root)


def test_units_depend_on_the_module_alone() -> None:
    """Two walks over equal modules give the same names: random numbers hang on them."""
    assert list(canonical_units(Root())) == list(canonical_units(Root()))


@pytest.mark.parametrize(
    "whole",
    [
        nn.MultiheadAttention(4, 2),
        nn.LSTM(4, 4, num_layers=2),
        nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)),
    ],
)
def test_modules_whose_parts_are_not_called_stay_whole(whole: nn.Module) -> None:
    """Fused, recurrent and parametrized modules have no parts that a stage could run alone."""
    assert split_unit({"whole": whole}, "whole") is None


def test_a_module_with_a_backward_hook_stays_whole() -> None:
    """A hook on a module's gradients needs the graph from its outputs to its inputs in one piece."""
    net = layer()
    assert split_unit({"net": net}, "net") is not None
    net.register_full_backward_hook(lambda module, given, received: None)
    assert split_unit({"net": net}, "net") is None


def test_the_largest_called_unit_is_split_first() -> None:
    """Splitting replaces the unit by its parts, in place, and leaves uncalled units alone."""
    units = {"small": nn.Linear(2, 2), "large": layer(8), "uncalled": layer(16)}
    result = split_largest(units, ["small", "large"])
    assert result is not None
    assert (list(result[0]), result[1]) == (["small", "large.0", "large.2", "uncalled"], "large")
    assert split_largest({"small": nn.Linear(2, 2)}, ["small"]) is None


def test_every_parameter_has_an_owner_or_none() -> None:
    """Parameters belong to the unit that holds them first; those outside every unit to nobody."""
    root = Root()
    owners = parameter_owners(root, canonical_units(root))
    assert owners["scale"] is None
    assert owners["net.layers.2.0.bias"] == "net.layers.2"
    root.head.weight = root.net.layers[0][0].weight
    assert parameter_owners(root, canonical_units(root))["net.layers.0.0.weight"] == "net.layers.0"


def test_a_shared_parameter_counts_once() -> None:
    """The weight of a module is that of its distinct parameters."""
    pair = nn.ModuleList([nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)])
    assert parameter_count(pair) == 32
    pair[1].weight = pair[0].weight
    assert parameter_count(pair) == 16
