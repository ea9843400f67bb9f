"""Operators whose result has the same geometry on every device, and can therefore be asked on the meta device itself.

``FakeTensorMode`` adds to torch's meta kernels what depends on the device that a tensor claims to be on: memory formats
of convolutions, which fused kernel runs, devices named by arguments. Views, products and elementwise operators, a few
others too, have nothing of the kind, and are most of what is new at a new sequence length; asking them directly is five
to thirty times cheaper.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["is_device_blind"]

_NAMES = (
    # products
    "mm addmm bmm baddbmm "
    # elementwise
    "add sub mul div pow neg abs exp log sqrt rsqrt sin cos tanh sigmoid relu gelu silu where maximum minimum "
    # reductions
    "mean sum _softmax _log_softmax nll_loss_forward "
    # rearranging
    "_unsafe_view cat"
)
_PACKETS = frozenset(getattr(torch.ops.aten, name) for name in _NAMES.split())


def is_device_blind(func: Any, tensors: Sequence[torch.Tensor]) -> bool:
    """Whether an operator may be asked on the meta device for the geometry of its result.

    Args:
        func: The operator.
        tensors: Its tensor arguments.
    """
    if not _is_known(func) or not tensors:
        return False
    device = tensors[0].device
    return all(t.device == device and t.layout is torch.strided and not t.is_conj() for t in tensors)


@functools.cache
def _is_known(func: Any) -> bool:
    if func._schema.is_mutable:
        return False
    if func.is_view:  # a composite one may move or copy
        return not torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd")
    return func._overloadpacket in _PACKETS
