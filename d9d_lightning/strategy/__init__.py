"""The only package that imports lightning.

Reading order: ``strategy`` (the hooks, in the order Lightning calls them) -> ``run`` -> ``loop`` ->
``training`` -> ``losses`` -> ``logbook`` -> ``evaluation`` -> ``checkpoint``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from d9d_lightning.strategy.norms import grad_norm
    from d9d_lightning.strategy.strategy import D9DStrategy

__all__ = ["D9DStrategy", "grad_norm"]


def __getattr__(name: str) -> Any:
    # the registry of names lives below this package and must not load lightning
    if name == "D9DStrategy":
        from d9d_lightning.strategy.strategy import D9DStrategy

        return D9DStrategy
    if name == "grad_norm":
        from d9d_lightning.strategy.norms import grad_norm

        return grad_norm
    raise AttributeError(f"module 'd9d_lightning.strategy' has no attribute {name!r}; it has {', '.join(__all__)}")
