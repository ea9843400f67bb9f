"""A schedule that somebody else wrote."""

from __future__ import annotations

import pytest

from d9d_lightning.errors import ScheduleDeadlockError, ScheduleError
from d9d_lightning.schedule import (
    ActionBase,
    BackwardFullInputComputeAction,
    BackwardWeightComputeAction,
    ForwardComputeAction,
    PipelineProgramBuilder,
    ScheduleStyle,
    ZeroBubbleVPipelineProgramBuilder,
    add_communication_ops,
    build_program,
    build_stage_to_host_rank_topology,
)
from d9d_lightning.testing.schedules import check_schedule


class SplitGPipe(PipelineProgramBuilder):
    """Written with the seed's names and keywords only."""

    @property
    def num_stages_per_rank(self) -> int:
        return 2

    @property
    def topology_style(self) -> ScheduleStyle:
        return ScheduleStyle.v

    def stage_order(self, num_stages: int) -> list[int]:
        return list(range(num_stages))

    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        num_stages = pp_size * self.num_stages_per_rank
        stage_to_rank = build_stage_to_host_rank_topology(
            pp_size=pp_size, num_stages=num_stages, style=self.topology_style
        )
        compute_actions: dict[int, list[ActionBase]] = {rank: [] for rank in range(pp_size)}
        for stage in self.stage_order(num_stages):
            compute_actions[stage_to_rank[stage]] += [
                ForwardComputeAction(stage_idx=stage, microbatch_idx=i) for i in range(num_microbatches)
            ]
        for stage in reversed(range(num_stages)):
            for i in range(num_microbatches):
                compute_actions[stage_to_rank[stage]] += [
                    BackwardFullInputComputeAction(stage_idx=stage, microbatch_idx=i, full_backward=False),
                    BackwardWeightComputeAction(stage_idx=stage, microbatch_idx=i),
                ]
        return add_communication_ops(
            compute_actions=compute_actions, stage_to_rank=stage_to_rank, num_stages=num_stages
        )


def test_a_builder_written_from_the_seed_alone_passes() -> None:
    """A builder that uses the seed's names and keywords passes the check and builds a program."""
    report = check_schedule(SplitGPipe(), pp_sizes=(1, 2, 4), microbatches=(1, 3, 8))
    assert len(report.passed) == 9
    assert report.refused == ()
    program = build_program(SplitGPipe(), pp_size=2, num_microbatches=3)
    assert program.stage_to_rank == (0, 1, 1, 0)


def test_a_built_in_builder_passes() -> None:
    """The seed's own builder passes the check with the default sizes."""
    assert len(check_schedule(ZeroBubbleVPipelineProgramBuilder()).passed) == 40


class _WithoutWeights(SplitGPipe):
    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        actions = super().compose(num_microbatches, pp_size)
        return {rank: [a for a in order if str(a) != "1W2"] for rank, order in actions.items()}


def test_a_missing_action_is_named_with_the_sizes() -> None:
    """A builder that forgets an action learns its name and the sizes where it is missing."""
    with pytest.raises(ScheduleError, match=r"_WithoutWeights with pp_size=2, num_microbatches=3: 1W2 is missing"):
        check_schedule(_WithoutWeights(), pp_sizes=(2,), microbatches=(2, 3))


class _Backwards(SplitGPipe):
    def stage_order(self, num_stages: int) -> list[int]:
        return list(reversed(range(num_stages)))


def test_a_deadlock_is_named() -> None:
    """A builder whose ranks wait for each other learns which actions block."""
    with pytest.raises(ScheduleDeadlockError, match="rank 0 is blocked at 3F0"):
        check_schedule(_Backwards(), pp_sizes=(2,), microbatches=(2,))


class _Rude(SplitGPipe):
    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        raise ValueError("no")


def test_a_refusal_names_both_numbers() -> None:
    """A builder that refuses sizes without naming them is told to."""
    with pytest.raises(ScheduleError, match="name both numbers, pp_size=2 and num_microbatches=3"):
        check_schedule(_Rude(), pp_sizes=(2,), microbatches=(3,))


class _Moody(SplitGPipe):
    calls = 0

    def stage_order(self, num_stages: int) -> list[int]:
        return list(range(num_stages))

    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        actions = super().compose(num_microbatches, pp_size)
        self.calls += 1
        if self.calls % 2 == 0:
            actions[0][0:2] = reversed(actions[0][0:2])
        return actions


def test_a_builder_must_repeat_itself() -> None:
    """A builder that gives another program the second time is refused, because every rank builds its own."""
    with pytest.raises(ScheduleError, match="different programs"):
        check_schedule(_Moody(), pp_sizes=(1,), microbatches=(4,))
