"""The only package that imports lightning.

Reading order: ``strategy`` (the hooks, in the order Lightning calls them) -> ``run`` -> ``loop`` ->
``training`` -> ``losses`` -> ``logbook`` -> ``evaluation`` -> ``checkpoint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_lightning.strategy.strategy import D9DStrategy

__all__ = ["D9DStrategy"]


def __getattr__(name: str) -> Any:
    # the registry of names lives below this package and must not load lightning
    if name == "D9DStrategy":
        from d9d_lightning.strategy.strategy import D9DStrategy

        return D9DStrategy
    raise AttributeError(f"module 'd9d_lightning.strategy' has no attribute {name!r}; it has D9DStrategy")
