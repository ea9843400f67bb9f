"""``torch.autograd.grad`` in the middle of a step.

The graph behind a value ends where its stage ends, so everything between what is differentiated and what it is
differentiated by must lie on one stage. There the differentiation runs as a call of a unit without parameters; other
stages get its result as they get that of any unit. Gradient penalties, forces that are derivatives of an energy,
physics-informed losses and inner loops train so.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from d9d_lightning.errors import PartitionError
from d9d_lightning.partition.provenance import Source
from d9d_lightning.partition.user_code import describe_user_line
from d9d_lightning.values import UnitCall, ValueId

__all__ = [
    "DIFFERENTIATION",
    "Output",
    "calls_between",
    "differentiation_routed",
    "differentiation_unit",
    "leaves_behind",
]

DIFFERENTIATION = "torch.autograd.grad"
"""Name of the unit that stands for every differentiation of a step."""

_ENGINE = "_engine_run_backward"
_UNIT = nn.Module()


Output = Tensor | GradientEdge
"""What autograd takes for something to differentiate."""


class Policy(Protocol):
    """What is asked of the policy that is active."""

    def differentiates(self, outputs: Sequence[Output]) -> bool:
        """Whether gradients of these are its affair."""

    def call(
        self, unit: str, module: nn.Module, original: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Answer one call of a unit."""


def differentiation_unit() -> nn.Module:
    """The module that stands for it: no parameters, never called."""
    return _UNIT


@contextlib.contextmanager
def differentiation_routed(current_policy: Callable[[], Policy | None]) -> Iterator[None]:
    """Send every differentiation within the block to the active policy.

    ``torch.autograd.grad`` is often imported by name before it could be replaced; the function that it looks up at
    each call is replaced instead.

    Args:
        current_policy: The policy of this moment, or None where there is none.
    """
    original = getattr(torch.autograd, _ENGINE)

    def run(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        policy = current_policy()
        if policy is None or not policy.differentiates(outputs):
            return original(outputs, *args, **kwargs)
        _check(outputs, kwargs)
        return policy.call(DIFFERENTIATION, _UNIT, original, (outputs, *args), kwargs)

    setattr(torch.autograd, _ENGINE, run)
    try:
        yield
    finally:
        setattr(torch.autograd, _ENGINE, original)


def _check(outputs: Any, kwargs: dict[str, Any]) -> None:
    tensors = [output for output in outputs if isinstance(output, Tensor)]
    transformed = any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors))
    if not transformed and not kwargs.get("accumulate_grad"):
        return
    what = "a transform of torch.func" if transformed else "backward"
    raise PartitionError(
        f"{describe_user_line()} uses {what} between units. Its graph would end where a stage ends. Expected: "
        "torch.autograd.grad, whose units are kept on one stage; or this part inside one unit, which you name with "
        "units=[...] in D9DStrategy."
    )


def leaves_behind(outputs: Sequence[Output]) -> list[Tensor]:
    """The leaves that the graph of some tensors ends at."""
    starts = [output.node if isinstance(output, GradientEdge) else output.grad_fn for output in outputs]
    waiting = [node for node in starts if node is not None]
    seen = set(waiting)
    found = [output for output in outputs if isinstance(output, Tensor) and output.grad_fn is None]
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            found.append(node.variable)
        below = {child for child, _ in node.next_functions if child is not None} - seen
        seen |= below
        waiting.extend(below)
    return found


def calls_between(
    calls: Sequence[UnitCall],
    outputs: frozenset[Source],
    inputs: Sequence[frozenset[Source]],
    holds: Callable[[str, frozenset[Source]], bool],
) -> frozenset[int]:
    """Numbers of the calls that a gradient passes through on its way from outputs to inputs.

    Args:
        calls: The calls so far.
        outputs: Where what is differentiated comes from.
        inputs: For each tensor to differentiate by, where it comes from; nothing for a tensor of the batch, which may
            have gone into any call.
        holds: Whether a unit holds one of the named parameters.
    """
    behind = _ancestors(calls, outputs)
    if not all(inputs):
        return behind
    sources = frozenset().union(*inputs)
    after: set[int] = set()
    for number, call in enumerate(calls):
        reads = call.needs | call.raw_parameters
        later = any(value.call in after for value in call.needs)
        if later or reads & sources or holds(call.unit, sources):
            after.add(number)
    return behind & after


def _ancestors(calls: Sequence[UnitCall], sources: frozenset[Source]) -> frozenset[int]:
    found: set[int] = set()
    waiting = [source.call for source in sources if isinstance(source, ValueId)]
    while waiting:
        number = waiting.pop()
        if number not in found:
            found.add(number)
            waiting.extend(value.call for value in calls[number].needs)
    return frozenset(found)
