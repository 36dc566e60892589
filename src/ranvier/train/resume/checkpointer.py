"""The checkpoints of a run: saves its state in the background and resumes from one of them.

`checkpointing` knows what a checkpoint contains and loads it, `AsyncSaver` writes it.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from ranvier.checkpoint.async_saver import AsyncSaver
from ranvier.checkpoint.directory import RetentionPolicy, find_checkpoints
from ranvier.checkpoint.manifest import read_manifest
from ranvier.comm.consensus import broadcast_text
from ranvier.config.run import RunConfig
from ranvier.data.run_data import RunData
from ranvier.errors import OtherRankError
from ranvier.system.terminal import print
from ranvier.train import lora
from ranvier.train.resume import checkpointing
from ranvier.train.resume.open_directory import OpenDirectory
from ranvier.train.state import TrainState

SAVE_WAIT_SECONDS = 5.0
"""Seconds to wait for the previous checkpoint when the next is due; after that it is skipped."""


class Checkpointer:
    """Saves and resumes the state of a run; its saver is built when it is first needed."""

    def __init__(self, run: RunConfig, state: TrainState, data: RunData) -> None:
        """data: a run resumes on the same data only, which is compared by fingerprint."""
        self.run = run
        self.state = state
        self.data = data
        self.skipped_saves = 0
        """Checkpoints that were due while the previous one was still being written."""
        self.directory = OpenDirectory()
        """The output directories, held open on rank 0; the run ends if they disappear."""
        self._saver: AsyncSaver | None = None
        self._steps_read = state.step
        """Steps whose metrics the host has read, so that the guard has judged them."""

    @property
    def checkpoint_dir(self) -> Path:
        """The directory that holds the checkpoints."""
        return Path(self.run.train.output_dir) / "checkpoints"

    @property
    def saver(self) -> AsyncSaver:
        """The checkpoint saver. Communicates: a text over all axes, on first access."""
        if self._saver is None:
            config = self.run.checkpoint
            keep = RetentionPolicy(config.keep_latest, config.keep_interval, config.keep_best)
            state = self.state
            self._saver = AsyncSaver(self.checkpoint_dir, state.grid, state.device, keep)
            # An update must not overwrite tensors that a background save is still copying.
            state.optimizer.before_update = self._saver.wait_for_copies
        return self._saver

    def watch_directory(self, directory: OpenDirectory) -> None:
        """End the run without saving once these directories are gone (on rank 0)."""
        self.directory = directory
        if self._saver is not None:
            self._saver.check_directory = directory.check_present

    # ---- saves --------------------------------------------------------------------------

    def save(self, *, wait: bool) -> Path | None:
        """Save the state, unless the previous save takes too long; return the latest checkpoint.

        wait: until the checkpoint is written; otherwise training continues meanwhile.
        Communicates: see `AsyncSaver`.
        """
        saver = self.saver
        state = self.state
        if not saver.wait_for_save(math.inf if wait else SAVE_WAIT_SECONDS):
            self._skip_save(saver.step)
        # The final save may find that the last step has been saved already.
        elif saver.step != state.step:
            mine, sparse = checkpointing.tensors_to_write(state)
            facts = checkpointing.checkpoint_facts(self.run, state, self.data.fingerprint)
            also = [Path(self.run.train.output_dir) / "metrics.jsonl"]
            saver.save(state.step, mine, facts, also=also, sparse=sparse)
            # Otherwise `record_read_step` adds the guard state once the step has been read.
            if self._steps_read == state.step:
                saver.add_facts(guard=state.guard.state_dict())
        if wait:
            return saver.finish_saving()
        return saver.last_checkpoint

    def _skip_save(self, before: int) -> None:
        self.skipped_saves += 1
        if self.state.grid.rank == 0:
            print(
                f"Skipped the checkpoint of step {self.state.step}: step {before} is still being "
                "written. Use a larger checkpoint.interval or a faster disk.",
                file=sys.stderr,
                flush=True,
            )

    def record_read_step(self, steps_read: int) -> None:
        """Note that the guard has judged this many steps; a save of the last one gets its state."""
        self._steps_read = steps_read
        # That save began before the loss of its step was known.
        if self._saver is not None and self._saver.step == steps_read:
            self._saver.add_facts(guard=self.state.guard.state_dict())

    def wait_for_copies(self) -> None:
        """Wait until the tensors of a save may change; see `AsyncSaver.wait_for_copies`."""
        if self._saver is not None:
            self._saver.wait_for_copies()

    def finish_saving(self) -> None:
        """Wait for the save in progress. Communicates: see `AsyncSaver.finish_saving`."""
        if self._saver is not None:
            self._saver.finish_saving()

    def report_status(self) -> tuple[int, int]:
        """Progress of this rank's part of a checkpoint, and the exit code of a failure."""
        left, failed = (0, 0) if self._saver is None else self._saver.report_progress()
        return left, failed or self.directory.exit_code()

    def handle_status(self, left: int, failed: int) -> None:
        """Process the maximum of all ranks' reports; a failure on one rank ends all of them."""
        if failed:
            # The rank that saw the failure raises its own error; the others an OtherRankError.
            self.directory.check_present()
        if self._saver is not None:
            self._saver.handle_reports(left, failed)
        elif failed:
            raise OtherRankError(failed)

    # ---- resuming -----------------------------------------------------------------------

    def latest_checkpoints(self) -> list[Path]:
        """The checkpoints, newest first. Communicates: broadcast of rank 0's list."""
        self.finish_saving()
        mine = [str(path) for path in find_checkpoints(self.checkpoint_dir)[::-1]]
        shared = broadcast_text(json.dumps(mine), self.state.grid, self.state.device)
        return [*map(Path, json.loads(shared))]

    def describe_latest(self) -> str:
        """The checkpoint to resume from, as text. Communicates: see `AsyncSaver.finish_saving`."""
        self.finish_saving()
        return next(
            (str(path) for path in find_checkpoints(self.checkpoint_dir)[::-1]),
            "the beginning (no checkpoint was saved)",
        )

    def resume_from(self, *candidates: Path) -> list[str]:
        """Resume from the first undamaged checkpoint; return lines on the ones that were not used.

        Communicates: see `checkpointing.load_first_undamaged`; a text over all axes.
        """
        run = self.run
        state = self.state
        checkpoint, lines = checkpointing.load_first_undamaged(
            run, state, self.data.fingerprint, candidates
        )
        self._steps_read = state.step
        base = lora.is_base_checkpoint(read_manifest(checkpoint), run)
        own = checkpoint.parent.resolve() == self.checkpoint_dir.resolve()
        if run.checkpoint.interval >= 0 and own and not base:
            # This step is saved already.
            self.saver.step = state.step
        if own:
            after = state.step
            why = "the run resumes from an earlier step"
        else:
            after = -1
            why = "the run resumes from another run"
        # Later checkpoints belong to a history that is discarded; a restart must not find them.
        moved = checkpointing.set_aside_checkpoints(
            self.checkpoint_dir, after, state.grid, state.device
        )
        return lines + [f"set aside, because {why}: {path}" for path in moved]
