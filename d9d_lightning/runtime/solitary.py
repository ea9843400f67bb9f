"""The transport of a rank that has all stages."""

from __future__ import annotations

from typing import Any

from d9d_lightning.errors import PipelineError

__all__ = ["NoTransport"]


class NoTransport:
    """One rank has all stages, so nothing travels."""

    problem: Exception | None = None
    receives_ahead = 0

    def send_forward(self, stage: int, microbatch: int, values: Any) -> None:
        raise PipelineError(f"stage {stage} would send although one rank has all stages")

    send_backward = send_forward

    def post_forward(self, stage: int, microbatch: int) -> None:
        raise PipelineError(f"stage {stage} would receive although one rank has all stages")

    post_backward = post_forward

    def take_forward(self, stage: int, microbatch: int) -> Any:
        raise PipelineError(f"stage {stage} would receive although one rank has all stages")

    take_backward = take_forward

    def finish(self) -> None:
        """Nothing was sent."""
