"""Directories that take each other's place or go away whole, whenever the process is killed."""

from __future__ import annotations

import ctypes
import os
import shutil
import uuid
from pathlib import Path

__all__ = ["remove_directory", "replace_directory"]

_HERE = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE, see rename(2)


def replace_directory(new: Path, target: Path) -> None:
    """Put a complete directory in the place of another one, so that a kill leaves one of the two at every moment.

    Linux swaps two names in one call. Elsewhere the target is away for as long as a rename takes.
    """
    if not target.exists():
        os.replace(new, target)
        return
    old = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.old")
    if _swap(new, target):
        os.replace(new, old)
    else:
        os.replace(target, old)
        os.replace(new, target)
    _remove(old)


def remove_directory(path: Path) -> None:
    """Remove a directory checkpoint; what a kill leaves of it is hidden, and not taken for a checkpoint."""
    old = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.old")
    os.replace(path, old)
    _remove(old)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _swap(one: Path, other: Path) -> bool:
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    done: int = rename(_HERE, os.fsencode(one), _HERE, os.fsencode(other), _EXCHANGE)
    return done == 0
