"""Arguments of the strategy, checked one by one before anything is started.

Every message says which value was given, what is allowed, and what to type.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from d9d_lightning.errors import PipelineConfigurationError
from d9d_lightning.runtime.containers import open_container
from d9d_lightning.runtime.sharding import SpecReplicate, SpecShard

__all__ = ["StrategyOptions", "check_options"]

START_METHODS = ("popen", "spawn", "fork", "forkserver")
LONGEST_TIMEOUT_S = 365 * 86400.0
GRADIENT_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class StrategyOptions:
    """The arguments of ``D9DStrategy``, after they were checked."""

    schedule: Any
    pipeline_parallel_size: int | str
    data_parallel_size: int
    tensor_parallel_size: int
    num_microbatches: int | str
    batch_spec: Any
    example_batch: Any
    units: tuple[str, ...] | None
    split_points: tuple[str, ...] | None
    owner_only_hooks: tuple[str, ...]
    bucket_size_mb: float
    gradient_dtype: torch.dtype | None
    save_distributed_checkpoint: bool
    broadcast_batches: bool
    process_group_backend: str | None
    timeout: timedelta
    start_method: str
    activation_checkpointing_policy: Any
    pretrained_weights: Mapping[str, str] | None


def _refuse(name: str, value: object, allowed: str, example: str) -> PipelineConfigurationError:
    return PipelineConfigurationError(
        f"D9DStrategy({name}={value!r}) is not understood: {name} must be {allowed}. "
        f"Type D9DStrategy({name}={example})."
    )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _is_text(value: object, *allowed: str) -> bool:
    # arrays and tensors compare element by element, so the type is looked at first
    return isinstance(value, str) and value in allowed


def _check_count(name: str, value: object, *, auto: bool, example: str) -> None:
    if _is_count(value) or (auto and _is_text(value, "auto")):
        return
    raise _refuse(name, value, 'a whole number of at least 1 or "auto"' if auto else "a whole number >= 1", example)


def _check_names(name: str, value: Sequence[str] | None, example: str) -> tuple[str, ...] | None:
    if value is None:
        return None
    # a set has another order in every process, and an iterator can be read only once
    if isinstance(value, str) or not isinstance(value, Sequence) or not all(isinstance(item, str) for item in value):
        raise _refuse(name, value, "a list of names", example)
    return tuple(value)


def _check_flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _refuse(name, value, "True or False", "True")


def _check_schedule(schedule: object) -> None:
    if callable(getattr(schedule, "compose", None)):
        return
    if not isinstance(schedule, str):
        raise _refuse("schedule", schedule, "the name of a schedule or a PipelineProgramBuilder", '"zbv"')
    from d9d_lightning.strategy.programs import schedule_names

    names = schedule_names()
    if schedule not in names:
        raise PipelineConfigurationError(
            f"D9DStrategy(schedule={schedule!r}): no schedule has this name. Schedules: {', '.join(names)}. "
            'Type D9DStrategy(schedule="zbv"), or pass a PipelineProgramBuilder of your own.'
        )


def _check_dtype(value: object) -> torch.dtype | None:
    if value is None or (isinstance(value, torch.dtype) and value in GRADIENT_DTYPES.values()):
        return value
    if isinstance(value, str) and value in GRADIENT_DTYPES:
        return GRADIENT_DTYPES[value]
    raise _refuse("gradient_dtype", value, f"None, a torch dtype, or one of {sorted(GRADIENT_DTYPES)}", '"float32"')


def _check_timeout(value: object) -> timedelta:
    if isinstance(value, timedelta) and value.total_seconds() > 0:
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < LONGEST_TIMEOUT_S:
        return timedelta(seconds=float(value))
    raise _refuse("timeout", value, "a positive timedelta or number of seconds (less than a year)", "1800")


def _check_start_method(value: object) -> str:
    if not _is_text(value, *START_METHODS):
        raise _refuse("start_method", value, f"one of {', '.join(START_METHODS)}", '"popen"')
    return str(value)


def _check_weights(value: object) -> dict[str, str] | None:
    if value is None:
        return None
    paths: Mapping[Any, Any] = value if isinstance(value, Mapping) else {"": value}
    if not paths or not all(isinstance(k, str) and isinstance(v, str | os.PathLike) for k, v in paths.items()):
        raise _refuse("pretrained_weights", value, "a path, or a path for each named submodule", '{"net": "weights/"}')
    return {name: os.fspath(path) for name, path in paths.items()}


def _check_recomputed(given: dict[str, Any]) -> Any:
    classes, policy = given.pop("activation_checkpointing"), given["activation_checkpointing_policy"]
    if classes is not None and policy is not None:
        raise PipelineConfigurationError(
            "D9DStrategy was given both activation_checkpointing and activation_checkpointing_policy. Give one of "
            "them: D9DStrategy(activation_checkpointing_policy={Block})."
        )
    name = "activation_checkpointing" if policy is None else "activation_checkpointing_policy"
    chosen = [classes] if isinstance(classes, type) else classes if policy is None else policy
    if chosen is None or (policy is not None and (callable(chosen) or hasattr(chosen, "_run_policy"))):
        return chosen
    if not isinstance(chosen, set | frozenset | list | tuple) or not chosen or not all(map(_is_module_class, chosen)):
        raise _refuse(name, chosen, "classes of modules", "{torch.nn.TransformerEncoderLayer}")
    # a set has another order in every process
    return tuple(sorted(chosen, key=lambda one: f"{one.__module__}.{one.__qualname__}"))


def _is_module_class(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, nn.Module)


def _is_backend(value: object) -> bool:
    """Whether it is ``"gloo"``, or such names by device: ``"cpu:gloo,cuda:nccl"``."""
    names = [part.rpartition(":")[2].lower() for part in value.split(",")] if isinstance(value, str) else [""]
    return all(name in dist.Backend.backend_list for name in names)


def _check_spec(spec: object, given: object) -> None:
    if spec is None or isinstance(spec, SpecShard | SpecReplicate):
        return
    opened = open_container(spec)
    if opened is None:
        expected = "SpecShard(), SpecReplicate(), None, or a dictionary, list or tuple of them"
        raise _refuse("batch_spec", given, expected, '{"ids": SpecShard(0), "vocabulary": SpecReplicate()}')
    for part in opened.children:
        _check_spec(part, given)


def check_options(given: dict[str, Any]) -> StrategyOptions:
    """Arguments of ``D9DStrategy`` as one frozen object.

    Raises:
        PipelineConfigurationError: A value is not allowed; the message says what is.
    """
    _check_schedule(given["schedule"])
    _check_count("pipeline_parallel_size", given["pipeline_parallel_size"], auto=True, example='"auto"')
    _check_count("data_parallel_size", given["data_parallel_size"], auto=False, example="1")
    if not _is_count(given["tensor_parallel_size"]) or given["tensor_parallel_size"] != 1:
        raise _refuse("tensor_parallel_size", given["tensor_parallel_size"], "1 (the axis is reserved)", "1")
    _check_count("num_microbatches", given["num_microbatches"], auto=True, example='"auto"')
    for flag in ("save_distributed_checkpoint", "broadcast_batches"):
        _check_flag(flag, given[flag])
    size = given["bucket_size_mb"]
    if not isinstance(size, (int, float)) or isinstance(size, bool) or not 0 < size < float("inf"):
        raise _refuse("bucket_size_mb", size, "a positive number of megabytes", "25")
    backend = given["process_group_backend"]
    if backend is not None and not _is_backend(backend):
        known = ", ".join(dist.Backend.backend_list[1:])
        raise _refuse("process_group_backend", backend, f"None or the name of a backend ({known})", '"gloo"')
    _check_spec(given["batch_spec"], given["batch_spec"])
    recomputed = _check_recomputed(given)
    checked = dict(
        given,
        activation_checkpointing_policy=recomputed,
        units=_check_names("units", given["units"], '["net.blocks.*"]'),
        split_points=_check_names("split_points", given["split_points"], '["net.blocks.6"]'),
        owner_only_hooks=_check_names("owner_only_hooks", given["owner_only_hooks"], '["on_train_epoch_end"]') or (),
        gradient_dtype=_check_dtype(given["gradient_dtype"]),
        timeout=_check_timeout(given["timeout"]),
        pretrained_weights=_check_weights(given["pretrained_weights"]),
        start_method=_check_start_method(given["start_method"]),
    )
    return StrategyOptions(**checked)
