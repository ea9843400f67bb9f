"""What a user is told at the start of a run: how the module is cut, and what that is predicted to cost."""

from __future__ import annotations

from torch import nn

from d9d_lightning.strategy.placement import PlacedModule
from d9d_lightning.strategy.programs import Programs

__all__ = ["describe_run"]

MEGABYTE = 2**20


def describe_run(module: nn.Module, placed: PlacedModule, programs: Programs, num_microbatches: int | str) -> str:
    """One line: stages, microbatches, predicted bubble, bytes per rank.

    Args:
        module: The user's module, released or not.
        placed: Where its parameters are.
        programs: The schedule.
        num_microbatches: ``D9DStrategy(num_microbatches=...)``.
    """
    held = [0] * placed.size
    for name, parameter in module.named_parameters():
        for rank in placed.engine.parameter_owners[name]:
            held[rank] += parameter.numel() * parameter.element_size()
    sizes = ", ".join(f"{count / MEGABYTE:.1f}" for count in held)
    schedule = programs.schedule if isinstance(programs.schedule, str) else type(programs.schedule).__name__
    if isinstance(num_microbatches, str):
        split = "microbatches chosen by the first batch"
    else:
        bubble = programs.predicted_bubble(num_microbatches)
        split = f"{num_microbatches} microbatches, predicted bubble {bubble:.0%}"
    return (
        f"D9DStrategy: {programs.num_stages} stages on {placed.size} ranks ({schedule}), {split}, parameters per rank "
        f"[{sizes}] MB"
    )
