"""Routing the calls of units to whoever replays, traces or runs the step in lockstep.

A unit is called as ``unit(x)``, as ``unit.forward(x)`` or, once compiled, through ``_compiled_call_impl``; all three
are caught by attributes on the instance, present only while :meth:`Interceptor.installed` is active, so that a module
can be copied and pickled at any other time.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from torch import nn

from d9d_lightning.partition.data_writes import data_writes_routed
from d9d_lightning.partition.differentiation import Output, differentiation_routed
from d9d_lightning.partition.regions import regions_routed

__all__ = ["CallPolicy", "Interceptor"]


class CallPolicy(Protocol):
    """Decides what a call of a unit does."""

    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer one call; ``original`` runs the unit itself."""

    def sink(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer one call of a method that only takes values out of the step: ``log``, a metric's ``update``."""

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        """Whether gradients of these are the policy's affair; if not, they are computed as if it were not there."""


class Interceptor:
    """Catches calls of units while a policy is active.

    Args:
        units: Units by qualified name.
        sinks: ``(object, method name)`` of methods that only take values out of the step.
    """

    def __init__(self, units: Mapping[str, nn.Module], sinks: Sequence[tuple[Any, str]] = ()) -> None:
        self.units = dict(units)
        self.sinks = tuple(sinks)
        self._policy: CallPolicy | None = None
        self._is_outside = False

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        """Patch the units. Without an active policy a call does what it always did."""
        saved: list[tuple[Any, str, Any]] = []
        try:
            for name, module in self.units.items():
                for attribute in ("_call_impl", "_compiled_call_impl", "forward"):
                    self._patch(name, module, attribute, saved)
            for target, attribute in self.sinks:
                self._patch_sink(target, attribute, saved)
            with (
                regions_routed(lambda: self._policy),
                differentiation_routed(lambda: self._policy),
                data_writes_routed(lambda: self._policy is not None, lambda: not self._is_outside),
            ):
                yield
        finally:
            for target, attribute, old in reversed(saved):
                if old is _ABSENT:
                    target.__dict__.pop(attribute, None)
                else:
                    target.__dict__[attribute] = old

    def _patch(self, name: str, module: nn.Module, attribute: str, saved: list[tuple[Any, str, Any]]) -> None:
        if attribute == "_compiled_call_impl" and module.__dict__.get(attribute) is None:
            return
        if attribute == "forward" and hasattr(module, "_c"):  # scripted code resolves forward by itself
            return
        original = getattr(module, attribute)
        saved.append((module, attribute, module.__dict__.get(attribute, _ABSENT)))

        def route(*args: Any, **kwargs: Any) -> Any:
            policy = self._policy
            if policy is None:
                return original(*args, **kwargs)
            return policy.call(name, module, original, args, kwargs)

        module.__dict__[attribute] = route

    def _patch_sink(self, target: Any, attribute: str, saved: list[tuple[Any, str, Any]]) -> None:
        original = getattr(target, attribute)
        saved.append((target, attribute, target.__dict__.get(attribute, _ABSENT)))

        def route(*args: Any, **kwargs: Any) -> Any:
            policy = self._policy
            if policy is None:
                return original(*args, **kwargs)
            return policy.sink(original, args, kwargs)

        target.__dict__[attribute] = route

    @contextlib.contextmanager
    def policy(self, policy: CallPolicy) -> Iterator[None]:
        """Route calls to ``policy`` within the block."""
        before = self._policy
        self._policy = policy
        try:
            yield
        finally:
            self._policy = before

    @contextlib.contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """The code in the block belongs to no step."""
        before, self._is_outside = self._is_outside, True
        try:
            yield
        finally:
            self._is_outside = before

    def run_inside(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit itself; calls of units nested in it are not routed."""
        policy = self._policy
        self._policy = None
        try:
            return original(*args, **kwargs)
        finally:
            self._policy = policy


_ABSENT = object()
