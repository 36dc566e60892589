"""Trainer: builds model and optimizer of a run and runs its training steps.

The same code runs on one process and on any grid; the batch of a step depends only on the run
config. The host never waits for the step it has just issued: metrics, health checks and the stop
signal of step k are read while step k + 1 runs.
"""

from __future__ import annotations

import gc
import json
import math
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier import trace
from ranvier.checkpoint.async_saver import AsyncSaver
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.comm import collectives
from ranvier.comm.consensus import broadcast_text, world_axis
from ranvier.config.run import RunConfig
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.data.dataset import RunData
from ranvier.data.loader import Loader, load_micro_batches, validation_batches
from ranvier.errors import NumericError, OtherRankError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.optim.lr_schedule import lr_factor
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.sharding import ShardedStateDict
from ranvier.system.terminal import print
from ranvier.train import lora, pruning
from ranvier.train.build_model import DTYPES, TIMELINE_FILE, build_model, gather_timeline
from ranvier.train.cuda_graph import CudaGraphStep
from ranvier.train.health.loss_guard import LossGuard
from ranvier.train.health.nan_diagnosis import find_first_nonfinite
from ranvier.train.health.replica_check import StepReplay, compare_replicas
from ranvier.train.memory import saved_collectives
from ranvier.train.memory.breakdown import MemoryTracker
from ranvier.train.memory.probe import candidate_micro_batches
from ranvier.train.memory.resolve import resolve_in_flight_limit, resolve_memory
from ranvier.train.metrics import (
    DeferredRead,
    DeviceEvent,
    Meter,
    PendingStep,
    finite_or_none,
    peak_flops,
    peak_memory_bytes,
    step_flops,
)
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.prediction import PredictionCheck
from ranvier.train.report import moe
from ranvier.train.resume import checkpointing
from ranvier.train.resume.open_directory import OpenDirectory
from ranvier.train.step import StepResult, evaluate, train_step

