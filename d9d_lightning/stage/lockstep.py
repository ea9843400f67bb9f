"""Every rank runs the whole step; each unit runs on its owner, and what it makes visible goes to all.

Slower than a pipeline, and never wrong: for steps that read activations (``generate()``, sampling loops) and for traces
that need real values of a module that no process holds whole.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch
from torch import nn

from d9d_lightning.errors import PartitionError, RankFailedError
from d9d_lightning.partition.differentiation import Output, leaves_behind
from d9d_lightning.partition.effects import HookRecorder, Observation
from d9d_lightning.partition.interception import Interceptor
from d9d_lightning.partition.trace import ObservedCall
from d9d_lightning.values import Placement

__all__ = ["LockstepExchange", "LockstepPolicy", "Share"]


_STAND_IN = "_is_made_by_another_rank"
"""Attribute of the leaf behind what another rank's unit returned."""


class Share(Protocol):
    """Gives the value of one pipeline rank to all."""

    def __call__(self, value: Any, source: int) -> Any:
        """Collective over the pipeline."""


class LockstepExchange:
    """Runs a unit on its owner and shares what it did.

    Args:
        placement: Stage of every unit.
        stage_to_rank: Pipeline rank of every stage.
        rank: This pipeline rank.
        share: Gives the value of one rank to all.
    """

    def __init__(self, placement: Placement, stage_to_rank: tuple[int, ...], rank: int, share: Share) -> None:
        self._placement = placement
        self._stage_to_rank = stage_to_rank
        self._rank = rank
        self._share = share

    def __call__(self, unit: str, run: Callable[[], ObservedCall]) -> tuple[ObservedCall, bool]:
        """The observed call, and whether it ran here.

        An exception of the owner is raised on every rank.
        """
        if unit not in self._placement.unit_stage:
            raise PartitionError(
                f"the step calls {unit}, which the step that the placement was made from did not. Expected: the same "
                "differentiation in training; or this part inside one unit, which you name with units=[...] in "
                "D9DStrategy."
            )
        owner = self._stage_to_rank[self._placement.stage_of(unit)]
        if owner != self._rank:
            message = self._share(None, owner)
            if isinstance(message, Exception):
                raise message
            return _attach(message), False
        try:
            observed = run()
        except Exception as error:
            self._share(_portable(error, unit, owner), owner)
            raise
        self._share(_detach(observed), owner)
        return observed, True


def _detach(observed: ObservedCall) -> tuple[ObservedCall, list[bool]]:
    tensors = [tensor.detach().cpu() for tensor in observed.tensors]
    grads = [tensor.requires_grad for tensor in observed.tensors]
    return replace(observed, tensors=tensors), grads


def _attach(message: tuple[ObservedCall, list[bool]]) -> ObservedCall:
    observed, grads = message
    for index, wanted in enumerate(grads):
        if wanted and torch.is_grad_enabled():
            leaf = observed.tensors[index].requires_grad_()
            setattr(leaf, _STAND_IN, True)
            observed.tensors[index] = leaf.clone()  # no leaf, so glue may change it in place
    return observed


def _portable(error: Exception, unit: str, owner: int) -> RankFailedError:
    text = "".join(traceback.format_exception(error))
    return RankFailedError(
        f"pipeline rank {owner} failed first in unit {unit}: {type(error).__name__}: {error}\n{text.rstrip()}"
    )


class LockstepPolicy:
    """Routes calls of an evaluation step that cannot be pipelined.

    Args:
        interceptor: Catches the calls.
        exchange: Runs units on their owners.
        is_loss_owner: Whether this rank's logs count.
    """

    def __init__(self, interceptor: Interceptor, exchange: LockstepExchange, is_loss_owner: bool) -> None:
        self._interceptor = interceptor
        self._exchange = exchange
        self._is_loss_owner = is_loss_owner

    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        result: list[Any] = []

        def run() -> ObservedCall:
            watch = Observation(module, (args, kwargs), lambda tensor: 0 if tensor.is_inference() else tensor._version)
            with HookRecorder(module) as hooks:
                result.append(self._interceptor.run_inside(original, args, kwargs))
            effects, tensors = watch.finish(result[0], hooks)
            return ObservedCall(effects, tensors, frozenset(), 0)

        observed, here = self._exchange(unit, run)
        if here:
            return result[0]
        return observed.effects.apply(module, (args, kwargs), observed.tensors.__getitem__, [])

    def sink(self, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return original(*args, **kwargs)

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        """Whether their graph touches a unit, of this rank or another; a callback may train a model of its own."""
        own = {id(parameter) for unit in self._interceptor.units.values() for parameter in unit.parameters()}
        return any(id(leaf) in own or hasattr(leaf, _STAND_IN) for leaf in leaves_behind(outputs))
