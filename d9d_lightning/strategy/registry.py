"""Strategy names such as ``d9d_zbv``, registered in either import order without loading torch.

Where Lightning's strategies are loaded already, the names are registered at once. Otherwise a finder waits for that
module to be imported and registers right after it ran. The registry gets a function, so that the strategy itself is
loaded when somebody asks for it.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from d9d_lightning.errors import PipelineConfigurationError

__all__ = ["install"]

LIGHTNING_STRATEGIES = "lightning.pytorch.strategies"
OTHER_STRATEGIES = "pytorch_lightning.strategies"
WATCHED = (LIGHTNING_STRATEGIES, OTHER_STRATEGIES)


def _create(**arguments: Any) -> Any:
    from d9d_lightning.strategy import D9DStrategy

    return D9DStrategy(**arguments)


def _refuse(name: str, **arguments: Any) -> Any:
    raise PipelineConfigurationError(
        f"Trainer(strategy={name!r}) was asked of `pytorch_lightning`, but d9d_lightning works with `lightning`. The "
        "two packages have separate classes. Type `import lightning as L` and use L.Trainer and L.LightningModule."
    )


def _register(module: ModuleType) -> None:
    from d9d_lightning.schedule import SCHEDULES

    is_ours = module.__name__ == LIGHTNING_STRATEGIES
    for schedule in SCHEDULES:
        if schedule == "forward_only":
            continue
        name = f"d9d_{schedule}"
        make = _create if is_ours else functools.partial(_refuse, name)
        text = f"Pipeline parallelism with the {schedule} schedule"
        module.StrategyRegistry.register(name, make, description=text, override=True, schedule=schedule)


class _AfterImport(importlib.abc.Loader):
    """Runs a module's own loader, then registers."""

    def __init__(self, loader: importlib.abc.Loader) -> None:
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        _register(module)

    def __getattr__(self, name: str) -> Any:
        # resources, source text and the like are the business of the module's own loader
        return getattr(self._loader, name)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the watched modules by asking the other finders."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in WATCHED:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _AfterImport(spec.loader)
                return spec
        return None


def install() -> None:
    """Register the names now or as soon as Lightning is imported; a second call changes nothing."""
    for name in WATCHED:
        if name in sys.modules:
            _register(sys.modules[name])
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
