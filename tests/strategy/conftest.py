"""Until the runtime has a pipeline, a fake of one process stands in for it."""

from __future__ import annotations

import importlib.util
import sys
import types

import fake_runtime
import pytest

if importlib.util.find_spec("d9d_lightning.runtime.pipeline") is None:
    stand_in = types.ModuleType("d9d_lightning.runtime.pipeline")
    stand_in.Pipeline = fake_runtime.Pipeline  # type: ignore[attr-defined]
    sys.modules["d9d_lightning.runtime.pipeline"] = stand_in


@pytest.fixture(autouse=True)
def _work_in_a_temporary_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
