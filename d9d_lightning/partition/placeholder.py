"""A tensor of another stage: its geometry and where it came from, but no data.

Glue between units runs on every stage. Where it touches a value that the stage does not hold, it computes on
placeholders: every operator answers with the geometry its result would have. Reading a value is an error that names
the line that read, and the unit that made the value.

The geometry of an operator's result is worked out once per signature, by torch's own shape functions
(``FakeTensorMode``), and cached; FakeTensor itself is not used as the tensor type, because it has no origin, costs tens
of microseconds an operator, and leaves a real tensor unchanged when a fake one is written into it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NoReturn

import torch

from d9d_lightning.errors import PlaceholderReadError
from d9d_lightning.partition import shapes
from d9d_lightning.partition.user_code import describe_user_line

__all__ = [
    "Cell",
    "Placeholder",
    "ReplayCut",
    "cured_afterwards",
    "is_placeholder",
    "reads_end_the_replay",
    "told_of_lost_writes",
]


class Cell:
    """What tensors that share memory have in common.

    Attributes:
        sources: Where the content comes from; only a trace fills it.
        version: Number of in-place writes.
    """

    __slots__ = ("sources", "version")

    def __init__(self) -> None:
        self.sources: frozenset[Any] = frozenset()
        self.version = 0


class Placeholder(torch.Tensor):
    """A tensor without data.

    Attributes:
        origin: Qualified name of the unit (or parameter) that the content comes from.
        cell: Shared by all placeholders that would share memory.
    """

    origin: str
    cell: Cell

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(
        cls, geometry: shapes.Geometry, origin: str, cell: Cell | None = None, requires_grad: bool = False
    ) -> Placeholder:
        made: Placeholder = torch.Tensor._make_wrapper_subclass(
            cls,
            geometry.shape,
            strides=geometry.stride,
            storage_offset=geometry.offset,
            dtype=geometry.dtype,
            device=geometry.device,
            requires_grad=requires_grad,
        )
        made.origin = origin
        made.cell = Cell() if cell is None else cell
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def like(cls, tensor: torch.Tensor, origin: str, device: torch.device | None = None) -> Placeholder:
        """A placeholder of the same geometry as ``tensor``; on ``device`` where the tensor is on the meta device."""
        geometry = shapes.Geometry.of(tensor)
        if device is not None and tensor.is_meta:
            geometry = dataclasses.replace(geometry, device=device)
        return cls(geometry, origin)

    @classmethod
    def parameter(cls, tensor: torch.Tensor, origin: str, device: torch.device | None = None) -> Placeholder:
        """A placeholder like ``tensor`` that counts as a parameter, without the detour of making one of another."""
        made = cls.like(tensor, origin, device)
        made.requires_grad_(tensor.requires_grad)
        made._is_param = True
        return made

    @classmethod
    def non_leaf(cls, geometry: shapes.Geometry, origin: str) -> Placeholder:
        """A placeholder that requires grad and, unlike a leaf, may be changed in place."""
        with torch.enable_grad():
            made = cls(geometry, origin, None, True).clone()
        if made.stride() != geometry.stride:
            with torch.enable_grad():
                made = made.as_strided(geometry.shape, geometry.stride)
        return made  # type: ignore[return-value]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return _compute(func, args, kwargs or {})

    # Reads that do not pass through the dispatcher, or pass through it without a good message.
    def numpy(self, *, force: bool = False) -> NoReturn:
        _refuse_read(self, ".numpy()")

    def tolist(self) -> NoReturn:
        _refuse_read(self, ".tolist()")

    def __array__(self, dtype: Any = None, copy: Any = None) -> NoReturn:
        _refuse_read(self, "numpy.asarray()")

    def data_ptr(self) -> int:
        return 0

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype}, from={self.origin!r})"

    def __format__(self, format_spec: str) -> str:
        if format_spec and self.dim() == 0:
            _refuse_read(self, f"format(..., {format_spec!r})")
        return repr(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Placeholder:
        copied = Placeholder(shapes.Geometry.of(self), self.origin, None, self.requires_grad and self.is_leaf)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True
        memo[id(self)] = copied
        return copied

    def __reduce_ex__(self, protocol: Any) -> Any:
        geometry = shapes.Geometry.of(self)
        return _rebuild, (geometry, self.origin, self.requires_grad, isinstance(self, torch.nn.Parameter))


def _rebuild(geometry: shapes.Geometry, origin: str, requires_grad: bool, is_parameter: bool) -> Placeholder:
    made = Placeholder(geometry, origin, None, requires_grad)
    if is_parameter:
        made._is_param = True
    return made


def is_placeholder(value: object) -> bool:
    """Whether a value is a placeholder, or a real tensor that one was written into."""
    return isinstance(value, Placeholder | Poisoned)


class Poisoned(torch.Tensor):
    """A real tensor that a placeholder was written into: part of its content is unknown from then on.

    The class of the very tensor object is changed, so the user's variable is caught wherever it is used next.
    """

    origin: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _HARMLESS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        args, kwargs = shapes.map_tensors((args, kwargs or {}), _as_placeholder)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Poisoned(shape={tuple(self.shape)}, dtype={self.dtype}, from={self.origin!r})"


_HARMLESS = frozenset(
    getattr(torch.Tensor, name).__get__
    for name in [
        "shape",
        "dtype",
        "device",
        "requires_grad",
        "is_leaf",
        "ndim",
        "grad_fn",
        "layout",
        "grad",
        "_base",
        "_version",
    ]
) | frozenset(
    getattr(torch.Tensor, name)
    for name in [
        "size",
        "stride",
        "dim",
        "numel",
        "storage_offset",
        "untyped_storage",
        "is_inference",
        "is_conj",
        "element_size",
    ]
)


def _as_placeholder(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not Poisoned:
        return tensor
    with torch._C.DisableTorchFunctionSubclass():
        return Placeholder(shapes.Geometry.of(tensor), tensor.origin, None, False)


_POISONED_IN_TRACE: list[torch.Tensor] | None = None


def _poison(tensor: torch.Tensor, origin: str) -> None:
    for target in (tensor, tensor._base):
        if target is not None and type(target) is torch.Tensor:
            target.__class__ = Poisoned
            target.origin = origin  # type: ignore[attr-defined]
            if _POISONED_IN_TRACE is not None:
                _POISONED_IN_TRACE.append(target)


@contextlib.contextmanager
def cured_afterwards() -> Iterator[None]:
    """Real tensors that placeholders are written into within the block are ordinary tensors again after it.

    For traces, which work on copies: the content that was never written is the right content.
    """
    global _POISONED_IN_TRACE
    before = _POISONED_IN_TRACE
    poisoned: list[torch.Tensor] = []
    _POISONED_IN_TRACE = poisoned
    try:
        yield
    finally:
        _POISONED_IN_TRACE = before
        for tensor in poisoned:
            with torch._C.DisableTorchFunctionSubclass():
                tensor.__class__ = torch.Tensor
                del tensor.origin  # type: ignore[attr-defined]


_TOLD_OF_LOST_WRITES: Callable[[torch.Tensor, str], None] | None = None


@contextlib.contextmanager
def told_of_lost_writes(told: Callable[[torch.Tensor, str], None]) -> Iterator[None]:
    """Within it, ``told(target, origin)`` is called before a real tensor is poisoned; it may raise."""
    global _TOLD_OF_LOST_WRITES
    before = _TOLD_OF_LOST_WRITES
    _TOLD_OF_LOST_WRITES = told
    try:
        yield
    finally:
        _TOLD_OF_LOST_WRITES = before


class ReplayCut(BaseException):
    """Ends a replay that has nothing left to do; no ``except Exception`` of the step catches it."""


_CUT_ON_READ = False


@contextlib.contextmanager
def reads_end_the_replay() -> Iterator[None]:
    """Within it, reading a placeholder's value raises :class:`ReplayCut` instead of an error."""
    global _CUT_ON_READ
    before = _CUT_ON_READ
    _CUT_ON_READ = True
    try:
        yield
    finally:
        _CUT_ON_READ = before


