"""Copies of parts of a module: averages of weights, target networks, teachers.

A hook that updates a copy reads the original: ``for e, p in zip(ema.parameters(), net.parameters()): e.lerp_(p, 0.1)``.
It can do so on every rank alike if both live on one, so units of a copy go where those of the original are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from d9d_lightning.partition.units import parameter_owners, split_unit

__all__ = ["find_copies", "mirror_units", "originals_of_units"]


@dataclass(frozen=True)
class _Looks:
    """Names of a module's parameters in the root, and what tells it from others: their geometry, and their values."""

    names: tuple[str, ...]
    geometry: tuple[tuple[str, torch.Size, torch.dtype], ...]
    values: tuple[float, ...] | None


def find_copies(root: nn.Module, used: Collection[str]) -> dict[str, str]:
    """Names of parameters of copies, and of those they are copies of.

    A copy has the names, shapes and values of another submodule. One that has other values by now (after a checkpoint
    was loaded) is told by being frozen or unused, where only one other submodule has its names and shapes.

    Args:
        root: The user's module.
        used: Names of parameters that the step uses.
    """
    sums: dict[int, tuple[float, bool]] = {}
    first = {id(parameter): name for name, parameter in root.named_parameters()}
    looks = {
        name: _look(module, first, sums)
        for name, module in root.named_modules()
        if name and any(True for _ in module.parameters())
    }
    alike: dict[tuple[tuple[str, torch.Size, torch.dtype], ...], list[str]] = {}
    for name, look in looks.items():
        alike.setdefault(look.geometry, []).append(name)
    copies: dict[str, str] = {}
    originals: set[str] = set()
    for name, look in looks.items():
        if any(parameter in copies or parameter in originals for parameter in look.names):
            continue
        others = [o for o in alike[look.geometry] if o != name and not _are_layers_of_one_list(root, name, o)]
        others = [other for other in others if not {*looks[other].names} & {*look.names, *copies}]
        original = _original(root, name, others, looks, used)
        if original is not None:
            copies.update(zip(look.names, looks[original].names, strict=True))
            originals.update(looks[original].names)
    return copies


def _look(module: nn.Module, first: Mapping[int, str], sums: dict[int, tuple[float, bool]]) -> _Looks:
    named = list(module.named_parameters())
    names = tuple(first[id(parameter)] for _, parameter in named)
    geometry = tuple((name, parameter.shape, parameter.dtype) for name, parameter in named)
    if any(parameter.is_meta for _, parameter in named):
        return _Looks(names, geometry, None)
    known = [_sum(parameter, sums) for _, parameter in named]
    # fresh norms and zero biases are all alike without being copies
    values = tuple(total for total, _ in known) if any(varied for _, varied in known) else None
    return _Looks(names, geometry, values)


def _sum(parameter: Tensor, sums: dict[int, tuple[float, bool]]) -> tuple[float, bool]:
    if id(parameter) not in sums:
        flat = torch.view_as_real(parameter.detach()) if parameter.is_complex() else parameter.detach()
        varied = bool(flat.numel()) and bool(flat.min() != flat.max())
        sums[id(parameter)] = float(flat.double().sum()), varied
    return sums[id(parameter)]


def _are_layers_of_one_list(root: nn.Module, one: str, other: str) -> bool:
    """Whether two modules lie in two layers of one list, or one in the other: those are alike without being copies."""
    ones, others = one.split("."), other.split(".")
    common = next((i for i, (a, b) in enumerate(zip(ones, others, strict=False)) if a != b), None)
    if common is None:
        return True
    return isinstance(root.get_submodule(".".join(ones[:common])), nn.ModuleList | nn.Sequential)


def _original(
    root: nn.Module, name: str, others: list[str], looks: Mapping[str, _Looks], used: Collection[str]
) -> str | None:
    def is_used(module: str) -> bool:
        return all(parameter in used for parameter in looks[module].names)

    def is_trained(module: str) -> bool:
        return any(parameter.requires_grad for parameter in root.get_submodule(module).parameters())

    # an average that validates is used by a step that does not use what is trained
    candidates = [other for other in others if is_used(other) and (is_trained(other) or is_trained(name))]
    if is_used(name) and is_trained(name):
        order = list(looks)
        candidates = [other for other in candidates if order.index(other) < order.index(name)]
    equal = [o for o in candidates if looks[o].values is not None and looks[o].values == looks[name].values]
    if equal:
        return equal[0]
    set_apart = not is_trained(name) or not is_used(name)
    return candidates[0] if set_apart and len(candidates) == 1 else None


def mirror_units(
    root: nn.Module, units: dict[str, nn.Module], copies: Mapping[str, str], called: Collection[str]
) -> dict[str, nn.Module]:
    """The units, with those of unused copies split as far as their originals are."""
    for _ in range(8):
        originals = originals_of_units(root, units, copies)
        coarse = [unit for unit, found in originals.items() if unit not in called and len(found) > 1]
        finer = units
        for unit in coarse:
            finer = split_unit(finer, unit) or finer
        if finer is units:
            break
        units = finer
    return units


def originals_of_units(
    root: nn.Module, units: dict[str, nn.Module], copies: Mapping[str, str]
) -> dict[str, frozenset[str]]:
    """For each unit of a copy, the units that hold what it is a copy of."""
    owners = parameter_owners(root, units)
    found: dict[str, set[str]] = {}
    for copy, original in _known_on_both_sides(copies, owners):
        found.setdefault(copy, set()).add(original)
    return {unit: frozenset(originals) for unit, originals in found.items()}


def _known_on_both_sides(copies: Mapping[str, str], owners: Mapping[str, str | None]) -> Iterator[tuple[str, str]]:
    for copy, original in copies.items():
        ours, theirs = owners.get(copy), owners.get(original)
        if ours is not None and theirs is not None and ours != theirs:
            yield ours, theirs
