"""The geometry of an operator's result, from the geometry of its arguments.

torch's FakeTensorMode does the work; what is kept is a small rule per signature, so that the second call costs a
dictionary look-up.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import _disable_current_modes

from d9d_lightning.partition.device_blind import is_device_blind

__all__ = [
    "DRAWS_BY_VALUE",
    "DataDependentError",
    "Geometry",
    "OutputRule",
    "Rule",
    "advance_generator",
    "cheap_random_numbers",
    "draws_random_numbers",
    "infer",
    "map_tensors",
    "tensors_of",
    "written_positions",
]


class DataDependentError(Exception):
    """The result's geometry depends on values (``internal`` is None), or torch cannot infer it."""

    def __init__(self, message: str, internal: BaseException | None = None) -> None:
        super().__init__(message)
        self.internal = internal


@dataclass(frozen=True, slots=True)
class Geometry:
    """Everything about a tensor but its content."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Geometry:
        """Geometry of a strided tensor; a sparse one counts as its dense shape."""
        if tensor.layout is not torch.strided:
            dense = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
            return cls(tuple(dense.shape), dense.stride(), 0, tensor.dtype, tensor.device)
        return cls(tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype, tensor.device)

    def empty(self, device: torch.device | str) -> torch.Tensor:
        """An uninitialised tensor of this geometry, with an offset of zero."""
        return torch.empty_strided(self.shape, self.stride, dtype=self.dtype, device=device)


@dataclass(frozen=True, slots=True)
class OutputRule:
    """How one output tensor comes about: it is an argument, a view of one, or new."""

    geometry: Geometry
    same_as: int | None = None
    view_of: int | None = None

    def on(self, device: torch.device) -> OutputRule:
        """The same on another device."""
        return dataclasses.replace(self, geometry=dataclasses.replace(self.geometry, device=device))


@dataclass(frozen=True, slots=True)
class Rule:
    """What an operator does for one signature.

    Attributes:
        outputs: Nested structure of OutputRule and constants.
        written: Positions, among the tensor arguments, of those changed in place.
        reshapes: Whether it changes the geometry of its argument in place (``squeeze_``).
    """

    outputs: Any
    written: tuple[int, ...]
    reshapes: bool = False

    def build(self, make: Callable[[OutputRule], Any]) -> Any:
        """The outputs, with ``make`` called for each tensor."""
        return _build(self.outputs, make)


def _build(node: Any, make: Callable[[OutputRule], Any]) -> Any:
    if isinstance(node, OutputRule):
        return make(node)
    if isinstance(node, list | tuple):
        return type(node)(_build(item, make) for item in node)
    return node


def tensors_of(arguments: Any) -> list[torch.Tensor]:
    """Tensors in the (args, kwargs) of an operator, in order; an operator nests lists at most."""
    found: list[torch.Tensor] = []
    _collect((arguments,), found)
    return found


def _collect(values: Iterable[Any], found: list[torch.Tensor]) -> None:
    for value in values:
        if type(value) is int:  # sizes are most of what is here
            continue
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, list | tuple):
            _collect(value, found)
        elif isinstance(value, dict):
            _collect(value.values(), found)


def map_tensors(value: Any, change: Callable[[torch.Tensor], Any]) -> Any:
    """The same nested arguments with each tensor replaced by ``change(tensor)``."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if type(value) in (list, tuple):
        return type(value)(map_tensors(item, change) for item in value)
    if type(value) is dict:
        return {key: map_tensors(item, change) for key, item in value.items()}
    return value


_RULES: dict[Any, Rule] = {}
_MODE = FakeTensorMode(allow_non_fake_inputs=True)
_MODE.cache_enabled = False  # it is asked once for a signature: what it would remember is never asked for again
_REAL_SHAPE_OPERATORS = {
    # Operators whose output shape depends on the values of these arguments only (positions in the schema).
    torch.ops.aten.index.Tensor: (1,),
    torch.ops.aten.index_put.default: (1,),
    torch.ops.aten.index_put_.default: (1,),
    torch.ops.aten.masked_select.default: (1,),
    torch.ops.aten.repeat_interleave.self_Tensor: (1,),
    torch.ops.aten._pack_padded_sequence.default: (1,),
    torch.ops.aten._pad_packed_sequence.default: (1,),
}


