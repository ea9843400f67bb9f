"""Objects by name on a command line: ``package.module:name`` or ``path/to/file.py:name``."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from d9d_lightning.errors import PipelineConfigurationError

__all__ = ["find_named"]


def find_named(text: str, what: str) -> Any:
    """The object.

    Args:
        text: ``package.module:name``, ``path/to/file.py:name``; the name may have dots.
        what: What it is for; shown in errors.

    Raises:
        PipelineConfigurationError: There is no such file, module or name.
    """
    place, separator, name = text.rpartition(":")
    if not separator or not place or not name:
        raise PipelineConfigurationError(
            f"{what} {text!r} is not understood. Type package.module:name or path/to/file.py:name, such as "
            "my_project.model:build_model"
        )
    found: Any = _load_file(Path(place), what) if place.endswith(".py") else _load_module(place, what)
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(sorted(key for key in vars(found) if not key.startswith("_"))[:20])
            raise PipelineConfigurationError(f"{what} {text!r}: {place} has no {name!r}; it has {public or 'no names'}")
        found = getattr(found, part)
    return found


def _load_file(path: Path, what: str) -> ModuleType:
    name = f"d9d_named_{path.stem}"
    if not path.is_file():
        raise PipelineConfigurationError(f"{what}: there is no file {str(path)!r} in {Path.cwd()}")
    loaded = sys.modules.get(name)
    if loaded is not None and loaded.__file__ == str(path.resolve()):
        return loaded
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    if spec is None or spec.loader is None:
        raise PipelineConfigurationError(f"{what}: {str(path)!r} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # classes of the file are looked up there
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as python path/to/file.py does
        sys.path.insert(0, folder)
    spec.loader.exec_module(module)
    return module


def _load_module(name: str, what: str) -> ModuleType:
    if "" not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise PipelineConfigurationError(
                f"{what}: there is no module {name!r}; give one that can be imported from {Path.cwd()}, or a file "
                f"({name.replace('.', '/')}.py)"
            ) from error
        raise
