"""Copies of parts of a module, and lists of tensors of which some are elsewhere."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from d9d_lightning.partition.copies import find_copies, mirror_units, originals_of_units
from d9d_lightning.partition.placeholder import Placeholder, told_of_lost_writes
from d9d_lightning.partition.units import canonical_units


class Twins(nn.Module):
    """A net, a copy of it, and a stack of layers that begin alike."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4), nn.LayerNorm(4))
        self.average = copy.deepcopy(self.net)
        self.stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 1, 4), 3)


def names_below(module: nn.Module, *prefixes: str) -> set[str]:
    return {name for name, _ in module.named_parameters() if name.startswith(prefixes)}


def test_copies_are_found_and_equal_layers_are_not() -> None:
    """A deep copy is found parameter by parameter; layers cloned into one list, and fresh norms, are not copies."""
    root = Twins()
    found = find_copies(root, names_below(root, "net.", "stack."))
    assert found == {f"average.{leaf}": f"net.{leaf}" for leaf, _ in root.net.named_parameters()}


def test_a_frozen_copy_is_found_after_its_values_have_moved() -> None:
    """A frozen copy with other values, as after loading a checkpoint, is told by names and shapes."""
    root = Twins()
    with torch.no_grad():
        root.average.requires_grad_(False)[0].weight.add_(1.0)
    assert find_copies(root, names_below(root, "net.", "average.", "stack."))["average.0.weight"] == "net.0.weight"


def test_a_copy_that_alone_is_used_stands_for_both() -> None:
    """Where the first step validates with a frozen average, what is trained lives with it."""
    root = Twins()
    root.average.requires_grad_(False)
    assert find_copies(root, names_below(root, "average.", "stack."))["net.0.weight"] == "average.0.weight"


def test_tied_weights_of_a_copy_have_one_name() -> None:
    """Where weights are tied, copy and original are named as the root names them."""
    root = Twins()
    root.net[2].weight = root.net[0].weight
    root.average = copy.deepcopy(root.net)
    named = {name for name, _ in root.named_parameters()}
    found = find_copies(root, names_below(root, "net.", "stack."))
    assert found.keys() | set(found.values()) <= named
    assert found["average.0.weight"] == "net.0.weight"


def test_units_of_an_unused_copy_are_as_fine_as_those_of_its_original() -> None:
    """A copy that is one unit is split where its original is several."""
    root = Twins()
    units = canonical_units(root, ["net.*", "average", "stack"])
    copies = find_copies(root, names_below(root, "net.", "stack."))
    finer = mirror_units(root, units, copies, {"net.0", "net.1", "net.2", "net.3", "stack"})
    originals = originals_of_units(root, finer, copies)
    assert originals == {f"average.{i}": frozenset({f"net.{i}"}) for i in range(4)}


def test_a_list_operator_runs_where_all_its_tensors_are_real() -> None:
    """Of a list with placeholders the real positions are computed, and the others stay placeholders."""
    real, elsewhere = torch.zeros(2), Placeholder.like(torch.zeros(2), "net.0")
    torch._foreach_lerp_([real, elsewhere], [torch.ones(2), elsewhere], 0.5)
    assert real.tolist() == [0.5, 0.5]
    results = torch._foreach_add([elsewhere, real], 1.0)
    assert isinstance(results[0], Placeholder)
    assert results[1].tolist() == [1.5, 1.5]


def test_a_write_that_would_be_lost_is_told() -> None:
    """Before a real tensor takes a placeholder's content, somebody who can refuse it hears of it."""

    def refuse(target: torch.Tensor, origin: str) -> None:
        raise LookupError(origin)

    with told_of_lost_writes(refuse), pytest.raises(LookupError, match=r"net\.0"):
        torch.zeros(2).copy_(Placeholder.like(torch.zeros(2), "net.0"))