def _key(value: Any, placeholder: type) -> Any:
    if value is None or type(value) is int:  # most of all; other numbers can equal an integer and get their type
        return value
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided:
            return ("sparse", value.shape, value.dtype)
        return (value.shape, value.stride(), value.storage_offset(), value.dtype, value.device, value.is_conj())
    if isinstance(value, list | tuple):
        return tuple([_key(item, placeholder) for item in value])
    if isinstance(value, dict):
        return tuple([(name, _key(item, placeholder)) for name, item in value.items()])
    if isinstance(value, torch.Generator):
        return "generator"
    return (type(value), value)


def infer(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: type) -> Rule:
    """The rule of an operator for these arguments.

    Raises:
        DataDependentError: The shape depends on values that are not there, or torch cannot tell it.
    """
    try:
        key = (func, _key(args, placeholder), _key(kwargs, placeholder))
        rule = _RULES.get(key)
    except TypeError:  # an unhashable constant: work it out each time
        key, rule = None, None
    if rule is not None:
        return rule
    with _disable_current_modes(), torch.no_grad():
        try:
            blind = is_device_blind(func, tensors_of((args, kwargs)))
            rule = _infer_on_meta(func, args, kwargs) if blind else _infer_by_fake(func, args, kwargs)
        except (DataDependentOutputException, DynamicOutputShapeException):
            if not _depends_on_real_arguments(func, args, placeholder):
                raise DataDependentError(f"the geometry of what {func} gives depends on values") from None
            return _infer_by_running(func, args, kwargs, placeholder)
        except _UNSUPPORTED as error:
            rule = _infer_from_zeros(func, args, kwargs, placeholder, error)
    if key is not None:
        _RULES[key] = rule
    return rule


_UNSUPPORTED = (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError, AttributeError, AssertionError)


def _infer_from_zeros(func: Any, args: Any, kwargs: Any, placeholder: type, error: BaseException) -> Rule:
    # Some kernels have no shape rule, or a stricter one than the kernel itself: run it once on zeros.
    try:
        return _infer_by_running(func, args, kwargs, placeholder)
    except _UNSUPPORTED:
        raise DataDependentError(f"torch has no shape rule for {func}", error) from error


def _on_meta(geometry: Geometry) -> torch.Tensor:
    needed = geometry.offset + sum((n - 1) * s for n, s in zip(geometry.shape, geometry.stride, strict=True)) + 1
    base = torch.empty(needed, dtype=geometry.dtype, device="meta")
    return base.as_strided(geometry.shape, geometry.stride, geometry.offset)


