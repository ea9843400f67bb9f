"""Reading files that may hold objects of any class: strict unless told otherwise, with an error that says how."""

from __future__ import annotations

import os
from pickle import UnpicklingError
from typing import Any

import torch

from d9d_lightning.errors import UnsafeCheckpointError

__all__ = ["load_file"]


def load_file(path: str | os.PathLike[str], weights_only: bool | None, *, mmap: bool = False) -> dict[str, Any]:
    """Read what ``torch.save`` has written, to the host.

    Args:
        path: The file.
        weights_only: As ``torch.load`` takes it; None leaves the choice to it.
        mmap: Whether tensors are mapped from the file.

    Raises:
        UnsafeCheckpointError: The file holds objects of classes that may only be read with ``weights_only=False``.
    """
    try:
        return dict(torch.load(path, map_location="cpu", mmap=mmap, weights_only=weights_only))
    except UnpicklingError as error:
        names = [] if weights_only is False else _unsafe_names(path)
        if not names:
            raise
        first = names[0].rpartition(".")[2]
        raise UnsafeCheckpointError(
            f"the checkpoint {os.fspath(path)} holds objects of {', '.join(names)}, and reading those can run code of "
            "whoever wrote the file, so they are not read unasked. They come from save_hyperparameters, or from the "
            "state of a callback, a scheduler or a hook. If you trust the file, type trainer.fit(..., ckpt_path=..., "
            "weights_only=False); validate, test and predict take the same. Or allow the classes only, before: "
            f"torch.serialization.add_safe_globals([{first}{', ...' if len(names) > 1 else ''}])."
        ) from error


def _unsafe_names(path: str | os.PathLike[str]) -> list[str]:
    """Classes and functions in a file that torch would not read; none where it cannot tell."""
    try:
        return sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path))
    except (ValueError, RuntimeError, UnpicklingError):
        return []
