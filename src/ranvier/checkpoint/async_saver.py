"""Saver: saves a run while it goes on.

Tensors are copied to the host while the next forward and backward passes compute; only what changes
them (the optimizer step) waits for the copy. A thread writes. No thread communicates: ranks tell
each other how far they are with what they exchange at each step anyway (`report`, `hear`), and once
all parts are written rank 0 makes them a checkpoint. At most one save is under way; its failure is
an error of all ranks at the next step.
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
"""Seconds that a rank waits for its thread before it tells the others that it is alive."""
RETRY_ERRNOS = (errno.EIO, errno.EAGAIN, errno.ESTALE, errno.ETIMEDOUT)
"""Errors of a disk that may not come twice."""


class AsyncSaver:
    """Saves checkpoints of a run into a directory, one at a time."""

    def __init__(
        self, where: Path, grid: Grid, device: torch.device, keep: RetentionPolicy | None = None
    ) -> None:
        """Communicates: a number and a word over all axes."""
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

        run_and_raise_together(make, grid, device)
        self.nonce = broadcast_text(os.urandom(4).hex(), grid, device)
        self.last_checkpoint: Path | None = None
        """The last checkpoint that was committed, as far as this rank knows."""
        self.step = -1
        """The step that was saved last, or is being saved."""
        self.check_directory: Callable[[], None] = lambda: None
        """Refuses to write where nobody would find it; asked on rank 0, of each save twice."""
        self.num_repeats = 0
        """Writes that failed and were repeated."""
        self._host_buffer = HostBuffer(device)
        self._stream: torch.cuda.Stream | None = None
        self._thread: threading.Thread | None = None
        self._copies_done = threading.Event()
        self._copy_event: torch.cuda.Event | None = None
        self._reads_in_place = False
        """Whether what is written is read from where it rests."""
        self._error: BaseException | None = None
        self._phase = ""
        """What is under way: nothing, writing or committing."""
        self._save_number = 0
        """Saves that were begun, the same on all ranks: what is heard of another is of no use."""
        self._facts: dict[str, Any] = {}
        self._extra_files: Sequence[Path] = ()
        self._needed_bytes = 0
        """Bytes of the checkpoint, about."""

    # ---- beginning ----------------------------------------------------------------------

    def save(
        self,
        step: int,
        state: ShardedStateDict,
        facts: Mapping[str, Any],
        *,
        also: Sequence[Path] = (),
        sparse: Mapping[str, CompressedTensor] | None = None,
    ) -> None:
        """Begin to save; what this rank writes must not change before `changing` was called.

        also: files to be on disk when it is committed. sparse: tensors of the state that are not
        there but for some numbers; in the file they have their zeros.
        """
        assert not self._phase, f"step {step}, while {self._phase} step {self.step}"
        self.step, self._phase, self._facts, self._extra_files = step, "writing", dict(facts), also
        self._save_number += 1
        mine = {name: x for name, x in state.items() if _has_elements(*x)}
        layout = FileLayout.from_state(mine)
        some = dict(sparse or {})
        try:
            stretched = {
                layout.offsets[n]: (x, mine[n][0].dtype) for n, x in some.items() if n in mine
            }
            finite, data = self._start_copies(rank_file.flat_runs(mine, layout, some), stretched)

            def work() -> None:
                if not finite():
                    raise rank_file.non_finite_error(mine, some, step)
                self._write_rank_file(mine, layout, data)

            self._start_thread(work)
        except (MemoryError, RuntimeError) as error:  # all ranks must learn of it
            self._error = error
            self._copies_done.set()  # nobody copies: who waits for that would wait for ever

    def add_facts(self, **facts: Any) -> None:
        """Add facts that became known after the save began; rank 0 commits with them."""
        self._facts |= facts

    def _start_copies(
        self,
        flats: list[tuple[int, Tensor]],
        sparse: Mapping[int, tuple[CompressedTensor, torch.dtype]],
    ) -> tuple[Callable[[], bool], list[LazyBytes]]:
        """Copies on their way; a wait for them that tells whether all numbers are finite.

        And the bytes of the file: copies, or what rests on the host, which must then not change
        until it is written. sparse: by their first byte in the file.
        """
        direct = [rank_file.is_read_in_place(flat, self.device) for _, flat in flats]
        sizes = [
            0 if rests else flat.nbytes for rests, (_, flat) in zip(direct, flats, strict=True)
        ]
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
        self._copies_done.clear()
        if self.device.type == "cuda":
            wait = self._copy_on_device
        else:
            wait = self._copy_on_host
        return wait(moved, [x for (_, x), rests in zip(flats, direct, strict=True) if rests]), data

    def _copy_on_host(
        self, flats: list[tuple[int, Tensor]], rest: Sequence[Tensor]
    ) -> Callable[[], bool]:
        """A thread copies."""

        def copied() -> bool:
            for begin, flat in flats:
                self._host_buffer.copy_tensor(begin, flat)
            peak = rank_file.max_magnitude([flat for _, flat in flats] + [*rest])
            if not rest:
                self._copies_done.set()
            return bool(peak.isfinite())

        self._copy_event = None
        return copied

    def _copy_on_device(
        self, flats: list[tuple[int, Tensor]], rest: Sequence[Tensor]
    ) -> Callable[[], bool]:
        """A stream copies."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(self.device)
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
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
            flats.clear()  # until now nobody else may have their memory
            return bool(good) and bool(rank_file.max_magnitude(rest).isfinite())

        return came

    def wait_for_copies(self) -> None:
        """What was to be saved is about to change: wait for the copies; a device waits itself."""
        if self._phase != "writing":
            return
        if self._reads_in_place:
            self._copies_done.wait()
        if self._copy_event is not None:
            if not torch.cuda.is_current_stream_capturing():  # who replays a graph waits before
                torch.cuda.current_stream(self.device).wait_event(self._copy_event)
        else:
            self._copies_done.wait()

    # ---- behind the run -----------------------------------------------------------------

    def _start_thread(self, work: Callable[[], None]) -> None:
        def run() -> None:
            try:
                work()
            except BaseException as error:
                self._error = error
            finally:
                self._copies_done.set()

        self._thread = threading.Thread(target=run, name="checkpoint", daemon=True)
        self._thread.start()

    def _write_rank_file(
        self, state: ShardedStateDict, layout: FileLayout, data: Sequence[LazyBytes]
    ) -> None:
        """Write my part."""
        here = directory.temporary_path(self.folder, self.step, self.nonce)
        self._needed_bytes = (len(layout.header) + layout.data_bytes) * self.grid.world_size

        def once() -> None:
            if self.grid.rank == 0:
                self.check_directory()
                directory.remove_leftovers(self.folder, self.nonce)
                self._warn_low_space()
            here.mkdir(exist_ok=True)
            for name in rank_file.rank_file_names(self.grid.rank):
                (here / name).unlink(missing_ok=True)
            rank_file.write_rank_file(here, self.grid.rank, state, layout, data)

        self._try_twice(once)

    def _try_twice(self, work: Callable[[], T]) -> T:
        """Do it, a second time if the disk stumbled; what it cannot take is said in bytes."""
        try:
            return work()
        except OSError as error:
            try:
                if error.errno not in RETRY_ERRNOS:
                    raise
                self.num_repeats += 1
                print(
                    f"Rank {self.grid.rank}: {self.folder}: {error.strerror}; writing again.",
                    file=sys.stderr,
                )
                return work()
            except OSError as last:
                raise _explain_write_error(last, self.folder, self._needed_bytes) from None

    def _warn_low_space(self) -> None:
        """Say beforehand that space is short."""
        free = shutil.disk_usage(self.folder).free
        needed = self._needed_bytes
        if free < 1.1 * needed:
            print(
                f"Warning: {self.folder} has {free:,} bytes free; the checkpoint of step "
                f"{self.step} needs about {needed:,}.",
                file=sys.stderr,
            )

    def _commit_checkpoint(self) -> None:
        """Make the parts a checkpoint, then remove those that need not stay."""
        where = self.folder
        step = self.step
        for path in self._extra_files:
            with suppress(OSError):  # a run can go on without them
                checksummed_file.fsync_path(path)
        here = directory.temporary_path(where, step, self.nonce)
        self.check_directory()
        self._try_twice(
            lambda: directory.write_manifest(here, step, self.grid.degrees, self._facts)
        )
        final = self._try_twice(lambda: directory.publish_checkpoint(where, here, step))
        self._try_twice(lambda: checksummed_file.fsync_path(where))
        self._try_twice(lambda: directory.write_latest_pointer(where, final.name))
        self.last_checkpoint = final
        try:
            directory.prune_checkpoints(where, self.retention)
        except (OSError, RanvierError) as error:  # what is saved is saved; more is kept than asked
            print(f"Warning: old checkpoints were not removed: {error}", file=sys.stderr)

    # ---- agreement ----------------------------------------------------------------------

    def report_progress(self) -> tuple[int, int]:
        """For the others: how much is left to do of which save, and the exit code of what failed.

        3: my part is being written; 2: it is; 1: rank 0 makes the parts a checkpoint; 0: nothing;
        and 4 times the number of the save.
        """
        working = self._thread is not None and self._thread.is_alive()
        left = {"writing": 2, "committing": 0}.get(self._phase, 0) + int(working)
        return 4 * self._save_number + left, _exit_code(self._error)

    def handle_reports(self, left: int, failed: int) -> None:
        """Take note of the largest of all reports; all ranks hear the same at the same point.

        It may be of a step before: what it says of a phase or a save that is over changes nothing.
        """
        number, left = divmod(left, 4)
        if failed:
            error = self._error
            self._error = None
            self._phase = ""
            if self._thread is not None:  # it may be about to make the folder that another removed
                self._thread.join(JOIN_SECONDS)
            here = directory.temporary_path(self.folder, self.step, self.nonce)
            shutil.rmtree(here, ignore_errors=True)
            if error is not None:
                raise error
            raise OtherRankError(failed)
        if number != self._save_number:
            return
        if self._phase == "writing" and left == 2:
            self._phase = "committing"
            self._thread = None
            if self.grid.rank == 0:
                self._start_thread(self._commit_checkpoint)
        elif self._phase == "committing" and left == 0:
            self._phase = ""
            self._thread = None

    def finish_saving(self) -> Path | None:
        """Wait for the save that is under way, on all ranks; the last checkpoint (on rank 0).

        Communicates: three numbers over all axes, a few times.
        """
        self.wait_for_save(math.inf)
        return self.last_checkpoint

    def wait_for_save(self, seconds: float) -> bool:
        """Wait so long for the save that is under way; whether it has ended, on all ranks alike.

        Communicates: as `finish`.
        """
        limit = time.monotonic() + seconds
        while self._phase:
            if self._thread is not None:
                # Not longer: the others are waiting in a collective, which has a limit of its own.
                self._thread.join(max(min(limit - time.monotonic(), JOIN_SECONDS), 0.0))
            mine = (*self.report_progress(), int(time.monotonic() > limit))
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
    """Save a checkpoint and wait for it; its path on rank 0. Communicates: see `Saver`."""
    saver = AsyncSaver(where, grid, torch.device(device), keep)
    saver.save(step, state, facts)
    return saver.finish_saving()


def _has_elements(tensor: Tensor, place: Any) -> bool:
    """Whether a part has elements of the whole, or the whole has none."""
    return bool(place.to_boxes()) or 0 in place.global_shape


def _exit_code(error: BaseException | None) -> int:
    if error is None:
        return 0
    if isinstance(error, RanvierError):
        return error.exit_code
    return INTERNAL_EXIT_CODE


def _explain_write_error(error: OSError, where: Path, needed: int) -> WriteError:
    """An error of the disk for people, with the bytes it was about."""
    try:
        free = f"{shutil.disk_usage(where).free:,} bytes are free"
    except OSError as gone:
        free = f"it cannot be reached ({gone.strerror})"
    return WriteError(
        f"{error.filename or where}: {error.strerror}. A checkpoint needs about {needed:,} bytes; "
        f"{free}. Free space, make the "
        "directory writable or choose another train.out; checkpoints that were finished are as "
        "they were."
    )
