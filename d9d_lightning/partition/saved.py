"""How many bytes a unit keeps for its backward pass, counted while a step is traced."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from d9d_lightning.partition.placeholder import Placeholder
from d9d_lightning.values import Trace, UnitCall

__all__ = ["SavedBytes"]


class SavedBytes:
    """Measures calls of units by what autograd keeps of them; parameters and buffers are not counted.

    Memory that several operators keep counts once, by its largest view. Of an activation-checkpointed region only the
    arguments stay.

    Args:
        root: The module whose units are called.
    """

    def __init__(self, root: nn.Module) -> None:
        self._root = root
        self._calls: dict[str, list[int]] = {}

    def of_units(self, trace: Trace) -> dict[str, int]:
        """Bytes by unit, over all of its calls in the run that gave the trace; it must be the last one measured."""
        counts = Counter(call.unit for call in trace.calls)
        remaining = {unit: iter(self._calls[unit][-count:]) for unit, count in counts.items()}
        total = dict.fromkeys(counts, 0)
        for call in trace.calls:
            kept = next(remaining[call.unit])
            total[call.unit] += kept if call.region is None else _arguments_of_region(trace, call)
        return total

    @contextlib.contextmanager
    def measure(self, unit: str) -> Iterator[None]:
        """Around one call."""
        module = self._root.get_submodule(unit)
        lasting = {_memory_of(tensor)[0] for tensor in (*module.parameters(), *module.buffers())}
        kept: dict[int, tuple[int, object]] = {}

        def pack(tensor: Tensor) -> Tensor:
            key, owner = _memory_of(tensor)
            if key not in lasting:
                size = tensor.numel() * tensor.element_size()
                # the owner stays alive until the end, so that its key is not given to other memory
                kept[key] = (max(size, kept[key][0] if key in kept else 0), owner)
            return tensor.detach()  # an output that kept itself would never be freed

        with torch.autograd.graph.saved_tensors_hooks(pack, _give_back):
            yield
        self._calls.setdefault(unit, []).append(sum(size for size, _ in kept.values()))


def _arguments_of_region(trace: Trace, call: UnitCall) -> int:
    outside = [value for value in call.needs if trace.calls[value.call].region != call.region]
    specs = [trace.calls[value.call].values[value.leaf] for value in outside]
    return sum(math.prod(spec.shape) * spec.dtype.itemsize for spec in specs)


def _give_back(tensor: Tensor) -> Tensor:
    return tensor


def _memory_of(tensor: Tensor) -> tuple[int, object]:
    owner: object = tensor.cell if isinstance(tensor, Placeholder) else tensor.untyped_storage()
    key = id(owner) if isinstance(tensor, Placeholder) else tensor.untyped_storage()._cdata
    return key, owner