def _infer_on_meta(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule:
    inputs: list[torch.Tensor] = []

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        inputs.append(_on_meta(Geometry.of(tensor)))
        return inputs[-1]

    device = tensors_of((args, kwargs))[0].device
    meta_args, meta_kwargs = map_tensors((args, kwargs), on_meta)
    rule = _make_rule(func, args, kwargs, inputs, func(*meta_args, **meta_kwargs))
    return dataclasses.replace(rule, outputs=rule.build(lambda output: output.on(device)))


def _infer_by_fake(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Rule:
    inputs: list[FakeTensor] = []

    def fake(tensor: torch.Tensor) -> FakeTensor:
        geometry = Geometry.of(tensor)
        inputs.append(FakeTensor(_MODE, _on_meta(geometry), geometry.device))
        return inputs[-1]

    fake_args, fake_kwargs = map_tensors((args, _without_generator(kwargs)), fake)
    before = [Geometry.of(tensor) for tensor in inputs]
    with _MODE:
        out = func(*fake_args, **fake_kwargs)
    if any(Geometry.of(tensor) != old for tensor, old in zip(inputs, before, strict=True)):
        return Rule(None, (), True)
    return _make_rule(func, args, kwargs, inputs, out)


def _without_generator(kwargs: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in kwargs.items() if not isinstance(value, torch.Generator)}


def _make_rule(func: Any, args: Any, kwargs: Any, inputs: list[Any], out: Any) -> Rule:
    storages = {tensor.untyped_storage()._cdata: index for index, tensor in reversed(list(enumerate(inputs)))}
    identities = {id(tensor): index for index, tensor in enumerate(inputs)}

    def rule_of(tensor: torch.Tensor) -> OutputRule:
        same = identities.get(id(tensor))
        view = storages.get(tensor.untyped_storage()._cdata) if tensor.layout is torch.strided else None
        return OutputRule(Geometry.of(tensor), same, view)

    return Rule(map_tensors(out, rule_of), written_positions(func, args, kwargs))


def written_positions(func: Any, args: Any, kwargs: Any) -> tuple[int, ...]:
    written: list[int] = []
    position = 0
    for index, argument in enumerate(func._schema.arguments):
        if index < len(args) and not argument.kwarg_only:
            value = args[index]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        count = len(tensors_of(value))
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.extend(range(position, position + count))
        position += count
    return tuple(written)


def _depends_on_real_arguments(func: Any, args: tuple[Any, ...], placeholder: type) -> bool:
    positions = _REAL_SHAPE_OPERATORS.get(func)
    if positions is None:
        return False
    return all(
        not isinstance(tensor, placeholder) for p in positions if p < len(args) for tensor in tensors_of(args[p])
    )


def _infer_by_running(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: type) -> Rule:
    # The shape follows from real values (a boolean mask of the batch, say), so run on zeros; never cached.
    inputs: list[torch.Tensor] = []

    def real(tensor: torch.Tensor) -> torch.Tensor:
        made = tensor
        if isinstance(tensor, placeholder):
            geometry = Geometry.of(tensor)
            made = geometry.empty(geometry.device).zero_()
        elif func._schema.is_mutable:
            made = tensor.clone()
        inputs.append(made)
        return made

    real_args, real_kwargs = map_tensors((args, kwargs), real)
    before = [Geometry.of(tensor) for tensor in inputs]
    out = func(*real_args, **real_kwargs)
    if any(Geometry.of(tensor) != old for tensor, old in zip(inputs, before, strict=True)):
        raise NotImplementedError(f"{func} changes the shape of its argument in place")
    return _make_rule(func, args, kwargs, inputs, out)


DRAWS_BY_VALUE = frozenset(
    [
        torch.ops.aten.poisson.default,
        torch.ops.aten.binomial.default,
        torch.ops.aten._standard_gamma.default,
        torch.ops.aten._sample_dirichlet.default,
        torch.ops.aten.rrelu_with_noise.default,
        torch.ops.aten.rrelu_with_noise_.default,
    ]
)
"""Operators that draw more or fewer random numbers depending on the values they are given."""

_CHEAP_RANDOM_NUMBERS = False


def draws_random_numbers(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether an operator advances a random generator; fused kernels with a dropout of zero do not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for index, argument in enumerate(func._schema.arguments):
        if argument.name in ("dropout_p", "dropout"):
            value = args[index] if index < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(value)
    return True


@contextlib.contextmanager
def cheap_random_numbers() -> Iterator[None]:
    """Within it, a random operator on placeholders advances the generator, but not by the right amount.

    A trace only asks whether something drew.
    """
    global _CHEAP_RANDOM_NUMBERS
    before = _CHEAP_RANDOM_NUMBERS
    _CHEAP_RANDOM_NUMBERS = True
    try:
        yield
    finally:
        _CHEAP_RANDOM_NUMBERS = before


def advance_generator(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], placeholder: type) -> None:
    """Draw what the operator would draw, so that later draws of real tensors are right."""
    with _disable_current_modes(), torch.no_grad():
        if _CHEAP_RANDOM_NUMBERS:
            torch.rand(1, generator=kwargs.get("generator"))
            return

        def real(tensor: torch.Tensor) -> torch.Tensor:
            if not isinstance(tensor, placeholder):
                return tensor.clone()  # a random operator may write into it
            geometry = Geometry.of(tensor)
            return geometry.empty(geometry.device).fill_(1)  # a weight, a probability and a deviation may be 1

        real_args, real_kwargs = map_tensors((args, kwargs), real)
        func(*real_args, **real_kwargs)
