"""Checkpoint files: written so that a kill at any moment leaves the old one, read without holding them in memory."""

from __future__ import annotations

import os
import uuid
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

from d9d_lightning.strategy.directories import remove_directory
from d9d_lightning.strategy.sharded import is_sharded, read_sharded
from d9d_lightning.strategy.trust import load_file

__all__ = ["read_checkpoint", "remove_checkpoint", "write_checkpoint"]


def _is_plain_local(io: CheckpointIO, path: str | Path) -> bool:
    return type(io).__name__ == TorchCheckpointIO.__name__ and "://" not in os.fspath(path)


def write_checkpoint(
    io: CheckpointIO, checkpoint: dict[str, Any], path: str | Path, storage_options: Any = None
) -> None:
    """Write one file; another ``CheckpointIO`` than Lightning's own, and remote paths, are left to it.

    A temporary file beside the target is filled, flushed to the disk and renamed, which is atomic. It is streamed, so
    that it never exists in memory as a whole.
    """
    if not _is_plain_local(io, path) or storage_options is not None:
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        return
    target = Path(path)
    if target.is_dir():
        raise IsADirectoryError(f"the checkpoint path exists and is a directory: {target}")
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.part")
    try:
        with open(temporary, "wb") as handle:
            torch.save(checkpoint, handle)
            handle.flush()
            os.fsync(handle.fileno())
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def remove_checkpoint(io: CheckpointIO, path: str | Path) -> None:
    """Remove a file or a directory."""
    if is_sharded(path):
        remove_directory(Path(path))
    else:
        io.remove_checkpoint(path)


def read_checkpoint(io: CheckpointIO, path: str | Path, weights_only: bool | None) -> dict[str, Any]:
    """Read one file or directory; tensors of local files are mapped, so that a rank touches only what it takes.

    Args:
        io: The trainer's ``CheckpointIO``.
        path: The file, or the directory of a distributed checkpoint.
        weights_only: As ``torch.load`` takes it; None leaves the choice to it.

    Raises:
        UnsafeCheckpointError: The file holds objects of classes that may only be read with ``weights_only=False``.
    """
    if is_sharded(path):
        return read_sharded(path, weights_only)
    if _is_plain_local(io, path) and Path(path).is_file():
        try:
            return load_file(path, weights_only, mmap=True)
        except RuntimeError as error:
            # files of the format before zip cannot be mapped
            if "mmap" not in str(error):
                raise
    return dict(io.load_checkpoint(path, weights_only=weights_only))
