"""Which tensor of a weight file belongs to which parameter, and reading those that this rank owns."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from d9d_lightning.errors import PretrainedWeightsError
from d9d_lightning.runtime.safetensors import WeightFiles

__all__ = ["PretrainedWeights"]

SHOWN = 5


@dataclass(frozen=True)
class _Source:
    """Where the values of one tensor of the module are.

    Attributes:
        files: The weights.
        key: The name there.
    """

    files: WeightFiles
    key: str


class PretrainedWeights:
    """Weight files for a module, found by name.

    Names in a file are those of the module that it is for, with or without the ``base_model_prefix`` of a transformers
    model in front: a file of the bare model fits the model with a head, and the other way round.

    Args:
        root: The user's module.
        paths: For names of submodules (``""`` is the whole module) a safetensors file or a directory of them.

    Attributes:
        notes: What a user should know: which tensors are in no file.

    Raises:
        PretrainedWeightsError: A submodule or file does not exist, or a file is of another model.
    """

    def __init__(self, root: nn.Module, paths: Mapping[str, str | Path]) -> None:
        self.notes: list[str] = []
        self._sources: dict[str, _Source] = {}
        self._files: list[WeightFiles] = []
        for prefix, path in paths.items():
            files = WeightFiles(path)
            self._files.append(files)
            self._match(_find(root, prefix), prefix, files)

    @property
    def names(self) -> Collection[str]:
        """Tensors of the module whose values are in a file, under each of their names."""
        return self._sources.keys()

    @property
    def bytes_read(self) -> int:
        """Bytes of tensors that this process has read."""
        return sum(files.bytes_read for files in self._files)

    def read(self, name: str, target: Tensor) -> None:
        """Fill one tensor of the module."""
        source = self._sources[name]
        source.files.read(source.key, target)

    def _match(self, module: nn.Module, prefix: str, files: WeightFiles) -> None:
        start = f"{prefix}." if prefix else ""
        base = str(getattr(module, "base_model_prefix", "") or "")
        keys: dict[int, str] = {}
        names: dict[str, int] = {}
        for name, tensor in _saved_tensors(module):
            names[name] = id(tensor)
            key = next((key for key in _spellings(name, base) if key in files), None)
            if key is not None:
                keys.setdefault(id(tensor), key)
        if not keys:
            raise PretrainedWeightsError(
                f"{files.path} has none of the tensors of {prefix or type(module).__name__!r}: it has "
                f"{sorted(files)[:SHOWN]}, the module {sorted(names)[:SHOWN]}. Name the submodule that the file is "
                'for: D9DStrategy(pretrained_weights={"net": path}).'
            )
        # tied weights are in a file once
        self._sources |= {start + name: _Source(files, keys[it]) for name, it in names.items() if it in keys}
        self._note(files, [start + name for name, it in names.items() if it not in keys], set(keys.values()))

    def _note(self, files: WeightFiles, missing: list[str], used: Collection[str]) -> None:
        unused = sorted(set(files) - set(used))
        if missing:
            self.notes.append(
                f"{len(missing)} tensors are not in {files.path} and start anew: {missing[:SHOWN]}. Tensors there that "
                f"belong to nothing in the module: {unused[:SHOWN] or 'none'}."
            )


def _find(root: nn.Module, prefix: str) -> nn.Module:
    try:
        return root.get_submodule(prefix)
    except AttributeError:
        names = [name for name, _ in root.named_children()]
        raise PretrainedWeightsError(
            f"pretrained_weights is for {prefix!r}, but {type(root).__name__} has no such submodule. Expected: the "
            f'name of one, such as {names}, or "" for the whole module.'
        ) from None


def _saved_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters and persistent buffers, under each of their names."""
    yield from module.named_parameters(remove_duplicate=False)
    for path, child in module.named_modules(remove_duplicate=False):
        for name, buffer in child._buffers.items():
            if buffer is not None and name not in child._non_persistent_buffers_set:
                yield (f"{path}.{name}" if path else name), buffer


def _spellings(name: str, base: str) -> Iterator[str]:
    for one in (name, *_old_spellings(name)):
        yield one
        if base:
            yield f"{base}.{one}"
            yield one.removeprefix(f"{base}.")


def _old_spellings(name: str) -> Iterator[str]:
    # early BERT files, which are still the published ones, call the scale and shift of a LayerNorm so
    if name.endswith("LayerNorm.weight"):
        yield name.removesuffix("weight") + "gamma"
    elif name.endswith("LayerNorm.bias"):
        yield name.removesuffix("bias") + "beta"
