"""Pipeline parallelism for ordinary LightningModules.

The map, bottom up; imports point only down:

- ``errors``     every error, each also a built-in type
- ``schedule``   what happens on which rank in which order; standard library only
- ``values``     the frozen types that the layers exchange
- ``partition``  units, trace, placement, plan; pure, no process group
- ``stage``      placeholders, the replay of the user's step on one stage, split backward
- ``gradients``  bucketed gradient synchronizer, norm, clipping; knows no pipeline
- ``runtime``    executor, transport, whole-batch state, failure watch, profiler
- ``strategy``   the only package that imports lightning
- ``testing``    all ranks in one process; worker processes; a check for schedules of your own
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from d9d_lightning.strategy import D9DStrategy

__all__ = ["D9DStrategy", "__version__"]

_LAZY = {"D9DStrategy": "d9d_lightning.strategy"}


def __getattr__(name: str) -> Any:
    # Loading torch and lightning takes seconds; tools that only look at schedules must not pay for it.
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    public = ", ".join(sorted(__all__))
    raise AttributeError(f"module 'd9d_lightning' has no attribute {name!r}; public names: {public}")


def _register_names() -> None:
    from d9d_lightning.strategy.registry import install

    install()


_register_names()
