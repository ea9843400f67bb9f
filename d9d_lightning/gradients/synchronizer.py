"""GradientSynchronizer: average gradients over replicas while backward still runs, and never be silently wrong."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping

import torch
import torch.distributed as dist

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients.agreement import compare_replicas
from d9d_lightning.gradients.binding import BucketRules, without_repeats
from d9d_lightning.gradients.bucket import AbstractGradientBucket
from d9d_lightning.gradients.ledger import BucketLedger, join_names
from d9d_lightning.gradients.norm import scale_gradients
from d9d_lightning.gradients.plan import MeshLike, mesh_axes, read_group
from d9d_lightning.gradients.reduction import Communicator

__all__ = ["GradientSynchronizer"]

_MEBIBYTE = 1024 * 1024


class GradientSynchronizer:
    """Averages gradients over replicas, bucket by bucket, as soon as each bucket has had all its accumulations.

    One step: accumulations, then :meth:`finish` (when the step's backwards are over), :meth:`wait`, the optimizer, and
    ``zero_grad`` of either the synchronizer or the optimizer. Where every parameter reaches its required number of
    accumulations, :meth:`finish` may be left out. Buckets are launched in one fixed order on all replicas.

    Args:
        param_groups: Groups as an optimizer takes them: lists of parameters or of ``(name, parameter)`` pairs, or
            optimizer group dictionaries. A parameter that occurs twice counts where it occurs first.
        bucket_size_mb: Size of a bucket in MiB of gradients on this rank. The first bucket is at most 1 MiB.
        require_accumulations: Accumulations per parameter and step; None: unknown, see :meth:`mark_done`.
        gradient_dtype: Element type in which gradients of floating point parameters are accumulated and reduced; None:
            that of ``parameter.grad_dtype``. See :meth:`lower_gradients`.

    Raises:
        ValueError: If a size or a count is negative.
        TypeError: If a group holds something else than parameters.
    """

    def __init__(
        self,
        param_groups: Iterable[object],
        bucket_size_mb: float,
        require_accumulations: int | None,
        *,
        gradient_dtype: torch.dtype | None = None,
    ) -> None:
        if bucket_size_mb < 0:
            raise ValueError(f"bucket_size_mb is {bucket_size_mb}; give a size in MiB, for example 25")
        self._limit_bytes = int(bucket_size_mb * _MEBIBYTE)
        self._default_required = _checked_count(require_accumulations)
        self._required: dict[torch.Tensor, int | None] = {}
        self._gradient_dtype = gradient_dtype
        self._entries = without_repeats(read_group(group, index) for index, group in enumerate(param_groups))
        self._ledger: BucketLedger | None = None

    @property
    def buckets(self) -> tuple[AbstractGradientBucket, ...]:
        """All buckets, in launch order; none before bind."""
        return tuple(self._ledger.order) if self._ledger else ()

    # ---- life ----

    def bind(
        self, mesh: MeshLike | None = None, *, shared: Mapping[torch.Tensor, dist.ProcessGroup] | None = None
    ) -> None:
        """Allocate the buffers and start to listen to accumulations. Collective over the mesh.

        Args:
            mesh: What plain parameters are averaged over: a mesh (all its axes), a process group, or a sequence of
                groups; ``()`` says that they have no replicas. DTensors know their own mesh.
            shared: Parameters of which other ranks, that are no replicas of this one, own a copy, with the group of
                the owners: their gradients are summed over it, then averaged. Equal order on all owners.

        Raises:
            GradientSyncError: If already bound, or if replicas do not have the same parameters.
            TypeError: If a plain parameter is there but no mesh.
            ValueError: If a placement is not supported or a gradient has no element type.
        """
        if self._ledger is not None:
            raise GradientSyncError("bind() was called twice; call unbind() first")
        axes = None if mesh is None else mesh_axes(mesh)
        compare_replicas(axes or (), [(entry.name, entry.parameter) for entry in self._entries])
        rules = BucketRules(axes, dict(shared or {}), self._limit_bytes, self._gradient_dtype, Communicator())
        ledger = BucketLedger(self._entries, rules)
        try:
            self._adopt(ledger)
        except BaseException:
            ledger.close()
            raise
        ledger.begin_step()
        self._ledger = ledger

    def unbind(self) -> None:
        """Remove every hook, free the buffers and leave the parameters without gradients. Does not communicate.

        Raises:
            GradientSyncError: If not bound.
        """
        self._bound("unbind").close()
        self._ledger = None

    # ---- one step ----

    def set_required_accumulations(
        self, count: int | None, overrides: Mapping[torch.Tensor, int | None] | None = None
    ) -> None:
        """Change how many accumulations make a parameter done, from this step on.

        Args:
            count: Accumulations of each parameter; None: unknown.
            overrides: Other counts for some parameters, for example of one that is used by two stages of this rank.

        Raises:
            GradientSyncError: If a parameter has had more already.
            ValueError: If a count is negative.
        """
        self._required = {parameter: _checked_count(n) for parameter, n in (overrides or {}).items()}
        self._default_required = _checked_count(count)
        if self._ledger is not None:
            with self._ledger.lock:
                self._adopt(self._ledger)
                self._ledger.advance()

    def mark_done(self, parameters: Iterable[torch.Tensor]) -> None:
        """Say that these parameters have had all accumulations of this step, whatever was counted.

        For gradients that come without hooks (``autograd.grad``), and where the count is not known beforehand.
        Parameters that the synchronizer does not hold are skipped.

        Raises:
            GradientSyncError: If not bound, or inside :meth:`no_sync`.
        """
        ledger = self._syncing("mark_done")
        with ledger.lock:
            ledger.mark(parameters)

    def expect_repeats(self, parameters: Iterable[torch.Tensor], times: int) -> None:
        """Say that these parameters have just had the first of ``times`` equal backwards of this step.

        Where counts are unknown beforehand, this lets buckets leave inside the last backward instead of after it.
        Parameters that the first backward did not reach stay unknown until :meth:`mark_done` or :meth:`finish`.

        Args:
            parameters: Parameters of the part whose first backward is over; others are skipped.
            times: How many backwards of that part the step has.

        Raises:
            GradientSyncError: If not bound, or inside :meth:`no_sync`.
            ValueError: If ``times`` is not a positive number.
        """
        ledger = self._syncing("expect_repeats")
        if times < 1:
            raise ValueError(f"times is {times}; give the number of backwards in the step, at least 1")
        with ledger.lock:
            ledger.extrapolate(parameters, times)

    def hold(self) -> None:
        """Keep this rank's buckets here until :meth:`release` or :meth:`finish`, in a step that may have to run again.

        Raises:
            GradientSyncError: If not bound.
        """
        self._bound("hold").held = True

    def release(self) -> None:
        """Let the buckets go that are ready.

        Raises:
            GradientSyncError: If not bound.
        """
        ledger = self._bound("release")
        with ledger.lock:
            ledger.held = False
            ledger.advance()

    def recount(self) -> None:
        """Count this step's accumulations from zero, for a step that runs again. Gradients stay as they are.

        Raises:
            GradientSyncError: If not bound, or if gradients are being reduced already.
        """
        ledger = self._bound("recount")
        with ledger.lock:
            leaving = [slot.name for bucket in ledger.order if bucket.is_reducing for slot in bucket.slots]
            if leaving:
                raise GradientSyncError(
                    f"recount() while gradients are being reduced: {join_names(leaving)}. Call wait(), or abandon() to "
                    "drop the step"
                )
            ledger.begin_step()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate only: inside this block accumulations neither count nor start a reduction.

        Raises:
            GradientSyncError: If not bound.
        """
        ledger = self._bound("no_sync")
        before, ledger.accumulate_only = ledger.accumulate_only, True
        try:
            yield
        finally:
            ledger.accumulate_only = before

    def finish(self) -> None:
        """Say that the step's backwards are over: buckets not yet launched are launched now, in the agreed order.

        A parameter without a gradient takes part with zeros; if no replica has one, its gradient ends as None.

        Raises:
            GradientSyncError: If not bound, or inside :meth:`no_sync`.
        """
        ledger = self._syncing("finish")
        with ledger.lock:
            if not ledger.finished:
                self._adopt(ledger)
                ledger.finished = True
                ledger.advance(flush=True)

    def wait(self) -> None:
        """Make the reduced gradients visible to what follows: on CUDA on the current stream, without the host waiting.

        Raises:
            GradientSyncError: If not bound, if a parameter had more accumulations than required, or if parameters lack
                some and :meth:`finish` was not called. The gradients are then as they were.
        """
        ledger = self._syncing("wait")
        with ledger.lock:
            ledger.raise_on_surplus()
            if not ledger.finished:
                ledger.raise_on_unready()
                self.finish()
            ledger.complete()

    def zero_grad(self, set_to_none: bool = False) -> None:
        """Drop all gradients and begin a step. ``optimizer.zero_grad()`` will do as well.

        Args:
            set_to_none: Leave None, as optimizers do by default, where zeros in the buffers would be attached.

        Raises:
            GradientSyncError: If not bound, or between the start of a reduction and :meth:`wait`.
        """
        ledger = self._bound("zero_grad")
        with ledger.lock:
            launched = [bucket for bucket in ledger.order if bucket.launched]
            if launched:
                raise GradientSyncError(
                    f"zero_grad() while {len(launched)} of {len(ledger.order)} buckets are being reduced; call wait() "
                    "first, or abandon() to drop the step"
                )
            self._adopt(ledger)
            ledger.zero(set_to_none)
            ledger.begin_step()

    def abandon(self) -> None:
        """Give a step up: end its reductions and drop its gradients. Collective over the replicas.

        Raises:
            GradientSyncError: If not bound.
        """
        ledger = self._bound("abandon")
        with ledger.lock:
            ledger.advance(flush=True)
            ledger.complete()
            ledger.zero(set_to_none=True)

    # ---- gradients ----

    def scale_gradients(self, factor: float | torch.Tensor) -> None:
        """Multiply every gradient in place; a 0-dim tensor keeps the host from waiting for the device."""
        scale_gradients(self._bound("scale_gradients").slots, factor)

    def lower_gradients(self) -> None:
        """Give the optimizer gradients in the element type of their parameters.

        Most optimizers of torch refuse float32 gradients of bfloat16 parameters. Call it after clipping; the next
        accumulation or ``zero_grad`` returns to ``gradient_dtype``.
        """
        for _, slot in self._bound("lower_gradients").slots.values():
            slot.lower_dtype()

    def _adopt(self, ledger: BucketLedger) -> None:
        ledger.adopt()
        ledger.require(self._default_required, self._required)

    def _bound(self, method: str) -> BucketLedger:
        if self._ledger is None:
            raise GradientSyncError(f"{method}() needs a bound synchronizer; call bind(mesh=...) first")
        return self._ledger

    def _syncing(self, method: str) -> BucketLedger:
        ledger = self._bound(method)
        if ledger.accumulate_only:
            raise GradientSyncError(f"{method}() inside no_sync(); leave the block before the step's last backward")
        return ledger


def _checked_count(count: int | None) -> int | None:
    if count is not None and (isinstance(count, bool) or not isinstance(count, int) or count < 0):
        raise ValueError(f"required accumulations are {count!r}; give a whole number from 0, or None if unknown")
    return count
