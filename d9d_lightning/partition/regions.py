"""Activation-checkpointed regions that glue opens around units.

torch runs a region a second time in the backward pass. By then the replay that ran it is over, so its unit calls have
to be answered as they were the first time: those of other stages by what was received, not by running them. And a
reentrant region computes without a graph, so nothing inside it could be sent to another stage with a gradient; it is
run as a region of the other kind, which gives the same gradients.

``torch.utils.checkpoint.checkpoint`` is often imported by name before it could be replaced; the two functions that it
looks up at each call are replaced instead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol, runtime_checkable

import torch
import torch.utils.checkpoint as torch_checkpoint

from d9d_lightning.partition.structure import tensors_in

__all__ = ["RegionPolicy", "regions_routed"]

_GENERATOR = "_checkpoint_without_reentrant_generator"
_REENTRANT = "CheckpointFunction"


@runtime_checkable
class RegionPolicy(Protocol):
    """A policy that wants to know of regions."""

    def region(self, function: Callable[..., Any]) -> contextlib.AbstractContextManager[Callable[..., Any]]:
        """Surrounds the first run of a region; gives what the backward pass calls to run it again."""


@contextlib.contextmanager
def regions_routed(current_policy: Callable[[], object]) -> Iterator[None]:
    """Tell the active policy of every region that is opened within the block.

    Args:
        current_policy: The policy that answers unit calls at this moment, or None.
    """
    originals = {name: getattr(torch_checkpoint, name) for name in (_GENERATOR, _REENTRANT)}

    def generator(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Generator[None, None, None]:
        policy = current_policy()
        if isinstance(policy, RegionPolicy):
            with policy.region(function) as again:
                yield from originals[_GENERATOR](again, *args, **kwargs)
        else:
            yield from originals[_GENERATOR](function, *args, **kwargs)

    class Reentrant:
        """Stands for torch's autograd function."""

        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors_in(args))
            if trained and isinstance(current_policy(), RegionPolicy):
                return torch_checkpoint.checkpoint(function, *args, use_reentrant=False, preserve_rng_state=preserve)
            return originals[_REENTRANT].apply(function, preserve, *args)

    setattr(torch_checkpoint, _GENERATOR, generator)
    setattr(torch_checkpoint, _REENTRANT, Reentrant)
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(torch_checkpoint, name, original)
