"""The public names are where the documentation says, under the signatures that people who know d9d expect."""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parents[1] / "docs" / "from_d9d.md"

PUBLIC_NAMES: dict[str, tuple[str, ...]] = {
    "d9d_lightning": ("D9DStrategy",),
    "d9d_lightning.schedule": (
        "ActionBase",
        "BackwardFullInputComputeAction",
        "BackwardWeightComputeAction",
        "ForwardComputeAction",
        "PipelineProgramBuilder",
        "ScheduleStyle",
        "ZeroBubbleVPipelineProgramBuilder",
        "add_communication_ops",
        "build_stage_to_host_rank_topology",
    ),
    "d9d_lightning.stage": (
        "EndStageOutput",
        "PipelineStage",
        "ReceiveStageInput",
        "SendStageOutput",
        "StageInput",
        "StageOutput",
        "StartStageInput",
    ),
    "d9d_lightning.gradients": (
        "AbstractGradientBucket",
        "GradientSynchronizer",
        "LocalGradientBucket",
        "SyncGradientBucket",
    ),
    "d9d_lightning.runtime": (
        "PipelineState",
        "PipelineStateHandler",
        "Profiler",
        "ShardingSpecLeaf",
        "SpecReplicate",
        "SpecShard",
        "StageCommunicationHandler",
        "shard_tree",
        "unshard_tree",
    ),
}

KEYWORDS: dict[tuple[str, str], tuple[str, ...]] = {
    ("d9d_lightning.schedule", "ForwardComputeAction"): ("stage_idx", "microbatch_idx"),
    ("d9d_lightning.schedule", "BackwardFullInputComputeAction"): ("stage_idx", "microbatch_idx", "full_backward"),
    ("d9d_lightning.schedule", "BackwardWeightComputeAction"): ("stage_idx", "microbatch_idx"),
    ("d9d_lightning.schedule", "add_communication_ops"): ("compute_actions", "stage_to_rank", "num_stages"),
    ("d9d_lightning.schedule", "ZeroBubbleVPipelineProgramBuilder.compose"): ("num_microbatches", "pp_size"),
    ("d9d_lightning.gradients", "GradientSynchronizer"): ("param_groups", "bucket_size_mb", "require_accumulations"),
    ("d9d_lightning.runtime", "Profiler"): ("save_dir", "period_steps", "warmup_steps", "active_steps"),
}

STRATEGY_ARGUMENTS = {
    "schedule": "zbv",
    "pipeline_parallel_size": "auto",
    "data_parallel_size": 1,
    "tensor_parallel_size": 1,
    "num_microbatches": "auto",
    "batch_spec": None,
    "example_batch": None,
    "units": None,
    "split_points": None,
    "owner_only_hooks": (),
    "bucket_size_mb": 25,
    "gradient_dtype": None,
    "save_distributed_checkpoint": False,
    "broadcast_batches": False,
    "process_group_backend": None,
    "start_method": "popen",
}


@pytest.mark.parametrize(("module", "name"), [(m, name) for m, names in PUBLIC_NAMES.items() for name in names])
def test_documented_import_works(module: str, name: str) -> None:
    """Each documented import line finds its name, and the module lists it as public."""
    loaded = importlib.import_module(module)
    assert getattr(loaded, name) is not None
    assert name in loaded.__all__


def test_import_lines_of_the_guide_run_as_written() -> None:
    """The import lines of docs/from_d9d.md can be pasted as they are, and leave out no public name that d9d has."""
    block = re.search(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert block is not None
    found: dict[str, object] = {}
    exec(block[1], found)
    expected = {name for module, names in PUBLIC_NAMES.items() if module != "d9d_lightning" for name in names}
    assert expected <= found.keys()


@pytest.mark.parametrize(("place", "names"), KEYWORDS.items())
def test_keyword_names_hold(place: tuple[str, str], names: tuple[str, ...]) -> None:
    """Calls written with d9d's keyword names are accepted."""
    target = importlib.import_module(place[0])
    for part in place[1].split("."):
        target = getattr(target, part)
    parameters = inspect.signature(target).parameters
    assert [name for name in names if name not in parameters] == []


def test_strategy_arguments_and_defaults() -> None:
    """The strategy takes the documented arguments and defaults, all typed, and no others by **kwargs."""
    from d9d_lightning import D9DStrategy

    parameters = dict(inspect.signature(D9DStrategy).parameters)
    assert {name: parameters[name].default for name in STRATEGY_ARGUMENTS} == STRATEGY_ARGUMENTS
    assert "timeout" in parameters
    assert all(parameter.kind is not parameter.VAR_KEYWORD for parameter in parameters.values())
    assert [name for name, parameter in parameters.items() if parameter.annotation is parameter.empty] == []