SAVE_WAIT_SECONDS = 5.0
"""Seconds to wait for the previous checkpoint when the next is due; then that save is skipped."""


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Freeze all live objects so that the garbage collector does not scan them on every pass.

    Does nothing if the program has frozen objects already: `gc.unfreeze` would undo its freeze too.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class Trainer:
    """A run with model, optimizer and data, ready to train."""

    run: RunConfig
    grid: Grid
    device: torch.device
    model: Decoder
    optimizer: Optimizer
    data: RunData
    meter: Meter
    guard: LossGuard
    step: int = 0
    """Number of steps issued."""
    samples: int = 0
    """Number of samples consumed."""
    stop_signal: int = 0
    """The signal that ends the run, once all ranks know of it; 0 if none."""
    notes: list[str] = field(default_factory=list)
    """Lines on what was decided by measuring, printed when the run starts."""
    prediction_check: PredictionCheck | None = None
    """The predicted step time and memory, compared with the measured steps."""
    val_loss: float | None = None
    """The latest validation loss."""
    skipped_saves: int = 0
    """Checkpoints that were due while the previous one was still being written."""
    memory_tracker: MemoryTracker = field(default_factory=MemoryTracker)
    """Predicted and measured memory usage."""
    directory: OpenDirectory = field(default_factory=OpenDirectory)
    """The output directories, held open on rank 0; the run ends if they disappear."""
    take_step: Callable[..., StepResult] = field(init=False)
    """Runs one step: `train_step`, or its CUDA graph."""

    def __post_init__(self) -> None:
        self.take_step = partial(train_step, self.model, self.optimizer)
        self._saver: AsyncSaver | None = None
        self._steps_read = self.step
        """Steps whose metrics the host has read."""

    @classmethod
    def from_run(
        cls,
        run: RunConfig,
        grid: Grid,
        device: torch.device,
        data: RunData,
        *,
        local_ranks: int = 0,
    ) -> Trainer:
        """Build model and optimizer of a validated run.

        local_ranks: ranks that share the memory of this machine; 0: all ranks.
        Communicates: creation of process groups; see `train.memory.resolve` and `probe`.
        """
        run = lora.resolve_lora(run)
        dtype = DTYPES[run.train.dtype]
        model = build_model(run, grid, device, local_ranks=local_ranks or grid.world_size)
        # Masks come first: memory and optimizer are sized by the elements that remain.
        pruning.init_masks(run, get_parallel_model(model))
        micro = candidate_micro_batches(run.plan, run.data.seq_len)[0]
        local_ranks = local_ranks or grid.world_size
        flow = ActivationShape(micro, run.data.seq_len, dtype.itemsize, statistics_itemsize=4)
        notes = choose_arithmetic(run, model, grid, device, flow)
        # The order matters: what a later step measures depends on the kernels, the placement and
        # the optimizer that the earlier ones have chosen.
        found = resolve_memory(run, model, device, local_ranks=local_ranks)
        run = found.run
        optimizer = found.optimizer
        notes += saved_collectives.choose_saved_collectives(
            run, model, optimizer, device, local_ranks
        )
        notes += resolve_in_flight_limit(run, model, device, local_ranks)
        plan = run.plan
        grid.trace.time_waits = True
        # Memory resolution may have changed the micro-batch that was assumed above.
        flow = replace(flow, samples=plan.micro_batch)
        flops = step_flops(get_parallel_model(model), flow, plan.num_micro_batches)
        meter = Meter(plan.global_batch * run.data.seq_len, flops, peak_flops(device, dtype))
        guard = LossGuard(run.guard, device)
        notes += found.notes
        trainer = cls(run, grid, device, model, optimizer, data, meter, guard, notes=notes)
        trainer.memory_tracker = found.memory_tracker
        lora.init_adapters(trainer)
        if plan.cuda_graph:
            trainer.take_step = CudaGraphStep(model, optimizer).step
        return trainer

    # ---- steps --------------------------------------------------------------------------

    def run_steps(self, stop: Any = None) -> Iterator[dict[str, Any]]:
        """Run the remaining steps; yield the metrics of each, one step behind the device.

        stop: its `signal` is read before each step; all ranks end after the same step.
        """
        if self.run.train.eval_interval and self.step == 0:
            first = self.compute_val_loss()
        else:
            first = None
        yield from self._run_until_rewind(stop, first)
        while self.guard.needs_rewind():
            self.rewind()
            yield from self._run_until_rewind(stop, None)
        if self._saver is not None:
            self._saver.finish_saving()

    def _run_until_rewind(self, stop: Any, first: float | None) -> Iterator[dict[str, Any]]:
        """Run steps until the last one, a stop signal, or a spike that requires a rewind."""
        every = self.run.train.eval_interval
        last = self.run.train.steps
        guard = self.guard
        before: PendingStep | None = None
        ended: DeviceEvent | None = None
        runtime = get_parallel_model(self.model).pipeline.executor
        patience = self.run.train.comm_timeout_seconds
        with freeze_gc(), Loader(self._batch_maker(), self.step, patience=patience) as loader:
            while self.step < last and not self.stop_signal:
                # Stage timing synchronises the device, so it is enabled only for the steps that
                # report it.
                runtime.record_times = runtime.stage.num_stages > 1 and self._is_timed()
                try:
                    under = self._issue_traced_step(loader, getattr(stop, "signal", 0))
                except BaseException:
                    # The previous step was completed even though this one failed: report it before
                    # raising.
                    if before is not None:
                        yield self.read_step(before, ended)
                    raise
                under.val_loss = first
                first = None
                if before is not None:
                    yield self.read_step(before, ended)
                    ended = before.numbers.ready_event
                # Returning discards the step that was just issued as well; the rewind reloads all
                # state.
                if guard.needs_rewind():
                    return
                before = under
                saved = self.is_due(self.run.checkpoint.interval)
                if self.is_due(every):
                    under.val_loss = self.compute_val_loss()
                # Evaluation and the replica comparison run between two steps, so this step is read
                # now, not one step later, and the next one is timed from its own start (`ended` is
                # None). A save may need the verdict on the step.
                if (
                    self.is_due(every)
                    or self._is_comparison_due()
                    or (saved and self._reads_before_save())
                ):
                    yield self.read_step(under, ended)
                    before = ended = None
                    if guard.needs_rewind():
                        return
                    if self._is_comparison_due():
                        self.compare_replicas()
                if saved and self.step < last:
                    self.save_checkpoint(wait=False)
        if before is not None:
            yield self.read_step(before, ended)

    def _reads_before_save(self) -> bool:
        """Whether a step is read before it is saved; otherwise the device does not even pause."""
        # With spike='rewind' a checkpoint must not contain a step that turns out to be a spike.
        waits = self.device.type == "cpu" or not self.run.checkpoint.async_save
        return waits or self.run.guard.on_spike == "rewind"

    def _is_comparison_due(self) -> bool:
        """Whether the replicas of weights are compared after this step."""
        if self.grid.world_size > 1:
            every = self.run.guard.replica_check_interval
        else:
            every = 0
        return every > 0 and self.step % every == 0

    def compare_replicas(self) -> None:
        """Compare all replicas of weights. Communicates: see `replica_check.compare_replicas`."""
        if self.grid.world_size > 1:
            with self.meter.time_phase("comparison of copies"):
                compare_replicas(self.optimizer, self.grid, self.device, self._describe_latest)

    def _is_timed(self) -> bool:
        """Whether the next step records a pipeline timeline; on a GPU this slows the step down."""
        return self.device.type == "cpu" or self.step == self.run.train.steps - 1

    def _issue_traced_step(self, loader: Loader[list[Batch]], signal: int) -> PendingStep:
        """Issue a step; the last one is traced if `train.trace_comm` is set."""
        if not self.run.train.trace_comm or self.step < self.run.train.steps - 1:
            return self.issue_step(loader, signal=signal)
        with self.grid.trace.record_events() as events:
            under = self.issue_step(loader, signal=signal)
        self.write_trace(events)
        return under

    def is_due(self, every: int) -> bool:
        """Whether a periodic action is due after this step: every `every` steps and at the end."""
        return every > 0 and (self.step % every == 0 or self.step == self.run.train.steps)

    def _batch_maker(self) -> Callable[[int], list[Batch]]:
        """Return a function from step number to the micro-batches of this rank."""
        run = self.run
        # After a rewind samples were skipped, so sample and step numbers differ by an offset.
        offset = self.samples - self.step * self.run.plan.global_batch

        def make(step: int) -> list[Batch]:
            return load_micro_batches(
                self.data.train,
                offset + step * run.plan.global_batch,
                run.plan.global_batch,
                self.grid,
                run.plan.micro_batch,
                pin=self.device.type == "cuda",
            )

        return make

    def issue_step(self, loader: Loader[list[Batch]], *, signal: int = 0) -> PendingStep:
        """Issue the next step without waiting for it.

        Communicates: all of a step; max-all-reduce of stop signal, memory and save status.
        """
        run = self.run
        scale = self.optimizer.grad_scaler
        self.meter.heartbeat.begin_section("step", self.step)
        pruning.update_masks(self)
        # Communication between two steps (evaluation, checkpoints) does not count for this step.
        self.grid.trace.waited_events = []
        begun = DeviceEvent(self.device)
        batches = next(loader)
        lr = self.next_lr()
        # A copy from pageable memory would make the host wait for the device.
        pinned = self.device.type == "cuda"
        status = torch.tensor(
            [signal, peak_memory_bytes(self.device), *self._save_status()],
            dtype=torch.float64,
            pin_memory=pinned,
        ).to(self.device, non_blocking=True)
        with self.grid.trace.named_scope("step.status"):
            # One all-reduce for everything that ranks have to agree on. It is issued before the
            # step and waited for after it, so that it overlaps with the compute.
            largest = collectives.all_reduce(status, world_axis(self.grid), "max")
        on_device = [batch.to(self.device) for batch in batches]
        # A graph replay does not call `before_update`, so wait here until the weights are copied.
        if run.plan.cuda_graph and self._saver is not None:
            self._saver.wait_for_copies()
        self.guard.update_limit(self.step)
        taken = self.take_step(on_device, lr, self.guard.step_limits, *self._pass_wrapper())
        if scale is None:
            factor = torch.full_like(taken.loss, math.nan)
        else:
            factor = scale.scale
        signals, held, *heard = largest.wait()
        # On a CPU the value is available already, so the run can stop one step earlier.
        if self.device.type == "cpu":
            self.stop_signal = int(signals)
        # The order of these numbers is relied on by `read_step`, `LossGuard.judge_step` and
        # `Meter`.
        fate = [taken.loss, taken.grad_norm, taken.is_nonfinite, taken.is_spike]
        experts = moe.router_statistics(get_parallel_model(self.model).load_balancer)
        numbers = DeferredRead([*fate, signals, held, factor, *experts, *heard], self.device)
        self.step = self.step + 1
        self.samples = self.samples + run.plan.global_batch
        awaited = self.grid.trace.waited_events
        self.grid.trace.waited_events = []
        tokens = self.samples * run.data.seq_len
        return PendingStep(
            self.step - 1, tokens, lr, numbers, begun, loader.take_wait_seconds(), awaited
        )

    def _pass_wrapper(self) -> tuple[Callable[[Callable[[], Tensor]], Tensor], ...]:
        """The wrapper around forward and backward of this step, as optional last argument."""
        again = self.run.guard.replay_interval
        if again and self.step % again == 0:
            return (StepReplay(self.model, self.step).run_twice,)
        if self.memory_tracker.gradient_bytes or self.run.plan.cuda_graph:
            return ()
        # Gradient memory is measured once, in the first step that is neither replayed nor a graph.
        return (partial(self.memory_tracker.track_gradients, self.model),)

    def _save_status(self) -> tuple[int, int]:
        """Progress of this rank's part of a checkpoint, and the exit code of a failure."""
        left, failed = (0, 0) if self._saver is None else self._saver.report_progress()
        return left, failed or self.directory.exit_code()

    def _handle_status(self, left: int, failed: int) -> None:
        """Process the maximum of all ranks' reports; a failure on one rank ends all of them."""
        if failed:
            # The rank that saw the failure raises its own error; the others an OtherRankError.
            self.directory.check_present()
        if self._saver is not None:
            self._saver.handle_reports(left, failed)
        elif failed:
            raise OtherRankError(failed)

    def next_lr(self) -> float:
        """The learning rate of the next step."""
        run = self.run
        optim = self.run.optim
        return run.peak_lr * lr_factor(
            self.step,
            kind=optim.schedule,
            steps=run.train.steps,
            warmup=optim.warmup_steps,
            cooldown=optim.decay_ratio,
            floor=optim.min_lr_ratio,
        )

    def read_step(self, under: PendingStep, ended: DeviceEvent | None) -> dict[str, Any]:
        """Wait for a step and return its metrics. Raises after too many non-finite steps.

        Communicates: after a spike that leads to a rewind, the name of a checkpoint.
        """
        loss, _, _, spike, signal, *_, left, failed = under.numbers.read()
        self._handle_status(int(left), int(failed))
        words = self.guard.judge_step(under)
        self._steps_read = under.step + 1
        # The save of this step began before its loss was known; add the guard state now.
        if self._saver is not None and self._saver.step == self._steps_read:
            self._saver.add_facts(guard=self.guard.state_dict())
        if self.guard.is_exhausted():
            self.raise_nonfinite(under.step, loss)
        if spike:
            self.guard.check_spikes(under.step, self._describe_latest())
        if spike and self.run.guard.on_spike == "rewind" and self.latest_checkpoints():
            self.guard.rewind_tokens = under.tokens
        elif spike and self.run.guard.on_spike == "rewind":
            words += "There is no checkpoint to go back to."
        if words:
            self.warn_on_first_rank(words)
        self.stop_signal = self.stop_signal or int(signal)
        return self.meter.step_metrics(under, ended)

    def warn_on_first_rank(self, words: str) -> None:
        """Warn, once for all ranks."""
        if self.grid.rank == 0:
            print(words.strip(), file=sys.stderr, flush=True)

    def raise_nonfinite(self, step: int, loss: float) -> None:
        """Raise with the name of the first non-finite tensor. Communicates: as that step."""
        # The update was masked out, so the weights are still those of the failing step: rerun it.
        batches = [batch.to(self.device) for batch in self._batch_maker()(step)]
        scale = self.optimizer.grad_scaler
        name = find_first_nonfinite(self.model, batches, None if scale is None else scale.scale)
        if name:
            cause = f"The first is {name}"
        else:
            cause = "Taken again, all are: a device may be faulty"
        raise NumericError(
            f"Step {step + 1} of {self.run.train.steps} (loss {loss}) has numbers that are not "
            f"finite. {cause}. At most guard.max_skipped_steps={self.run.guard.max_skipped_steps} "
            "such steps are left out; weights and moments were not updated with them. Use a lower "
            f"optim.lr or look at samples {self.sample_range(step)}; go on from "
            f"{self._describe_latest()}."
        )

    def _describe_latest(self) -> str:
        """The checkpoint to resume from, as text. Communicates: see `AsyncSaver.finish_saving`."""
        if self._saver is not None:
            self._saver.finish_saving()
        return next((str(path) for path in find_checkpoints(self.checkpoint_dir)[::-1]), "none yet")

    def sample_range(self, step: int) -> str:
        """The range of sample numbers of a step that has been issued."""
        first = self.samples - (self.step - step) * self.run.plan.global_batch
        return f"{first} to {first + self.run.plan.global_batch - 1}"

    def compute_val_loss(self) -> float | None:
        """Mean loss of the validation samples; None without any. Communicates: as forward."""
        held_out = self.data.validation
        run = self.run
        if held_out is None:
            return None
        with self.meter.time_phase("evaluation"):
            batches = validation_batches(
                held_out,
                run.train.eval_samples,
                run.plan.global_batch,
                self.grid,
                run.plan.micro_batch,
            )
            micros = [batch.to(self.device) for batch in chain.from_iterable(batches)]
            self.val_loss = finite_or_none(evaluate(self.model, micros).item())
            return self.val_loss

    # ---- checkpoints --------------------------------------------------------------------

    @property
    def checkpoint_dir(self) -> Path:
        """The directory that holds the checkpoints."""
        return Path(self.run.train.output_dir) / "checkpoints"

    @property
    def saver(self) -> AsyncSaver:
        """The checkpoint saver. Communicates: a text over all axes, on first access."""
        if self._saver is None:
            self._saver = checkpointing.build_saver(self)
        return self._saver

    def state_tensors(self) -> ShardedStateDict:
        """All tensors that the run resumes from."""
        return checkpointing.state_tensors(self)

    def watch_directory(self, directory: OpenDirectory) -> None:
        """End the run without saving once these directories are gone (on rank 0)."""
        self.directory = directory
        if self._saver is not None:
            self._saver.check_directory = directory.check_present

    def save_checkpoint(self, *, wait: bool = True) -> Path | None:
        """Save a checkpoint, possibly in the background; return the latest one, on rank 0.

        Communicates: see `AsyncSaver`.
        """
        if self.run.checkpoint.interval < 0:
            return None
        # Never save replicas that differ; a comparison that was due has just been done.
        if self.run.guard.replica_check_interval and not self._is_comparison_due():
            self.compare_replicas()
        saver = self.saver
        wait = wait or not self.run.checkpoint.async_save
        with self.meter.time_phase("checkpoint"):
            if not saver.wait_for_save(math.inf if wait else SAVE_WAIT_SECONDS):
                self._skip_save(saver.step)
            # The final save may find that the last step has been saved already.
            elif saver.step != self.step:
                mine, sparse = checkpointing.tensors_to_write(self)
                also = [Path(self.run.train.output_dir) / "metrics.jsonl"]
                saver.save(
                    self.step, mine, checkpointing.checkpoint_facts(self), also=also, sparse=sparse
                )
                # Otherwise `read_step` adds the guard state once the step has been read.
                if self._steps_read == self.step:
                    saver.add_facts(guard=self.guard.state_dict())
            if wait:
                return saver.finish_saving()
            return saver.last_checkpoint

    def _skip_save(self, before: int) -> None:
        self.skipped_saves += 1
        self.warn_on_first_rank(
            f"No checkpoint after step {self.step}: that of step {before} is still being written. "
            "Use a larger checkpoint.interval or a faster disk."
        )

    def latest_checkpoints(self) -> list[Path]:
        """The checkpoints, newest first. Communicates: broadcast of rank 0's list."""
        if self._saver is not None:
            self._saver.finish_saving()
        mine = [str(path) for path in find_checkpoints(self.checkpoint_dir)[::-1]]
        return [*map(Path, json.loads(broadcast_text(json.dumps(mine), self.grid, self.device)))]

    def rewind(self) -> None:
        """Reload the latest good checkpoint and continue after the samples that led to a spike.

        Communicates: as `resume_from`.
        """
        guard = self.guard
        after = self.step
        assert guard.rewind_tokens is not None, after
        samples = guard.rewind_tokens // self.run.data.seq_len
        # Loading restores the counts of the checkpoint, which does not know of this spike.
        counts = guard.counts
        for line in self.resume_from(*self.latest_checkpoints()):
            self.warn_on_first_rank(line)
        self.samples = samples
        guard.record_rewind(counts)
        self.warn_on_first_rank(
            f"Gone back from step {after} to {self.step}, on with sample {samples}."
        )

    def resume_from(self, *candidates: Path) -> list[str]:
        """Resume from the first undamaged checkpoint. Communicates: see `checkpointing`."""
        lines = checkpointing.resume_run(self, candidates)
        self._steps_read = self.step
        return lines

    def write_timeline(self) -> None:
        """Write the pipeline timeline of the last step; a write error is only a warning.

        Communicates: broadcast of a text from each stage.
        """
        parallel = get_parallel_model(self.model)
        if self.grid.degrees["pipe"] == 1 or self.step == 0 or not self.run.train.output_dir:
            return
        facts = gather_timeline(parallel, self.step, self.run.plan.num_micro_batches, self.device)
        folder = Path(self.run.train.output_dir)
        timed = facts["seconds"] > 0.0
        if self.grid.rank == 0 and folder.is_dir() and timed:
            try:
                (folder / TIMELINE_FILE).write_text(json.dumps(facts))
            except OSError as error:
                self.warn_on_first_rank(
                    f"{folder / TIMELINE_FILE} cannot be written: {error.strerror}."
                )

    def write_trace(self, events: list[trace.Event]) -> None:
        """Write this rank's trace of the last step; rank 0 also prints it as a table."""
        folder = Path(self.run.train.output_dir)
        path = folder / f"trace-rank{self.grid.rank}.json"
        try:
            trace.write_chrome_trace(path, {self.grid.rank: events})
        # The step is done and has yet to be saved: a trace is not worth failing for.
        except OSError as error:
            print(f"{path} cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
        if self.grid.rank == 0:
            print(trace.format_table(events))
            print(f"Traces: {folder}/trace-rank*.json (open them in Perfetto)")
