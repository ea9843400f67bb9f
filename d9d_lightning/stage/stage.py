"""One stage of a pipeline: forward and backward of its units, one microbatch at a time."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from d9d_lightning.errors import PlaceholderReadError, StageGradientError, UnplannedCallError
from d9d_lightning.partition.placeholder import is_placeholder
from d9d_lightning.stage.memory import saved_bytes
from d9d_lightning.stage.replay import Replay, StepCall
from d9d_lightning.stage.split_backward import WeightPass, full_backward, split_backward
from d9d_lightning.values import Microbatch, Plan, ValueId

__all__ = ["Finish", "PipelineStage"]

Finish = Callable[[Microbatch, Any], Tensor | None]
"""Called on the stage of the loss when a step has ended: what it returned, to the scalar to differentiate."""


@dataclass(slots=True)
class _Graph:
    """What the backward of one microbatch needs of its forward."""

    inputs: dict[ValueId, Tensor]
    made: dict[ValueId, Tensor]
    loss: Tensor | None


class PipelineStage:
    """Computes one stage.

    Args:
        replays: For each microbatch of the step, how to replay it (microbatches may differ in shape, so in plan).
        step: Calls the user's step.
        microbatches: The slices of the batch.
        finish: Called where the step ends on this stage.
    """

    def __init__(
        self,
        index: int,
        replays: Sequence[Replay],
        step: StepCall,
        microbatches: Sequence[Microbatch],
        finish: Finish,
    ) -> None:
        self.index = index
        self._replays = replays
        self._step = step
        self._microbatches = microbatches
        self._finish = finish
        self._graphs: dict[int, _Graph] = {}
        self._weight_passes: dict[int, WeightPass] = {}
        self._fallbacks: set[str] = set()

    def plan(self, microbatch: int) -> Plan:
        """The plan of a microbatch."""
        return self._replays[microbatch].script.plan

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the units that this stage calls in the first microbatch, in order."""
        plan = self.plan(0)
        called = dict.fromkeys(call.unit for call in plan.trace.calls)
        return tuple(unit for unit in called if plan.placement.stage_of(unit) == self.index)

    def receives(self, microbatch: int) -> tuple[ValueId, ...]:
        """Values that the forward of a microbatch needs from the previous stage."""
        return self.plan(microbatch).boundaries[self.index].receives

    def forward(self, microbatch: int, received: Mapping[ValueId, Tensor]) -> dict[ValueId, Tensor]:
        """Run the stage for one microbatch.

        Args:
            microbatch: Its position in the batch.
            received: The values of :meth:`receives`, without a graph.

        Returns:
            The values that the next stage receives, without a graph.
        """
        replay = self._replays[microbatch]
        script = replay.script
        sends = script.plan.boundaries[self.index].sends
        inputs = self._as_leaves(script.plan, received)
        made: dict[ValueId, Tensor] = {}
        loss = None
        if script.last_call >= 0 or script.is_loss_owner or replay.world is not None:
            result = replay.run(self._step, self._microbatches[microbatch], inputs)
            made = result.made
            loss = self._finish_step(microbatch, result.output) if script.is_loss_owner else None
        if torch.is_grad_enabled():
            self._graphs[microbatch] = _Graph(inputs, made, loss)
        return {value: self._checked(script.plan, value, made, received) for value in sends}

    def _checked(
        self, plan: Plan, value: ValueId, made: Mapping[ValueId, Tensor], received: Mapping[ValueId, Tensor]
    ) -> Tensor:
        if value not in made:
            return received[value]
        tensor, spec = made[value], plan.spec(value)
        if tensor.shape != spec.shape or tensor.dtype != spec.dtype or tensor.requires_grad != spec.requires_grad:
            call = plan.trace.calls[value.call]
            raise UnplannedCallError(
                f"unit {call.unit!r} made a tensor of shape {tuple(tensor.shape)}, {tensor.dtype}, "
                f"requires_grad={tensor.requires_grad}; the plan has {spec.shape}, {spec.dtype}, {spec.requires_grad}"
            )
        return tensor.detach()

    def _as_leaves(self, plan: Plan, received: Mapping[ValueId, Tensor]) -> dict[ValueId, Tensor]:
        leaves: dict[ValueId, Tensor] = {}
        grad = torch.is_grad_enabled()
        for value, tensor in received.items():
            leaf = tensor.detach()
            if grad and plan.spec(value).requires_grad:
                leaf.requires_grad_()
            leaves[value] = leaf
        return leaves

    def _finish_step(self, microbatch: int, output: Any) -> Tensor | None:
        loss = self._finish(self._microbatches[microbatch], output)
        if loss is not None and is_placeholder(loss):
            raise PlaceholderReadError(
                f"the loss depends on a tensor of {getattr(loss, 'origin', '?')!r}, which lives on another stage and "
                "was not in the trace"
            )
        return loss

    def backward_full(
        self, microbatch: int, gradients: Mapping[ValueId, Tensor | None]
    ) -> dict[ValueId, Tensor | None]:
        """Gradients of everything; returns those of the received values that require one."""
        graph = self._take_graph(microbatch)
        roots, seeds = self._roots(graph, gradients)
        wanted = [value for value, tensor in graph.inputs.items() if tensor.requires_grad]
        found = full_backward(roots, seeds, [graph.inputs[value] for value in wanted])
        return self._add_relayed(graph, dict(zip(wanted, found, strict=True)), gradients)

    def backward_input(
        self, microbatch: int, gradients: Mapping[ValueId, Tensor | None]
    ) -> dict[ValueId, Tensor | None]:
        """Gradients of the received values; those of the weights wait for :meth:`backward_weight`."""
        graph = self._take_graph(microbatch)
        roots, seeds = self._roots(graph, gradients)
        wanted = [value for value, tensor in graph.inputs.items() if tensor.requires_grad]
        found, weight_pass = split_backward(roots, seeds, [graph.inputs[value] for value in wanted])
        self._weight_passes[microbatch] = weight_pass
        if weight_pass.reason is not None:
            self._fallbacks.add(weight_pass.reason)
        return self._add_relayed(graph, dict(zip(wanted, found, strict=True)), gradients)

    def backward_weight(self, microbatch: int) -> None:
        """Gradients of the weights, after :meth:`backward_input`."""
        weight_pass = self._weight_passes.pop(microbatch, None)
        if weight_pass is None:
            raise StageGradientError(
                f"stage {self.index}: the weight gradients of microbatch {microbatch} were asked for "
                "twice, or before its input gradients. Expected: I, then W, once each."
            )
        weight_pass.run()

    def _take_graph(self, microbatch: int) -> _Graph:
        graph = self._graphs.pop(microbatch, None)
        if graph is None:
            raise StageGradientError(
                f"stage {self.index}: a backward of microbatch {microbatch} came twice, or before its forward (or the "
                "forward ran under no_grad). Expected: F, then B or I, once each."
            )
        return graph

    def _roots(
        self, graph: _Graph, gradients: Mapping[ValueId, Tensor | None]
    ) -> tuple[list[Tensor], list[Tensor | None]]:
        roots = [graph.made[value] for value in graph.made if value in gradients]
        seeds: list[Tensor | None] = [gradients[value] for value in graph.made if value in gradients]
        if graph.loss is not None:
            roots.append(graph.loss)
            seeds.append(torch.ones_like(graph.loss))
        return roots, seeds

    def _add_relayed(
        self,
        graph: _Graph,
        found: dict[ValueId, Tensor | None],
        gradients: Mapping[ValueId, Tensor | None],
    ) -> dict[ValueId, Tensor | None]:
        for value, own in found.items():
            later = gradients.get(value)
            if later is not None:
                found[value] = later if own is None else own + later
        return found

    @property
    def fallback_reasons(self) -> frozenset[str]:
        """Why some backward passes of this stage could not be split."""
        return frozenset(self._fallbacks)

    @property
    def is_clean(self) -> bool:
        """Whether nothing is left of the step."""
        return not self._graphs and not self._weight_passes

    def held_bytes(self) -> tuple[dict[int, int], dict[int, int]]:
        """By microbatch, bytes of activations that wait for a backward, and of what waits for a weight pass."""
        graphs = {
            number: saved_bytes(
                [*graph.inputs.values(), *graph.made.values(), *([] if graph.loss is None else [graph.loss])]
            )
            for number, graph in self._graphs.items()
        }
        return graphs, {number: one.held_bytes() for number, one in self._weight_passes.items()}