def _refuse_read(tensor: Placeholder, what: str) -> NoReturn:
    if _CUT_ON_READ:
        raise ReplayCut
    raise PlaceholderReadError(
        f"{describe_user_line()} reads the value of a tensor ({what}) that was made by unit {tensor.origin!r} on "
        f"another stage, where only its shape {tuple(tensor.shape)} is known. "
        "Expected: between units, a step uses shapes and tensors, not values. Keep the line after the last unit (on "
        "the stage of the loss), move it into the unit's own forward, or name both sides as one unit with "
        "units=[...] in D9DStrategy. After fit, outside of any step or hook, use the module within "
        "`with trainer.strategy.whole_module():`."
    )


def _first_placeholder(tensors: Iterable[torch.Tensor]) -> Placeholder:
    for tensor in tensors:
        if isinstance(tensor, Placeholder):
            return tensor
    raise TypeError("an operator reached a placeholder without one among its arguments")


def _known_positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """Positions of a list operator at which all tensors are real."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, list | tuple)]
    if any(isinstance(value, Placeholder) for value in (*args, *kwargs.values())):
        return []
    return [index for index in range(len(args[0])) if not any(isinstance(some[index], Placeholder) for some in lists)]


def _compute_apart(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], known: Sequence[int]) -> Any:
    """An operator on lists treats each position by itself: it runs for the known ones."""
    unknown = [index for index in range(len(args[0])) if index not in set(known)]

    def run(positions: Sequence[int], call: Callable[[Any, Any], Any]) -> Any:
        def pick(value: Any) -> Any:
            return [value[index] for index in positions] if isinstance(value, list | tuple) else value

        return call(tuple(map(pick, args)), {key: pick(value) for key, value in kwargs.items()})

    results = run(known, lambda a, k: func(*a, **k)), run(unknown, lambda a, k: _compute(func, a, k))
    if results[0] is None:
        return None
    placed = dict(zip((*known, *unknown), (*results[0], *results[1]), strict=True))
    return [placed[index] for index in range(len(args[0]))]


def _compute(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result of one operator with at least one placeholder among its arguments."""
    if func.__name__.startswith("_foreach_"):
        known = _known_positions(args, kwargs)
        if known:
            return _compute_apart(func, args, kwargs, known)
    tensors = shapes.tensors_of((args, kwargs))
    first = _first_placeholder(tensors)
    if shapes.draws_random_numbers(func, args, kwargs):
        if func in shapes.DRAWS_BY_VALUE:
            _refuse_read(first, str(func))
        shapes.advance_generator(func, args, kwargs, Placeholder)
    try:
        rule = shapes.infer(func, args, kwargs, Placeholder)
    except shapes.DataDependentError as error:
        if error.internal is None:
            _refuse_read(first, str(func))
        if _CUT_ON_READ:
            raise ReplayCut from None
        raise PlaceholderReadError(
            f"{describe_user_line()} calls {func} on a tensor of unit {first.origin!r}, which lives on another stage, "
            f"and torch has no shape rule for it: {error.internal}"
        ) from error.internal
    if rule.reshapes:  # a change of geometry needs no data: let torch change that of the wrapper itself
        with torch._C._DisableTorchDispatch():
            func(*args, **kwargs)
        return first
    for index in rule.written:
        target = tensors[index]
        if isinstance(target, Placeholder):
            target.cell.version += 1
        else:
            if _TOLD_OF_LOST_WRITES is not None:
                _TOLD_OF_LOST_WRITES(target, first.origin)
            _poison(target, first.origin)

    def make(output: shapes.OutputRule) -> Any:
        if output.same_as is not None:
            return tensors[output.same_as]
        source = tensors[output.view_of] if output.view_of is not None else None
        cell = source.cell if isinstance(source, Placeholder) else None
        return Placeholder(output.geometry, first.origin, cell)

    return rule.build(make)
