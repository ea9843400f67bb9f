"""What the ranks of a pipeline tell each other around a batch: the same batch before it, the worst status after it."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from d9d_lightning.errors import PartitionError, PipelineError, PlaceholderReadError, RankFailedError
from d9d_lightning.runtime.executor import Monitor
from d9d_lightning.runtime.groups import PipelineGroups, maximum_over
from d9d_lightning.stage.signature import Described, Signature
from d9d_lightning.values import StepStatus

__all__ = ["Agreement", "BatchMismatchError", "fingerprint"]

_NUMPY_DTYPES = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool}
)

PATIENCE_SECONDS = 1.0
"""How long a rank that has failed waits for the others before it says so through the store."""

_SAMPLE = 64
"""Elements of each tensor that a quick fingerprint looks at."""


class BatchMismatchError(PipelineError, RuntimeError):
    """The ranks of one pipeline were given different batches."""


def fingerprint(batch: Sequence[Described], *, thorough: bool) -> int:
    """A number that ranks with the same batch have in common.

    Args:
        batch: The slices of the batch.
        thorough: Look at every element instead of a sample. Tensors on an accelerator are only looked at then, since
            reading them makes the host wait.
    """
    text = hashlib.blake2b(digest_size=7)
    for described in batch:
        text.update(_text_of(described.microbatch.size, described.signature))
        for tensor in described.tensors:
            if tensor.layout is torch.strided and (thorough or tensor.device.type == "cpu"):
                text.update(_content(tensor.detach(), thorough))
    return int.from_bytes(text.digest(), "little")


@functools.lru_cache(maxsize=256)
def _text_of(size: int, signature: Signature) -> bytes:
    return f"{size}{signature}".encode()


def _content(tensor: Tensor, thorough: bool) -> bytes:
    if tensor.dtype in _NUMPY_DTYPES and type(tensor) is Tensor and tensor.is_cpu and not tensor.is_neg():
        values = tensor.numpy().reshape(-1)
        step = 1 if thorough or values.size <= _SAMPLE else values.size // _SAMPLE
        return values[::step].tobytes()
    flat = tensor.reshape(-1)
    if not thorough and flat.numel() > _SAMPLE:
        flat = flat[:: flat.numel() // _SAMPLE]
    if flat.numel() == 0:
        return b""
    return flat.cpu().contiguous().view(torch.uint8).numpy().tobytes()


class Agreement:
    """Small collectives over the control group of one pipeline; free where one process is alone.

    Args:
        groups: The pipeline's groups, or None.
        rank: This pipeline rank.
    """

    def __init__(self, groups: PipelineGroups | None, rank: int) -> None:
        self._groups = groups
        self._rank = rank
        self._batches = 0
        self._common: Exception | None = None
        self._first: tuple[bool, float, str] | None = None

    def is_common(self, error: BaseException) -> bool:
        """Whether all ranks, those of replicas included, raise because of this one, and the groups stay usable."""
        return error is self._common

    @contextmanager
    def with_replicas(self) -> Iterator[None]:
        """Around what the ranks of a pipeline do together: where one pipeline fails as a whole, its replicas raise too.

        An exception that this rank meets alone goes through at once, since nobody waits for it here.

        Raises:
            RankFailedError: A replica failed and this pipeline did not.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if error is not self._common:
                raise
            failure = error
        self._join(failure)

    def _join(self, failure: Exception | None) -> None:
        everyone = self._groups.everyone if self._groups is not None else None
        if everyone is not None and maximum_over([int(failure is not None)], everyone)[0]:
            own = None if failure is None or self._first is None else (*self._first, self._name())
            found: list[Any] = [None] * dist.get_world_size(everyone)
            dist.all_gather_object(found, own, group=everyone)
            if failure is None:
                *_, text, name = min(entry for entry in found if entry is not None)
                raise self._commonly(remote_error(f"{name}, of another replica,", text))
        if failure is not None:
            raise failure

    def _commonly(self, error: Exception) -> Exception:
        self._common = error
        return error

    def before(self, batch: Sequence[Described], needs_plan: bool) -> bool:
        """Whether some rank needs a new plan for this batch.

        Raises:
            BatchMismatchError: The ranks hold different batches.
        """
        if self._groups is None:
            return needs_plan
        self._batches += 1
        thorough = self._batches <= 3 or self._batches % 100 == 0
        own = fingerprint(batch, thorough=thorough)
        largest, negated_smallest, needed = self._groups.maximum([own, -own, int(needs_plan)])
        if largest != -negated_smallest:
            error = BatchMismatchError(
                f"the ranks of this pipeline were given different batches (batch {self._batches} of this run; this is "
                f"rank {self._rank}). Expected: the same samples in the same order, with the same random augmentation. "
                "Seed everything that the data set draws (seed_everything(..., workers=True)), or type "
                "D9DStrategy(broadcast_batches=True) to load on one rank and send to the others."
            )
            self._first = (False, time.time(), headline(error))
            raise self._commonly(error)
        return bool(needed)

    def compare(self, what: str, digest: str, error: Exception | None, monitor: Monitor | None = None) -> None:
        """Raise on every rank if one failed or made something different.

        Args:
            what: What was made.
            digest: It, in short.
            error: Why it was not made here.
            monitor: Told of the error where the others do not come: they may wait for this rank elsewhere, as a trace
                in lockstep does, and end by that.
        """
        if self._groups is None:
            if error is not None:
                raise error
            return
        self._first = None
        problem = None if error is None else f"while it made its {what}: {headline(error)}\n{describe(error)}"
        with _heard_if_alone(error, monitor):
            found = self._groups.gather((digest, problem))
        if error is not None:
            self._first = (is_secondhand(error), time.time(), str(problem))
            raise self._commonly(error)
        for rank, (_, problem) in enumerate(found):
            if problem is not None:
                raise self._commonly(remote_error(self._name(rank), problem))
        if any(other != digest for other, _ in found):
            different = PartitionError(
                f"ranks made different {what}s: {[other for other, _ in found]}. Expected: the same module and the "
                "same batch on every rank of a pipeline; check that the loader gives all ranks the same batches."
            )
            self._first = (False, time.time(), headline(different))
            raise self._commonly(different)

    def after(self, status: StepStatus, news: list[Any]) -> tuple[StepStatus, list[Any]]:
        """The worst status of all ranks, and what any of them has to tell, equal on all.

        Args:
            status: This rank's status.
            news: What this rank has to tell; rarely anything, and a step in which nobody has sends nothing for it.
        """
        if self._groups is None:
            return status, news
        worst, told = self._groups.maximum([int(status), int(bool(news))])
        found = [item for own in self._groups.gather(news) for item in own] if told else []
        return StepStatus(worst), found

    def _name(self, rank: int | None = None) -> str:
        """The process that plays a pipeline rank, by default this one, as launchers and logs number it."""
        rank = self._rank if rank is None else rank
        if self._groups is None:
            return "the only rank"
        process = dist.get_global_rank(self._groups.control, self._groups.process_of[rank])
        return f"rank {process}" if process == rank else f"rank {process} (pipeline rank {rank})"

    def raise_first(self, failure: Exception | None, where: str, failed_at: float) -> None:
        """After a step that failed somewhere: raise the own failure if it was the first, else tell of the first.

        A rank that goes on with the zeros of a failed one may fail too; that is not what the user wants to read.
        """
        own = self._first = None
        if failure is not None:
            text = f"in {where}: {headline(failure)}\n{describe(failure)}"
            own = (is_secondhand(failure), failed_at, self._rank, text)
            failure.add_note(f"({self._name()} failed in {where})")
        if self._groups is not None:
            secondhand, at, rank, text = min(entry for entry in self._groups.gather(own) if entry is not None)
            if rank != self._rank:
                raise self._commonly(remote_error(self._name(rank), text))
            self._first = (secondhand, at, text)
        raise self._commonly(failure or PipelineError("the step failed, but no rank said why"))


def is_secondhand(error: BaseException) -> bool:
    """Whether an error only passes on what another rank has said."""
    return isinstance(error, RankFailedError)


@contextlib.contextmanager
def _heard_if_alone(error: Exception | None, monitor: Monitor | None) -> Iterator[None]:
    """Report an error that every rank will raise anyway, if waiting for the others takes long."""
    # after the others an evaluation is computed in lockstep, and nothing is raised
    if error is None or monitor is None or isinstance(error, PlaceholderReadError | PartitionError):
        yield
        return
    timer = threading.Timer(PATIENCE_SECONDS, monitor.report, (error,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def headline(error: BaseException) -> str:
    """The kind of an error and the first line of its message."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"


def describe(error: BaseException) -> str:
    """The traceback of an error, as text."""
    return "".join(traceback.format_exception(error))


def remote_error(name: str, text: Any) -> RankFailedError:
    """The error that a rank raises because another one failed."""
    return RankFailedError(f"{name} failed first {text}")
