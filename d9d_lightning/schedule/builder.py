"""The contract of a schedule family, under the seed's names, and the base that our own families share."""

from __future__ import annotations

import abc
from typing import final

from d9d_lightning.errors import ScheduleError
from d9d_lightning.schedule.actions import ActionBase
from d9d_lightning.schedule.communication import add_communication_ops
from d9d_lightning.schedule.topology import ScheduleStyle, build_stage_to_host_rank_topology

__all__ = ["ComputeOrderBuilder", "PipelineProgramBuilder"]


class PipelineProgramBuilder(abc.ABC):
    """Composes the actions of every rank. Subclass it to bring a schedule of your own."""

    @abc.abstractmethod
    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        """Ordered actions of every rank, communication included.

        Args:
            num_microbatches: Number of microbatches of one step.
            pp_size: Number of ranks.

        Returns:
            Rank to its actions, for ranks 0 to ``pp_size - 1``.
        """

    @property
    @abc.abstractmethod
    def num_stages_per_rank(self) -> int:
        """Number of stages that each rank hosts."""

    @property
    @abc.abstractmethod
    def topology_style(self) -> ScheduleStyle:
        """How stages are laid over ranks."""


class ComputeOrderBuilder(PipelineProgramBuilder):
    """A family that decides the order of compute actions only; checks and communication are the same for all."""

    name: str = ""

    @abc.abstractmethod
    def order(self, num_microbatches: int, pp_size: int) -> list[list[ActionBase]]:
        """Compute actions of every rank, in order."""

    def require(self, num_microbatches: int, pp_size: int) -> None:
        """Refuse a combination that the family cannot run; the default takes any.

        Raises:
            ScheduleError: With both numbers and what to use instead.
        """

    @final
    def compose(self, num_microbatches: int, pp_size: int) -> dict[int, list[ActionBase]]:
        """See :meth:`PipelineProgramBuilder.compose`.

        Raises:
            ScheduleError: A number below 1, or a combination that the family forbids.
        """
        if num_microbatches < 1 or pp_size < 1:
            raise ScheduleError(
                f"schedule {self.name!r} got num_microbatches={num_microbatches} and pp_size={pp_size}; "
                "both must be at least 1"
            )
        self.require(num_microbatches, pp_size)
        num_stages = self.num_stages_per_rank * pp_size
        stage_to_rank = build_stage_to_host_rank_topology(pp_size, num_stages, self.topology_style)
        order = dict(enumerate(self.order(num_microbatches, pp_size)))
        return add_communication_ops(order, stage_to_rank, num_stages)
