"""Asynchronous checkpointing: saves the state of a run while training continues.

Tensors are copied to the host while the next forward and backward passes compute; only the
optimizer step, which changes them, waits for the copy. A background thread writes. No thread
communicates: ranks exchange their progress together with the values they reduce at each step anyway
(`report_progress`, `handle_reports`), and once all ranks have written their files rank 0 commits
the checkpoint. At most one save is in progress; a failed save is raised on all ranks at the next
step.
"""

from __future__ import annotations

import errno
import math
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ranvier.buckets.sparsity import CompressedTensor
from ranvier.checkpoint import checksummed_file, directory, rank_file
from ranvier.checkpoint.checksummed_file import LazyBytes
from ranvier.checkpoint.directory import RetentionPolicy
from ranvier.checkpoint.rank_file import FileLayout, HostBuffer, SparseBytes
from ranvier.comm.consensus import broadcast_text, max_over_ranks, run_and_raise_together
from ranvier.errors import INTERNAL_EXIT_CODE, OtherRankError, RanvierError, WriteError
from ranvier.grid import Grid
from ranvier.sharding import ShardedStateDict
from ranvier.system.terminal import print

T = TypeVar("T")
JOIN_SECONDS = 0.5
"""Seconds for which a rank waits for its thread before it reports its progress to the others."""
RETRY_ERRNOS = (errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of the file system that may be transient and are retried once."""


class AsyncSaver:
    """Saves checkpoints of a run into a directory, one at a time."""

    def __init__(
        self, where: Path, grid: Grid, device: torch.device, keep: RetentionPolicy | None = None
    ) -> None:
        """Communicates: a number and a string over all axes."""
        self.folder, self.grid, self.device, self.retention = (
            where,
            grid,
            device,
            keep or RetentionPolicy(),
        )

        def make() -> None:
            try:
                if grid.rank == 0:
                    where.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise _explain_write_error(error, where.parent, 0) from None

        # Only rank 0 creates the directory, but a failure is raised on all ranks: otherwise the
        # others would hang in the broadcast below.
        run_and_raise_together(make, grid, device)
        # The nonce makes the temporary directories of this process distinct from the ones that
        # a killed run left behind.
        self.nonce = broadcast_text(os.urandom(4).hex(), grid, device)
        self.last_checkpoint: Path | None = None
        """The last checkpoint that was committed, as far as this rank knows."""
        self.step = -1
        """The step that was saved last, or is being saved."""
        self.check_directory: Callable[[], None] = lambda: None
        """Raises if the run directory is gone; called on rank 0, twice per save."""
        self.num_repeats = 0
        """Number of writes that failed and were retried."""
        self._host_buffer = HostBuffer(device)
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None
        self._copies_done = threading.Event()
        self._copy_event: torch.cuda.Event | None = None
        self._reads_in_place = False
        """Whether some tensors are written directly from host memory, without a copy."""
        self._error: BaseException | None = None
        self._phase = ""
        """Current phase of the save: empty (idle), writing or committing."""
        self._save_number = 0
        """Number of saves started, equal on all ranks: reports about another save are ignored."""
        self._facts: dict[str, Any] = {}
        self._extra_files: Sequence[Path] = ()
        self._needed_bytes = 0
        """Approximate size of the checkpoint in bytes."""

    # ---- start of a save ----------------------------------------------------------------

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        facts: Mapping[str, Any],
        *,
        also: Sequence[Path] = (),
        sparse: Mapping[str, CompressedTensor] | None = None,
    ) -> None:
        """Start a save; the tensors must not change before `wait_for_copies` returns.

        also: files to fsync before the checkpoint is committed. sparse: tensors of the state that
        have only their nonzero values in memory; they are written densely, with their zeros.
        """
        assert not self._phase, f"step {step}, while {self._phase} step {self.step}"
        self.step, self._phase, self._facts, self._extra_files = step, "writing", dict(facts), also
        self._save_number += 1
        # Ranks that hold only padding of a tensor do not write it.
        mine = {name: x for name, x in state.items() if _has_elements(*x)}
        layout = FileLayout.from_state(mine)
        some = dict(sparse or {})
        try:
            stretched = {
                layout.offsets[n]: (x, mine[n][0].dtype) for n, x in some.items() if n in mine
            }
            finite, data = self._start_copies(rank_file.flat_runs(mine, layout, some), stretched)

            def work() -> None:
                # The check runs on the thread: reading the result of the device here would stall
                # training.
                if not finite():
                    raise rank_file.non_finite_error(mine, some, step)
                self._write_rank_file(mine, layout, data)

            self._start_thread(work)
        # Kept until the next report: raising here would leave the other ranks waiting in a
        # collective.
        except (MemoryError, RuntimeError) as error:
            self._error = error
            # No thread will run, so nothing else would wake a caller of `wait_for_copies`.
            self._copies_done.set()

    def add_facts(self, **facts: Any) -> None:
        """Add facts that became known after the save started; rank 0 commits them."""
        self._facts |= facts

    def _start_copies(
        self,
        flats: list[tuple[int, Tensor]],
        sparse: Mapping[int, tuple[CompressedTensor, torch.dtype]],
    ) -> tuple[Callable[[], bool], list[LazyBytes]]:
        """Start the copies to the host; return a wait function that says whether all are finite.

        Also returns the bytes of the file: copies, or tensors in host memory, which must not change
        until they are written. sparse: compressed tensors by their byte offset in the file.
        """
        direct = [rank_file.is_read_in_place(flat, self.device) for _, flat in flats]
        sizes = [
            0 if rests else flat.nbytes for rests, (_, flat) in zip(direct, flats, strict=True)
        ]
        # Offsets in the host buffer, which holds the copied tensors only, in the order of the file.
        begins = [sum(sizes[:i]) for i in range(len(sizes))]
        self._host_buffer.ensure_size(sum(sizes))
        moved = [
            (b, x) for b, (_, x), rests in zip(begins, flats, direct, strict=True) if not rests
        ]
        data = list[LazyBytes]()
        for begin, size, (at, flat), rests in zip(begins, sizes, flats, direct, strict=True):
            if rests:
                own = [memoryview(flat.view(torch.uint8).numpy().data)]
            else:
                own = []
            here = own or self._host_buffer.byte_views(begin, size)
            data += [SparseBytes(here, *sparse[at])] if at in sparse else here
        self._reads_in_place = any(direct)
        # Cleared before any copy starts; the thread sets it when it is done or fails.
        self._copies_done.clear()
        if self.device.type == "cuda":
            wait = self._copy_on_device
        else:
            wait = self._copy_on_host
        return wait(moved, [x for (_, x), rests in zip(flats, direct, strict=True) if rests]), data

    def _copy_on_host(
        self, flats: list[tuple[int, Tensor]], rest: Sequence[Tensor]
    ) -> Callable[[], bool]:
        """Return a function that copies CPU tensors; the background thread calls it."""

        def copied() -> bool:
            for begin, flat in flats:
                self._host_buffer.copy_tensor(begin, flat)
            peak = rank_file.max_magnitude([flat for _, flat in flats] + [*rest])
            # Tensors that are read in place must stay unchanged until the file is written; then the
            # thread itself sets the event at its end.
            if not rest:
                self._copies_done.set()
            return bool(peak.isfinite())

        self._copy_event = None
        return copied

    def _copy_on_device(
        self, flats: list[tuple[int, Tensor]], rest: Sequence[Tensor]
    ) -> Callable[[], bool]:
        """Enqueue copies on a side stream; return a function that waits for them."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        # The copies must see the results of the optimizer step that is still queued on the main
        # stream.
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        # Pinned, so that the copy of the flag does not block the host either.
        good = torch.empty((), dtype=torch.bool, pin_memory=True)
        with torch.cuda.stream(self._stream):
            for begin, flat in flats:
                self._host_buffer.copy_tensor(begin, flat)
            peak = rank_file.max_magnitude(flat for _, flat in flats)
            good.copy_(peak.isfinite(), non_blocking=True)
            arrived = self._copy_event = torch.cuda.Event()
            arrived.record()

        def came() -> bool:
            arrived.synchronize()
            # The references kept the caching allocator from reusing this memory while the side
            # stream read it.
            flats.clear()
            # Tensors in host memory are checked here, on the thread.
            return bool(good) and bool(rank_file.max_magnitude(rest).isfinite())

        return came

    def wait_for_copies(self) -> None:
        """Wait until the saved tensors may change; on CUDA the stream waits, not the host."""
        if self._phase != "writing":
            return
        # The file is written from this memory, so the host has to wait for the thread.
        if self._reads_in_place:
            self._copies_done.wait()
        if self._copy_event is not None:
            # A wait must not be captured into a CUDA graph; the caller waits before it replays one.
            if not torch.cuda.is_current_stream_capturing():
                torch.cuda.current_stream(self.device).wait_event(self._copy_event)
        else:
            self._copies_done.wait()

    # ---- background thread --------------------------------------------------------------

    def _start_thread(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            # Any failure is kept for `report_progress`: an exception of a thread would only be
            # printed.
            except BaseException as error:
                self._error = error
            # Even a failed save must wake a caller that waits for the copies.
            finally:
                self._copies_done.set()

        # A daemon: a hanging file system must not keep the process from exiting.
        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_rank_file(
        self, state: ShardedStateDict, layout: FileLayout, data: Sequence[LazyBytes]
    ) -> None:
        """Write the file of this rank, with one retry."""
        here = directory.temporary_path(self.folder, self.step, self.nonce)
        self._needed_bytes = (len(layout.header) + layout.data_bytes) * self.grid.world_size

        def once() -> None:
            if self.grid.rank == 0:
                self.check_directory()
                directory.remove_leftovers(self.folder, self.nonce)
                self._warn_low_space()
            # Any rank may be the first to create the directory.
            here.mkdir(exist_ok=True)
            # Files are created with O_EXCL, so a retry has to remove what the first attempt left.
            for name in rank_file.rank_file_names(self.grid.rank):
                (here / name).unlink(missing_ok=True)
            rank_file.write_rank_file(here, self.grid.rank, state, layout, data)

        self._try_twice(once)

    def _try_twice(self, work: Callable[[], T]) -> T:
        """Call `work`, and once more if the error may be transient; explain the final error."""
        try:
            return work()
        except OSError as error:
            try:
                if error.errno not in RETRY_ERRNOS:
                    raise
                self.num_repeats += 1
                print(
                    f"Rank {self.grid.rank}: {self.folder}: {error.strerror}; retrying the write.",
                    file=sys.stderr,
                )
                return work()
            except OSError as last:
                raise _explain_write_error(last, self.folder, self._needed_bytes) from None

    def _warn_low_space(self) -> None:
        """Warn before writing if the disk is nearly full."""
        free = shutil.disk_usage(self.folder).free
        needed = self._needed_bytes
        # A margin of 10 %, as the size is approximate.
        if free < 1.1 * needed:
            print(
                f"Warning: {self.folder} has {free:,} bytes free, but the checkpoint of step "
                f"{self.step} needs about {needed:,}. If the write fails, the run ends; earlier "
                "checkpoints remain. Free disk space, or use a smaller checkpoint.keep_latest.",
                file=sys.stderr,
            )

    def _commit_checkpoint(self) -> None:
        """Turn the rank files into a checkpoint, then prune old checkpoints."""
        where = self.folder
        step = self.step
        for path in self._extra_files:
            # A run can resume without these files.
            with suppress(OSError):
                checksummed_file.fsync_path(path)
        here = directory.temporary_path(where, step, self.nonce)
        self.check_directory()
        # The order matters: manifest, rename, fsync of the parent, and only then the pointer, so
        # that a crash at any point leaves the previous checkpoint valid.
        self._try_twice(
            lambda: directory.write_manifest(here, step, self.grid.degrees, self._facts)
        )
        final = self._try_twice(lambda: directory.publish_checkpoint(where, here, step))
        self._try_twice(lambda: checksummed_file.fsync_path(where))
        self._try_twice(lambda: directory.write_latest_pointer(where, final.name))
        self.last_checkpoint = final
        try:
            directory.prune_checkpoints(where, self.retention)
        # The checkpoint itself is safe; failing to prune only keeps more than requested.
        except (OSError, RanvierError) as error:
            print(f"Warning: old checkpoints were not removed: {error}", file=sys.stderr)

    # ---- agreement ----------------------------------------------------------------------

    def report_progress(self) -> tuple[int, int]:
        """Return the progress of the current save, and the exit code of a failure (0 if none).

        The progress is 3 while this rank writes its file, 2 when the file is written, 1 while rank
        0 commits the checkpoint and 0 when nothing is left, plus 4 times the number of the save. It
        is reduced with max over all ranks, so that the slowest rank of the newest save decides.
        """
        working = self._thread is not None and self._thread.is_alive()
        left = {"writing": 2, "committing": 0}.get(self._phase, 0) + int(working)
        return 4 * self._save_number + left, _exit_code(self._error)

    def handle_reports(self, left: int, failed: int) -> None:
        """Process the maximum of all reports; all ranks see the same values at the same point.

        Reports may be from an earlier step; one about a finished phase or save changes nothing.
        """
        number, left = divmod(left, 4)
        if failed:
            error = self._error
            self._error = None
            self._phase = ""
            # The thread may be about to create the directory that another rank has just removed.
            if self._thread is not None:
                self._thread.join(JOIN_SECONDS)
            here = directory.temporary_path(self.folder, self.step, self.nonce)
            # All ranks try to remove it: the last one succeeds.
            shutil.rmtree(here, ignore_errors=True)
            # The rank that failed raises the cause; the others raise its exit code.
            if error is not None:
                raise error
            raise OtherRankError(failed)
        if number != self._save_number:
            return
        # The maximum is 2 only when no rank is still writing.
        if self._phase == "writing" and left == 2:
            self._phase = "committing"
            self._thread = None
            if self.grid.rank == 0:
                self._start_thread(self._commit_checkpoint)
        elif self._phase == "committing" and left == 0:
            self._phase = ""
            self._thread = None

    def finish_saving(self) -> Path | None:
        """Wait for the save in progress, on all ranks; return the last checkpoint (on rank 0).

        Communicates: three numbers over all axes, a few times.
        """
        self.wait_for_save(math.inf)
        return self.last_checkpoint

    def wait_for_save(self, seconds: float) -> bool:
        """Wait up to `seconds` for the save in progress; return whether it ended, on all ranks.

        Communicates: as `finish_saving`.
        """
        limit = time.monotonic() + seconds
        while self._phase:
            if self._thread is not None:
                # Not longer: the other ranks wait in a collective, which has its own timeout.
                self._thread.join(max(min(limit - time.monotonic(), JOIN_SECONDS), 0.0))
            mine = (*self.report_progress(), int(time.monotonic() > limit))
            # Whether the time is up is reduced as well: clocks differ, and all ranks must leave the
            # loop in the same iteration.
            left, failed, late = (max_over_ranks(n, self.grid, self.device) for n in mine)
            self.handle_reports(left, failed)
            if late and self._phase:
                return False
        return True


def save_and_wait(
    where: Path,
    step: int,
    state: ShardedStateDict,
    facts: Mapping[str, Any],
    grid: Grid,
    device: torch.device | str = "cpu",
    *,
    keep: RetentionPolicy | None = None,
) -> Path | None:
    """Save a checkpoint and wait for it; its path on rank 0. Communicates: see `AsyncSaver`."""
    saver = AsyncSaver(where, grid, torch.device(device), keep)
    saver.save(step, state, facts)
    return saver.finish_saving()


def _has_elements(tensor: Tensor, place: Any) -> bool:
    """Whether a shard has elements of the global tensor, or that tensor is empty."""
    return bool(place.to_boxes()) or 0 in place.global_shape


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, RanvierError):
        return error.exit_code
    return INTERNAL_EXIT_CODE


def _explain_write_error(error: OSError, where: Path, needed: int) -> WriteError:
    """Translate an error of the file system into a `WriteError` with sizes in bytes."""
    try:
        free = f"{shutil.disk_usage(where).free:,} bytes are free"
    except OSError as gone:
        free = f"the directory cannot be reached ({gone.strerror})"
    return WriteError(
        f"{error.filename or where}: {error.strerror}. A checkpoint needs about {needed:,} bytes; "
        f"{free}. Free disk space, make the directory writable, or choose another "
        "train.output_dir. Earlier checkpoints are unchanged."
    )
