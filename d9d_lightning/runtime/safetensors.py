"""Reading single tensors out of safetensors files: the names first, then only the bytes of what is asked for.

The format (https://huggingface.co/docs/safetensors): eight bytes with the length of a JSON header, the header with the
type, shape and place of every tensor, then the tensors, little-endian and one after another. Nothing in it is run.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from d9d_lightning.errors import PretrainedWeightsError

__all__ = ["StoredTensor", "WeightFiles"]

CHUNK_BYTES = 16 * 2**20
"""What is held besides the tensor itself where its type or device is another one than the file's."""
HEADER_LIMIT_BYTES = 100_000_000
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies.

    Attributes:
        path: The file.
        offset: Of its first byte in the file.
        shape: Its shape.
        dtype: Its element type.
    """

    path: Path
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class WeightFiles:
    """The tensors of one safetensors file, or of all those in a directory.

    Args:
        path: The file, or a directory as ``save_pretrained`` writes it.

    Attributes:
        bytes_read: Bytes of tensors that :meth:`read` has read so far; headers do not count.

    Raises:
        PretrainedWeightsError: There are no such files, or one of them is broken.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.bytes_read = 0
        self._stored: dict[str, StoredTensor] = {}
        for file in _files_of(self.path):
            self._stored.update(_read_header(file))

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __getitem__(self, name: str) -> StoredTensor:
        return self._stored[name]

    def read(self, name: str, target: Tensor) -> None:
        """Fill a tensor, whose type and device may be others than the file's.

        Raises:
            PretrainedWeightsError: The shapes differ.
        """
        stored = self._stored[name]
        if stored.shape != tuple(target.shape):
            raise PretrainedWeightsError(
                f"{name!r} has shape {list(stored.shape)} in {stored.path}, but the module has {list(target.shape)}. "
                "Expected: weights of the configuration that the module was built with."
            )
        direct = target.device.type == "cpu" and target.dtype == stored.dtype and target.is_contiguous()
        with open(stored.path, "rb") as handle, torch.no_grad():
            handle.seek(stored.offset)
            if direct:
                self._fill(handle, target.detach().view(-1))
            else:
                self._convert(handle, stored, target)

    def _convert(self, handle: BinaryIO, stored: StoredTensor, target: Tensor) -> None:
        flat = target.detach().view(-1) if target.is_contiguous() else torch.empty(stored.shape).view(-1)
        count = max(1, CHUNK_BYTES // stored.dtype.itemsize)
        for start in range(0, flat.numel(), count):
            piece = torch.empty(min(count, flat.numel() - start), dtype=stored.dtype)
            self._fill(handle, piece)
            flat[start : start + piece.numel()].copy_(piece)
        if not target.is_contiguous():
            target.copy_(flat.view(stored.shape))

    def _fill(self, handle: BinaryIO, target: Tensor) -> None:
        if not target.numel():
            return
        wanted = memoryview(target.view(torch.uint8).numpy().data)
        read = 0
        while read < len(wanted):
            got = handle.readinto(wanted[read:])  # type: ignore[attr-defined]
            if not got:
                raise PretrainedWeightsError(f"{handle.name} ends in the middle of a tensor; download or copy it again")
            read += got
        self.bytes_read += read


def _files_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.safetensors")) if path.is_dir() else []
    index = path / "model.safetensors.index.json"
    if index.is_file():
        # a directory may also hold a consolidated copy of the same weights
        names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        found = [path / name for name in names]
        missing = [file.name for file in found if not file.is_file()]
        if missing:
            raise PretrainedWeightsError(f"{index} names the files {missing}, which are not there; download them too")
    elif (path / "model.safetensors").is_file():
        found = [path / "model.safetensors"]
    if not found:
        there = sorted(file.name for file in path.iterdir())[:8] if path.is_dir() else "nothing"
        raise PretrainedWeightsError(
            f"pretrained_weights names {str(path)!r}, where {there} was found. Expected: a .safetensors file, or a "
            "directory with some, as model.save_pretrained(directory) writes it."
        )
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    size = path.stat().st_size
    with open(path, "rb") as handle:
        length = int.from_bytes(handle.read(8), "little")
        if not 0 < length <= min(HEADER_LIMIT_BYTES, size - 8):
            raise PretrainedWeightsError(f"{path} is no safetensors file: its header would be {length} bytes long")
        try:
            header = json.loads(handle.read(length))
            stored = {
                name: _read_entry(path, entry, 8 + length, size)
                for name, entry in header.items()
                if name != "__metadata__"
            }
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise PretrainedWeightsError(f"{path} is no safetensors file: {error}") from error
    return stored


def _read_entry(path: Path, entry: Mapping[str, Any], start: int, size: int) -> StoredTensor:
    dtype, shape = DTYPES[entry["dtype"]], tuple(int(length) for length in entry["shape"])
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > size or begin < 0:
        raise ValueError(f"a tensor of shape {list(shape)} and {dtype} cannot lie at bytes {begin} to {end}")
    return StoredTensor(path, start + begin, shape, dtype)
