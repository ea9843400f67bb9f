"""Copies of parts of a module: averages of weights, target networks, teachers.

A hook that updates a copy reads the original: ``for e, p in zip(ema.parameters(), net.parameters()): e.lerp_(p, 0.1)``.
It can do so on every rank alike if both live on one, so units of a copy go where those of the original are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from d9d_lightning.partition.units import parameter_owners, split_unit

__all__ = ["find_copies", "mirror_units", "originals_of_units"]


@dataclass(frozen=True)
class _Look:
    """A submodule that has parameters.

    Attributes:
        module: It.
        names: Names of its parameters in the root.
        kind: Equal for those whose parameters have the same shapes and types under the same names below them.
        position: How many such submodules come before it.
    """

    module: nn.Module
    names: tuple[str, ...]
    kind: int
    position: int

    @property
    def is_trained(self) -> bool:
        """Whether some parameter takes gradients."""
        return any(parameter.requires_grad for parameter in self.module.parameters())

    def is_used(self, used: Collection[str]) -> bool:
        """Whether the step uses all of it."""
        return all(name in used for name in self.names)


def find_copies(root: nn.Module, used: Collection[str]) -> dict[str, str]:
    """Names of parameters of copies, and of those they are copies of.

    A copy has the names, shapes and values of another submodule. One that has other values by now (after a checkpoint
    was loaded) is told by being frozen or unused, where only one other submodule has its names and shapes.

    Args:
        root: The user's module.
        used: Names of parameters that the step uses.
    """
    looks = _look_at_submodules(root)
    relatives = _Relatives(root, looks)
    copies: dict[str, str] = {}
    originals: set[str] = set()
    for name, look in looks.items():
        if any(parameter in copies or parameter in originals for parameter in look.names):
            continue
        own = set(look.names)
        others = [o for o in relatives.of(name) if own.isdisjoint(o.names) and copies.keys().isdisjoint(o.names)]
        original = _original(look, others, used)
        if original is not None:
            copies.update(zip(look.names, original.names, strict=True))
            originals.update(original.names)
    return copies


def _look_at_submodules(root: nn.Module) -> dict[str, _Look]:
    first = {id(parameter): name for name, parameter in root.named_parameters()}
    looks: dict[str, _Look] = {}
    kinds: dict[Any, int] = {}
    for name, module in root.named_modules():
        named = list(module.named_parameters()) if name else []
        if named:
            names = tuple(first[id(parameter)] for _, parameter in named)
            geometry = tuple((leaf, parameter.shape, parameter.dtype) for leaf, parameter in named)
            looks[name] = _Look(module, names, kinds.setdefault(geometry, len(kinds)), len(looks))
    return looks


class _Relatives:
    """Finds submodules of one kind, for each by where its path leaves that of another.

    Those in two layers of one list, or one in the other, are alike without being copies. A large net has thousands of
    them, so they are not even looked at.
    """

    def __init__(self, root: nn.Module, looks: Mapping[str, _Look]) -> None:
        self._root = root
        self._looks = looks
        self._below: dict[tuple[int, tuple[str, ...]], dict[str, list[_Look]]] = {}
        for name, look in looks.items():
            path = name.split(".")
            for depth, part in enumerate(path):
                branches = self._below.setdefault((look.kind, tuple(path[:depth])), {})
                branches.setdefault(part, []).append(look)

    def of(self, name: str) -> list[_Look]:
        """Submodules that look like this one, in the order of the module."""
        path, kind = name.split("."), self._looks[name].kind
        found: list[_Look] = []
        for depth, own in enumerate(path):
            branches = self._below[kind, tuple(path[:depth])]
            if len(branches) > 1 and not self._is_list(path[:depth]):
                found += [look for part, looks in branches.items() if part != own for look in looks]
        return sorted(found, key=lambda look: look.position)

    def _is_list(self, path: Sequence[str]) -> bool:
        return isinstance(self._root.get_submodule(".".join(path)), nn.ModuleList | nn.Sequential)


def _original(look: _Look, others: Sequence[_Look], used: Collection[str]) -> _Look | None:
    if not others:
        return None
    is_trained, is_used = look.is_trained, look.is_used(used)
    # an average that validates is used by a step that does not use what is trained
    candidates = [other for other in others if other.is_used(used) and (is_trained or other.is_trained)]
    if is_used and is_trained:
        candidates = [other for other in candidates if other.position < look.position]
    equal = next((other for other in candidates if _have_equal_values(other.module, look.module)), None)
    if equal is not None:
        return equal
    set_apart = not is_trained or not is_used
    return candidates[0] if set_apart and len(candidates) == 1 else None


def _have_equal_values(one: nn.Module, other: nn.Module) -> bool:
    """Whether the values are equal and say something: fresh norms, zero biases are all alike without being copies."""
    pairs = list(zip(one.parameters(), other.parameters(), strict=True))
    if any(a.is_meta or a.device != b.device for a, b in pairs):
        return False
    return all(torch.equal(a, b) for a, b in pairs) and any(map(_is_varied, one.parameters()))


def _is_varied(parameter: Tensor) -> bool:
    flat = parameter.detach().reshape(-1)
    return bool(flat.numel()) and bool((flat != flat[0]).any())


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
