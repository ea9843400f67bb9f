"""How much memory a graph keeps alive for its backward pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction

from d9d_lightning.stage.graph import saved_names

__all__ = ["saved_bytes"]


def saved_bytes(roots: Iterable[Tensor]) -> int:
    """Bytes of what the graphs behind tensors have saved, and of the tensors; parameters do not count.

    What saved-tensor hooks keep elsewhere (recomputed or offloaded activations) is not seen, as asking for it would run
    them.
    """
    roots = list(roots)
    tensors: list[Any] = [*roots]
    # a linear layer saves a view of its weight
    weights: set[int] = set()
    seen: set[Any] = set()
    todo = [root.grad_fn for root in roots if root.grad_fn is not None]
    while todo:
        node: Any = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter):
            weights.add(leaf.untyped_storage().data_ptr())
        tensors += _saved_by(node)
        todo += [following for following, _ in node.next_functions if following is not None]
    storages = [tensor.untyped_storage() for tensor in tensors if isinstance(tensor, Tensor)]
    sizes = {storage.data_ptr(): storage.nbytes() for storage in storages}
    return sum(size for place, size in sizes.items() if place not in weights)


def _saved_by(node: Any) -> Iterator[Any]:
    if isinstance(node, BackwardCFunction):
        stored = node._raw_saved_tensors
        if all(saved.unpack_hook is None for saved in stored):
            yield from _attempt(node, "saved_tensors") or ()
        return
    kind: type = type(node)
    for name in saved_names(kind):
        stored = getattr(node, name)
        many = stored if isinstance(stored, tuple | list) else (stored,)
        if all(saved is None or saved.unpack_hook is None for saved in many):
            found = _attempt(node, name.removeprefix("_raw"))
            yield from found if isinstance(found, tuple | list) else (found,)


def _attempt(node: Any, name: str) -> Any:
    """A saved tensor, or None where it was freed or changed since."""
    try:
        return getattr(node, name)
    except RuntimeError:
        return None
