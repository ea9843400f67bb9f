"""Activation checkpointing that is asked for from outside: chosen modules forget their activations and run again.

torch's ``apply_activation_checkpointing`` puts a wrapper module around each chosen one, which changes the module tree
and, with it, unit names. Here the ``forward`` of the chosen modules is replaced while a training batch runs, and the
module stays what it is. A second run leaves no trace: random numbers are those of the first run, and buffers (running
averages), attributes and generators are afterwards what they were before it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.generators import numpy_random
from d9d_lightning.partition.snapshot import ModuleSnapshot
from d9d_lightning.partition.structure import tensors_in

__all__ = ["Recomputation", "find_recomputed", "matching_modules"]


def matching_modules(root: nn.Module, policy: Any) -> list[str]:
    """Names of the modules that an activation-checkpointing policy chooses, in registration order.

    Args:
        root: The user's module, which is never chosen itself.
        policy: Module classes, or a policy as torch's FSDP takes it: an object such as ``ModuleWrapPolicy``, or a
            function of ``module``, ``recurse`` and ``nonwrapped_numel``.

    Raises:
        PartitionError: Classes are given, and the module has none of them.
    """
    if isinstance(policy, set | frozenset | list | tuple):
        classes = tuple(policy)
        found = [name for name, module in root.named_modules() if name and isinstance(module, classes)]
        if classes and not found:
            given = ", ".join(sorted(one.__name__ for one in classes))
            there = ", ".join(sorted({type(module).__name__ for name, module in root.named_modules() if name}))
            raise PartitionError(
                f"activation_checkpointing={{{given}}}: {type(root).__name__} has no such module. It has {there}. "
                "Expected: the classes of the layers that repeat, such as {TransformerEncoderLayer}."
            )
        return found
    if not hasattr(policy, "_run_policy"):
        return _ask_function(root, policy)
    chosen = {id(module) for module in policy._run_policy(root, set(), {})}
    return [name for name, module in root.named_modules() if name and id(module) in chosen]


def _ask_function(root: nn.Module, policy: Callable[..., bool]) -> list[str]:
    """Ask a function in the order in which FSDP asks: down first, then with the size of what no child took."""
    chosen: set[str] = set()

    def visit(name: str, module: nn.Module) -> int:
        total = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        taken = sum(visit(f"{name}.{key}" if name else key, child) for key, child in module.named_children())
        if name and policy(module=module, recurse=False, nonwrapped_numel=total - taken):
            chosen.add(name)
            return total
        return taken

    visit("", root)
    return [name for name, _ in root.named_modules() if name in chosen]


def find_recomputed(root: nn.Module, units: Mapping[str, nn.Module], chosen: Collection[str]) -> dict[str, nn.Module]:
    """The modules whose forward is run again, given those that a policy has chosen.

    A chosen module around several units is recomputed unit by unit, since its units may live on different stages. What
    lies inside a compiled module cannot be taken out of it; the compiled module is recomputed as a whole.

    Args:
        root: The user's module.
        units: Units by name.
        chosen: Names of modules.
    """
    found: dict[str, nn.Module] = {}
    for name in chosen:
        inner = [unit for unit in units if unit.startswith(f"{name}.")]
        if inner or any(name == unit or name.startswith(f"{unit}.") for unit in units):
            for one in inner or [name]:
                whole = _compiled_around(root, one)
                found[whole] = root.get_submodule(whole)
    return found


def _compiled_around(root: nn.Module, name: str) -> str:
    parts = name.split(".")
    for depth in range(1, len(parts)):
        outer = ".".join(parts[:depth])
        if _is_compiled(root.get_submodule(outer)):
            return outer
    return name


def _is_compiled(module: nn.Module) -> bool:
    return type(module).__name__ == "OptimizedModule" or module.__dict__.get("_compiled_call_impl") is not None


class Recomputation:
    """Lets modules run again in the backward pass instead of keeping their activations.

    Args:
        modules: The modules by name.
    """

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = dict(modules)

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Replace how the modules are called; put in place before whatever else catches their calls."""
        saved: list[tuple[dict[str, Any], str, Any]] = []
        try:
            for module in self._modules.values():
                attribute = _entry_of(module)
                original = getattr(module, attribute)
                table = module.__dict__
                saved.append((table, attribute, table.get(attribute, _ABSENT)))
                table[attribute] = _forgetful(module, original)
            yield
        finally:
            for table, attribute, old in reversed(saved):
                if old is _ABSENT:
                    table.pop(attribute, None)
                else:
                    table[attribute] = old


_ABSENT = object()


def _entry_of(module: nn.Module) -> str:
    if module.__dict__.get("_compiled_call_impl") is not None:
        return "_compiled_call_impl"
    return "_call_impl" if hasattr(module, "_c") else "forward"  # scripted code resolves forward by itself


def _forgetful(module: nn.Module, original: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return original(*args, **kwargs)
        run = _TwoRuns(module, original)
        return checkpoint(run, *args, use_reentrant=False, **kwargs)

    return call


class _TwoRuns:
    """The first run of a module, and any later one with the random numbers of the first."""

    def __init__(self, module: nn.Module, original: Callable[..., Any]) -> None:
        self._module = module
        self._original = original
        # torch's generators are remembered by checkpoint itself
        self._python: Any = None
        self._numpy: Any = None
        self._inputs: tuple[list[Any], dict[str, Any]] = ([], {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        source = numpy_random()
        if self._python is None:
            self._python = random.getstate()
            self._numpy = None if source is None else source.get_state()
            self._inputs = [_as_given(one) for one in args], {key: _as_given(one) for key, one in kwargs.items()}
            return self._original(*args, **kwargs)
        before = ModuleSnapshot(self._module)
        try:
            random.setstate(self._python)
            if source is not None:
                source.set_state(self._numpy)
            return self._original(*self._inputs_again(args), **self._keywords_again(kwargs))
        finally:
            before.restore()

    def _inputs_again(self, args: tuple[Any, ...]) -> list[Any]:
        """Tensors come from checkpoint, which notices if they were changed; all else is as it was."""
        kept = self._inputs[0]
        return [new if isinstance(new, Tensor) else _as_given(old) for new, old in zip(args, kept, strict=True)]

    def _keywords_again(self, kwargs: dict[str, Any]) -> dict[str, Any]:
        kept = self._inputs[1]
        return {key: new if isinstance(new, Tensor) else _as_given(kept[key]) for key, new in kwargs.items()}


def _as_given(value: Any) -> Any:
    """A copy of an argument that the module may fill, such as a cache of keys and values; tensors stay the same."""
    if value is None or isinstance(value, Tensor | nn.Module | bool | int | float | str):
        return value
    try:
        return copy.deepcopy(value, {id(tensor): tensor for tensor in tensors_in(value)})
    except Exception:  # objects may refuse to be copied in any way; such a one is given again as it is
        return value
