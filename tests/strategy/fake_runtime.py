"""A pipeline of one process: what the strategy asks of the runtime, without any of its work."""

from __future__ import annotations

import importlib.util
import sys
import types
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from torch import nn

from d9d_lightning.values import Placement


class Pipeline:
    """Runs every microbatch forward and backward in turn."""

    def __init__(self, module: nn.Module, **options: Any) -> None:
        self.module = module
        self.options = options
        self.is_loss_owner, self.loss_owner = True, 0
        self.placed_with: Sequence[Any] | None = None

    @property
    def owned_parameters(self) -> Mapping[str, nn.Parameter]:
        """All of them."""
        return dict(self.module.named_parameters())

    @property
    def parameter_owners(self) -> Mapping[str, tuple[int, ...]]:
        """The only rank."""
        return {name: (0,) for name, _ in self.module.named_parameters()}

    @property
    def buffer_owners(self) -> Mapping[str, int]:
        """The only rank."""
        return {name: 0 for name, _ in self.module.named_buffers()}

    def place(self, step: Any, microbatches: Sequence[Any]) -> Placement:
        """One stage for everything."""
        self.placed_with = microbatches
        return Placement(1, {"": 0})

    def release(self) -> None:
        """Nothing to give away."""

    def run(
        self, step: Any, microbatches: Sequence[Any], program: Any, *, finish: Any, observer: Any = None, **_: Any
    ) -> Any:
        """One microbatch after the other."""
        for microbatch in microbatches:
            root = finish(microbatch, step(microbatch))
            if root is not None:
                root.backward()
                if observer is not None:
                    observer.weights_done(0, microbatch.index)
        return SimpleNamespace(outputs=None)


def stand_in() -> None:
    """Take the place of the runtime's pipeline where there is none yet."""
    if importlib.util.find_spec("d9d_lightning.runtime.pipeline") is None:
        module = types.ModuleType("d9d_lightning.runtime.pipeline")
        module.Pipeline = Pipeline  # type: ignore[attr-defined]
        sys.modules["d9d_lightning.runtime.pipeline"] = module
