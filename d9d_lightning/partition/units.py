"""Choosing the submodules that are placed whole on one stage.

Canonical units are chosen from the module alone, never from the number of stages: random numbers hang on their names,
so pipeline size 1, 2 and 4 draw the same masks. Only when there are fewer units than stages is the largest one split.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Iterator, Sequence

from torch import nn
from torch.nn.parameter import UninitializedParameter

from d9d_lightning.errors import PartitionError

__all__ = ["canonical_units", "join_into_parent", "parameter_count", "parameter_owners", "split_largest", "split_unit"]

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
_ATOMIC = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)


def parameter_count(module: nn.Module) -> int:
    """Number of elements of a module's parameters, each counted once."""
    return sum(parameter.numel() for parameter in module.parameters())


def _children(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
    """Children that hold parameters, with their qualified names."""
    for child_name, child in module.named_children():
        if any(True for _ in child.parameters()):
            yield (f"{name}.{child_name}" if name else child_name), child


def _is_atomic(module: nn.Module) -> bool:
    # Parts of these are not called one by one: fused kernels, parametrized weights, scripted code. And a backward hook
    # needs the graph from the module's outputs to its inputs in one piece.
    script = type(module).__module__.startswith("torch.jit") or hasattr(module, "_c")
    hooked = bool(module._backward_hooks or module._backward_pre_hooks)
    return isinstance(module, _ATOMIC) or hasattr(module, "parametrizations") or script or hooked


def _holds_layer_list(module: nn.Module) -> bool:
    """Whether a list of at least two parameter-holding modules lies anywhere inside, with a fair share of it."""
    total = parameter_count(module)
    return any(
        isinstance(inner, _LISTS) and sum(1 for _ in _children(inner, "")) >= 2 and parameter_count(inner) >= total / 4
        for inner in module.modules()
    )


def canonical_units(root: nn.Module, patterns: Sequence[str] | None = None) -> dict[str, nn.Module]:
    """Canonical units by qualified name, in registration order, one entry per module object.

    Args:
        root: The user's module.
        patterns: Names or ``fnmatch`` patterns (``"net.blocks.*"``) that are units whatever the walk would choose.

    Raises:
        PartitionError: A pattern matches no submodule with parameters, or a parameter has no shape yet.
    """
    _check_initialized(root)
    total = parameter_count(root)
    forced = _match(root, patterns or ())
    units: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def add(name: str, module: nn.Module) -> None:
        if id(module) not in seen:
            seen.add(id(module))
            units[name] = module

    def walk(module: nn.Module, name: str, in_list: bool) -> None:
        for child_name, child in _children(module, name):
            inside = any(f.startswith(f"{child_name}.") for f in forced)
            small = parameter_count(child) <= total / 2
            if child_name in forced or (_is_atomic(child) and not inside):
                add(child_name, child)
            elif inside:
                walk(child, child_name, in_list)
            elif in_list and small:
                add(child_name, child)
            elif isinstance(child, _LISTS):
                walk(child, child_name, sum(1 for _ in _children(child, "")) >= 2)
            elif _holds_layer_list(child):
                walk(child, child_name, False)
            else:
                add(child_name, child)

    walk(root, "", False)
    return units


def _check_initialized(root: nn.Module) -> None:
    lazy = [name for name, parameter in root.named_parameters() if isinstance(parameter, UninitializedParameter)]
    if lazy:
        raise PartitionError(
            f"the parameters {lazy!r} have no shape yet (lazy layers take it from their first input), so they can be "
            "neither placed nor given to an optimizer. Expected: a module whose parameters exist at setup; run it on a "
            "sample in __init__ or configure_model, or give the sizes (nn.Linear instead of nn.LazyLinear)."
        )


def _match(root: nn.Module, patterns: Sequence[str]) -> frozenset[str]:
    names = [name for name, module in root.named_modules() if name and any(True for _ in module.parameters())]
    matched: set[str] = set()
    for pattern in patterns:
        hits = fnmatch.filter(names, pattern)
        # a pattern without a deeper level must not also name the inside of what it matches
        hits = [hit for hit in hits if hit.count(".") == pattern.count(".")]
        if not hits:
            raise PartitionError(
                f"units={list(patterns)!r}: {pattern!r} matches no submodule with parameters. "
                f"Expected a name or pattern such as {names[: min(4, len(names))]!r}."
            )
        matched.update(hits)
    return frozenset(matched)


def split_unit(units: dict[str, nn.Module], name: str) -> dict[str, nn.Module] | None:
    """The units with ``name`` replaced by its parts, or None where it has none that are called one by one."""
    module = units[name]
    if _is_atomic(module):
        return None
    parts: list[tuple[str, nn.Module]] = []
    todo = list(_children(module, name))
    while todo:
        part_name, part = todo.pop(0)
        if isinstance(part, _LISTS):
            todo = list(_children(part, part_name)) + todo
        else:
            parts.append((part_name, part))
    if not parts:
        return None
    taken = {id(unit) for unit_name, unit in units.items() if unit_name != name}
    result: dict[str, nn.Module] = {}
    for unit_name, unit in units.items():
        if unit_name != name:
            result[unit_name] = unit
            continue
        for part_name, part in parts:
            if id(part) not in taken:
                taken.add(id(part))
                result[part_name] = part
    return result


def join_into_parent(root: nn.Module, units: dict[str, nn.Module], name: str) -> dict[str, nn.Module] | None:
    """The units with all that lie beside ``name`` replaced by the called module around them; None at the root."""
    parent = name.rpartition(".")[0]
    while parent and isinstance(root.get_submodule(parent), nn.ModuleList | nn.ModuleDict):
        parent = parent.rpartition(".")[0]
    if not parent:
        return None
    result: dict[str, nn.Module] = {}
    for unit_name, unit in units.items():
        if unit_name.startswith(f"{parent}."):
            result[parent] = root.get_submodule(parent)
        else:
            result[unit_name] = unit
    return result


def split_largest(units: dict[str, nn.Module], called: Collection[str]) -> tuple[dict[str, nn.Module], str] | None:
    """Split the largest called unit that can be split; also returns its name. None where nothing can be."""
    for name in sorted(called, key=lambda unit: (-parameter_count(units[unit]), unit)):
        result = split_unit(units, name)
        if result is not None:
            return result, name
    return None


def parameter_owners(root: nn.Module, units: dict[str, nn.Module]) -> dict[str, str | None]:
    """Unit of each parameter (by its first qualified name); None for parameters outside every unit."""
    unit_of: dict[int, str] = {}
    for name, module in units.items():
        for parameter in module.parameters():
            unit_of.setdefault(id(parameter), name)
    return {name: unit_of.get(id(parameter)) for name, parameter in root.named_parameters()}
