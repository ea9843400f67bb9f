"""The books of one binding: which bucket each parameter is in, what was counted, what is launched, in which order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch.utils.hooks import RemovableHandle

from d9d_lightning.errors import GradientSyncError
from d9d_lightning.gradients.agreement import agree_on_order
from d9d_lightning.gradients.binding import BucketRules, NamedParameter, build_buckets
from d9d_lightning.gradients.bucket import AbstractGradientBucket, SyncGradientBucket
from d9d_lightning.gradients.slot import GradientSlot

__all__: list[str] = []

_NAMES_SHOWN = 8


class BucketLedger:
    """Everything that lives from bind to unbind.

    Attributes:
        order: Buckets in launch order.
        slots: Bucket and slot of each parameter that has been bound.
        lock: Held while the books change; accumulations on several devices run in several threads.
        finished: The caller has said that the step's backwards are over.
        accumulate_only: Accumulations neither count nor launch.
        held: No bucket leaves before it is flushed.
    """

    def __init__(self, entries: Sequence[NamedParameter], rules: BucketRules) -> None:
        self.order: list[AbstractGradientBucket] = []
        self.slots: dict[torch.Tensor, tuple[AbstractGradientBucket, GradientSlot]] = {}
        self.lock = threading.RLock()
        self.finished = False
        self.accumulate_only = False
        self.held = False
        self._entries = entries
        self._rules = rules
        self._handles: list[RemovableHandle] = []
        self._next = 0
        self._is_fresh = True
        self._seen_ready: list[AbstractGradientBucket] = []
        self._surplus: list[GradientSlot] = []
        self._order_is_learned = False

    def adopt(self) -> None:
        """Make buckets for trainable parameters that have none: all of them at bind, later those unfrozen since."""
        entries = [e for e in self._entries if e.parameter.requires_grad and e.parameter not in self.slots]
        for bucket in build_buckets(entries, self._rules):
            self.order.append(bucket)
            for slot in bucket.slots:
                self.slots[slot.parameter] = (bucket, slot)
                self._handles.append(slot.listen(self._make_hook(bucket)))
            bucket.bind()
            self._order_is_learned = False

    def require(self, default: int | None, overrides: Mapping[torch.Tensor, int | None]) -> None:
        """Set how many accumulations make each parameter done."""
        for _, slot in self.slots.values():
            slot.required = overrides.get(slot.parameter, default)
            if slot.limit is not None and slot.count > slot.limit:
                self._surplus.append(slot)
        for bucket in self.order:
            bucket.refresh()
        self.raise_on_surplus()

    def mark(self, parameters: Iterable[torch.Tensor]) -> None:
        """Settle parameters by the caller's word."""
        self._open_step()
        for parameter in parameters:
            if parameter in self.slots:
                bucket, slot = self.slots[parameter]
                slot.marked = True
                bucket.settle(slot)
        self.advance()

    def extrapolate(self, parameters: Iterable[torch.Tensor], times: int) -> None:
        """Expect of each parameter ``times`` times what it has had; of one that has had nothing, nothing is known."""
        self._open_step()
        for parameter in parameters:
            if parameter in self.slots:
                bucket, slot = self.slots[parameter]
                slot.expected = slot.count * times or None
                if slot.done:
                    bucket.settle(slot)
        self.advance()

    def advance(self, flush: bool = False) -> None:
        """Launch the buckets that are due.

        Args:
            flush: Launch all that are left, ready or not.
        """
        self._seen_ready += [bucket for bucket in self.order if bucket.ready and bucket not in self._seen_ready]
        # In one order on all replicas, whatever order they become ready in: collectives match by their order.
        while self._next < len(self.order) and (flush or (not self.held and self._is_due(self._next))):
            self.order[self._next].launch()
            self._next += 1

    def _open_step(self) -> None:
        # What is frozen is known when the first gradient comes, not when the step before ends.
        if self._is_fresh:
            self._is_fresh = False
            for bucket in self.order:
                bucket.refresh()

    def _is_due(self, position: int) -> bool:
        # A bucket without expectations (all frozen) is ready from the start; it leaves with the next one that is.
        following = self.order[position:]
        return following[0].ready and any(bucket.ready and bucket.begun for bucket in following)

    def zero(self, set_to_none: bool) -> None:
        """Drop the gradients of all parameters, those of frozen ones too, as optimizers do."""
        for bucket in self.order:
            bucket.zero_grad(set_to_none)
        for entry in self._entries:
            if entry.parameter not in self.slots:
                entry.parameter.grad = None

    def complete(self) -> None:
        """Hand over all reduced gradients and begin the next step."""
        for bucket in self.order:
            bucket.mark_sync()
        self._learn_order()
        self.begin_step()

    def begin_step(self) -> None:
        """Count from zero."""
        self._next = 0
        self._is_fresh = True
        self.finished = False
        self.held = False
        self._surplus.clear()
        self._seen_ready.clear()
        for bucket in self.order:
            bucket.begin_step()

    def close(self) -> None:
        """Remove every hook and free the buffers."""
        for handle in self._handles:
            handle.remove()
        for bucket in self.order:
            bucket.unbind()
        self._rules.communicator.release()

    def raise_on_surplus(self) -> None:
        """Raise if a parameter was accumulated into after its reduction was due.

        Raises:
            GradientSyncError: Naming the parameters.
        """
        if self._surplus:
            raise GradientSyncError(
                "gradients were accumulated after their reduction was due, so the sum would be wrong: "
                f"{join_names(slot.progress for slot in self._surplus)}. Raise the count by "
                "set_required_accumulations(), or call mark_done() and finish() later; abandon() drops this step"
            )

    def raise_on_unready(self) -> None:
        """Raise if a parameter still waits for accumulations.

        Raises:
            GradientSyncError: Naming the parameters.
        """
        unready = [slot.progress for bucket in self.order for slot in bucket.unready_slots]
        if unready:
            raise GradientSyncError(
                f"gradients are not ready: {join_names(unready)}. Run the remaining backwards, or call finish() to "
                "say that they are over"
            )

    def _make_hook(self, bucket: AbstractGradientBucket) -> Callable[[GradientSlot], None]:
        def accumulated(slot: GradientSlot) -> None:
            with self.lock:
                self._on_accumulated(bucket, slot)

        return accumulated

    def _on_accumulated(self, bucket: AbstractGradientBucket, slot: GradientSlot) -> None:
        self._open_step()
        if bucket.launched or (slot.done and not self.accumulate_only):
            slot.count += 1
            self._surplus.append(slot)
            self.raise_on_surplus()
        bucket.absorb(slot)
        if self.accumulate_only:
            return
        slot.count += 1
        # A hook of the user that is still to come may change the gradient: it must not be on its way then.
        if slot.listens_last() and slot.done:
            bucket.settle(slot)
            if bucket.ready:
                self.advance()

    def _learn_order(self) -> None:
        """After the first step, launch in the order in which buckets became ready on the first replica."""
        movable = [b for b in self.order if isinstance(b, SyncGradientBucket) and all(a.average for a in b.axes)]
        if self._order_is_learned or len(movable) < 2:
            return
        self._order_is_learned = True
        axes = {bucket.axes for bucket in movable}
        if len(axes) > 1 or len(movable[0].axes) > 1:
            # Groups that share ranks could not agree on one order without talking to each other.
            return
        seen = [movable.index(bucket) for bucket in self._seen_ready if bucket in movable]
        order = agree_on_order(seen + [i for i in range(len(movable)) if i not in seen], movable[0].axes[0])
        self.order = [movable[index] for index in order] + [bucket for bucket in self.order if bucket not in movable]


def join_names(names: Iterable[str]) -> str:
    listed = list(names)
    more = f" and {len(listed) - _NAMES_SHOWN} more" if len(listed) > _NAMES_SHOWN else ""
    return ", ".join(listed[:_NAMES_SHOWN]) + more
