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
from ranvier.comm import collectives
from ranvier.comm.consensus import world_axis
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.config.sections import DecoderModelConfig
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import PackedSamples, SampleBatch
from ranvier.data.context_layouts import ContextLayoutBuilder
from ranvier.data.loader import Loader, load_micro_batches, validation_batches
from ranvier.data.run_data import CanaryData, RunData
from ranvier.data.step_work import StepWork, WorkCounter
from ranvier.data.window_assignment import WindowCost
from ranvier.errors import NumericError
from ranvier.grid import Grid
from ranvier.models.config import DecoderConfig
from ranvier.models.recurrence import LayerCalls
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.optim.lr_schedule import lr_factor
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.pipeline.stage_profile import TIMELINE_FILE
from ranvier.system.terminal import print
from ranvier.train import lora, memorization, pruning
from ranvier.train.build_model import DTYPES, build_model, gather_timeline
from ranvier.train.cuda_graph import CudaGraphStep
from ranvier.train.health.loss_guard import LossGuard
from ranvier.train.health.nan_diagnosis import find_first_nonfinite
from ranvier.train.health.replica_check import StepReplay, compare_replicas
from ranvier.train.memory import saved_collectives
from ranvier.train.memory.breakdown import MemoryTracker
from ranvier.train.memory.resolve import resolve_in_flight_limit, resolve_memory
from ranvier.train.memory.usage import candidate_micro_batches
from ranvier.train.metrics import (
    DeferredRead,
    DeviceEvent,
    Evaluation,
    Meter,
    PendingStep,
    RecurrentFlops,
    finite_or_none,
    peak_flops,
    peak_memory_bytes,
    step_flops,
)
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.prediction import PredictionCheck
from ranvier.train.report import moe
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.resume.checkpointer import Checkpointer
from ranvier.train.state import TrainState
from ranvier.train.step import StepResult, begin_model_step, evaluate, train_step


def recurrence_notes(run: RunConfig) -> list[str]:
    """A line if a recurrent model has gradients of all iterations in most steps."""
    model = run.model
    if not isinstance(model, DecoderConfig) or model.backprop_depth <= model.mean_recurrence:
        return []
    return [
        f"model.backprop_depth={model.backprop_depth} is above model.mean_recurrence="
        f"{model.mean_recurrence}: in most steps all iterations have gradients, and memory grows "
        "with their number."
    ]


def canary_notes(run: RunConfig, *, step: int = 0, samples: int = 0) -> list[str]:
    """A line if a run ends before all reads of its canaries.

    step, samples: of the checkpoint that the run resumes from, whose batch may have been another.
    """
    num_samples = samples + (run.train.steps - step) * run.plan.global_batch
    if not run.data.canaries or run.data.canary_samples <= num_samples:
        return []
    more_steps = -(-(run.data.canary_samples - samples) // run.plan.global_batch)
    return [
        f"canaries are placed in data.canary_samples={run.data.canary_samples:,} samples, but the "
        f"run ends after {num_samples:,}: not all of their reads happen until it is extended to "
        f"train.steps={step + more_steps}."
    ]


@contextmanager
def freeze_gc() -> Iterator[None]:
    """Freeze all live objects, so that the garbage collector does not scan them in every pass.

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

    run: ResolvedRun
    grid: Grid
    device: torch.device
    data: RunData
    state: TrainState
    """The state that steps change and checkpoints store."""
    meter: Meter
    stop_signal: int = 0
    """The signal that ends the run, once all ranks know of it; 0 if none."""
    notes: list[str] = field(default_factory=list)
    """Lines on decisions that were made by measuring, printed when the run starts."""
    prediction_check: PredictionCheck | None = None
    """The predicted step time and memory, compared with the measured steps."""
    memory_tracker: MemoryTracker = field(default_factory=MemoryTracker)
    """Predicted and measured memory usage."""
    checkpointer: Checkpointer = field(init=False)
    """Saves and resumes the state."""
    step_work: dict[int, StepWork] = field(default_factory=dict)
    """Work of all ranks in the steps whose batches are loaded, on the first rank."""
    take_step: Callable[..., StepResult] = field(init=False)
    """Runs one step: `train_step`, or its CUDA graph."""

    def __post_init__(self) -> None:
        self.take_step = partial(train_step, self.state.model, self.state.optimizer)
        self.checkpointer = Checkpointer(self.run, self.state, self.data)

    @classmethod
    def from_run(
        cls,
        run: ResolvedRun,
        grid: Grid,
        device: torch.device,
        data: RunData,
        *,
        local_ranks: int = 0,
    ) -> Trainer:
        """Build model and optimizer of a resolved run.

        local_ranks: ranks that share the memory of this machine; 0: all ranks.
        Communicates: creation of process groups; see `train.memory.resolve`.
        """
        if not isinstance(run, ResolvedRun) or run.train.dtype == "auto":
            raise TypeError(
                "A trainer needs a resolved run. Call ranvier.train.resolve.resolve_run first."
            )
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
        run = resolve_run(run, ResolveContext(world_size=grid.world_size, memory=found))
        optimizer = found.optimizer
        notes += saved_collectives.choose_saved_collectives(
            run, model, optimizer, device, local_ranks
        )
        notes += resolve_in_flight_limit(run, model, device, local_ranks)
        plan = run.plan
        grid.trace.time_waits = True
        # Memory resolution may have changed the micro-batch that was assumed above.
        flow = replace(flow, samples=plan.micro_batch)
        means: dict[str, LayerCalls] = getattr(model, "mean_layer_calls", dict)()
        flops = step_flops(get_parallel_model(model), flow, plan.num_micro_batches, means)
        unit = run.model_kind.unit
        tokens = plan.global_batch * run.data.seq_len
        meter = Meter(tokens, flops, peak_flops(device, dtype), unit)
        if isinstance(model, RecurrentDecoder):
            each = RecurrentFlops.from_model(model, flow, plan.num_micro_batches)
            meter.flops_of_recurrence = each.of_step
        notes += recurrence_notes(run)
        notes += found.reasons
        state = TrainState(model, optimizer, LossGuard(run.guard, device))
        trainer = cls(run, grid, device, data, state, meter, notes=notes)
        trainer.memory_tracker = found.memory_tracker
        lora.init_adapters(run, model, optimizer)
        if plan.cuda_graph:
            trainer.take_step = CudaGraphStep(model, optimizer).step
        return trainer

    # ---- steps --------------------------------------------------------------------------

    def run_steps(self, stop: Any = None) -> Iterator[dict[str, Any]]:
        """Run the remaining steps; yield the metrics of each, one step behind the device.

        stop: its `signal` is read before each step; all ranks end after the same step.
        """
        first = self._evaluate_when(lambda every: every > 0 and self.state.step == 0)
        yield from self._run_until_rewind(stop, first)
        while self.state.guard.needs_rewind():
            self.rewind()
            yield from self._run_until_rewind(stop, None)
        self.checkpointer.finish_saving()

    def _run_until_rewind(self, stop: Any, first: Evaluation | None) -> Iterator[dict[str, Any]]:
        """Run steps until the last one, a stop signal, or a spike that requires a rewind.

        first: of the weights before the first step.
        """
        last = self.run.train.steps
        guard = self.state.guard
        before: PendingStep | None = None
        ended: DeviceEvent | None = None
        runtime = self.state.parallel.pipeline.executor
        patience = self.run.train.comm_timeout_seconds
        with freeze_gc(), Loader(self._batch_maker(), self.state.step, patience=patience) as loader:
            while self.state.step < last and not self.stop_signal:
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
                under.evaluation = under.evaluation.merge(first)
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
                evaluated = self._evaluate_when(self.is_due)
                under.evaluation = under.evaluation.merge(evaluated)
                # Evaluation and the replica comparison run between two steps, so this step is read
                # now, not one step later, and the next one is timed from its own start (`ended` is
                # None). A save may need the verdict on the step.
                if (
                    evaluated is not None
                    or self._is_comparison_due()
                    or (saved and self._reads_before_save())
                ):
                    yield self.read_step(under, ended)
                    before = ended = None
                    if guard.needs_rewind():
                        return
                    if self._is_comparison_due():
                        self.compare_replicas()
                if saved and self.state.step < last:
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
        return every > 0 and self.state.step % every == 0

    def compare_replicas(self) -> None:
        """Compare all replicas of weights. Communicates: see `replica_check.compare_replicas`."""
        if self.grid.world_size > 1:
            with self.meter.time_phase("comparison of copies"):
                compare_replicas(
                    self.state.optimizer,
                    self.grid,
                    self.device,
                    self.checkpointer.describe_latest,
                )

    def _is_timed(self) -> bool:
        """Whether the next step records a pipeline timeline; on a GPU this slows the step down."""
        return self.device.type == "cpu" or self.state.step == self.run.train.steps - 1

    def _issue_traced_step(self, loader: Loader[list[SampleBatch]], signal: int) -> PendingStep:
        """Issue a step; the last one is traced if `train.trace_comm` is set."""
        if not self.run.train.trace_comm or self.state.step < self.run.train.steps - 1:
            return self.issue_step(loader, signal=signal)
        with self.grid.trace.record_events() as events:
            under = self.issue_step(loader, signal=signal)
        self.write_trace(events)
        return under

    def is_due(self, every: int) -> bool:
        """Whether a periodic action is due after this step: every `every` steps and at the end."""
        step = self.state.step
        return every > 0 and (step % every == 0 or step == self.run.train.steps)

    def _batch_maker(self) -> Callable[[int], list[SampleBatch]]:
        """Return a function from step number to the micro-batches of this rank."""
        run = self.run
        # After a rewind samples were skipped, so sample and step numbers differ by an offset.
        offset = self.state.samples - self.state.step * self.run.plan.global_batch
        cost = layouts = None
        shares_work = self.grid.world_size > 1 and isinstance(run.model, DecoderModelConfig)
        if run.data.balance == "cost" and shares_work:
            cost = WindowCost.from_config(run.decoder)
        if run.plan.context > 1 and shares_work:
            itemsize = DTYPES[run.train.dtype].itemsize
            layouts = ContextLayoutBuilder.from_run(run, self.grid, itemsize)
        counter = self._work_counter() if shares_work else None

        def make(step: int) -> list[SampleBatch]:
            first = offset + step * run.plan.global_batch
            if counter is not None:
                self.step_work[step] = counter.count_step(first)
            batches = load_micro_batches(
                self.data.train,
                first,
                run.plan.global_batch,
                self.grid,
                run.plan.micro_batch,
                order=run.plan.token_order,
                cost=cost,
                pin=self.device.type == "cuda",
            )
            if layouts is not None:
                for batch in batches:
                    layouts.build_layouts(batch)
            return batches

        return make

    def _work_counter(self) -> WorkCounter | None:
        """Counts the work of all ranks, on the one that writes metrics; None if all have the same
        or documents are unknown."""
        samples = self.data.train
        if self.grid.rank > 0 or not isinstance(samples, PackedSamples):
            return None
        counter = WorkCounter.from_run(self.run, samples, DTYPES[self.run.train.dtype].itemsize)
        return counter if counter.num_ranks > 1 else None

    def issue_step(self, loader: Loader[list[SampleBatch]], *, signal: int = 0) -> PendingStep:
        """Issue the next step without waiting for it.

        Communicates: all of a step; max-all-reduce of stop signal, memory and save status.
        """
        run = self.run
        state = self.state
        scale = state.optimizer.grad_scaler
        self.meter.heartbeat.begin_section("step", state.step)
        if pruning.is_update_due(run, state.step):
            with self.meter.time_phase("pruning"):
                pruning.update_masks(run, state)
        # Communication between two steps (evaluation, checkpoints) does not count for this step.
        self.grid.trace.waited_events = []
        begun = DeviceEvent(self.device)
        batches = next(loader)
        lr = self.next_lr()
        # A copy from pageable memory would make the host wait for the device.
        pinned = self.device.type == "cuda"
        status = torch.tensor(
            [signal, peak_memory_bytes(self.device), *self.checkpointer.report_status()],
            dtype=torch.float64,
            pin_memory=pinned,
        ).to(self.device, non_blocking=True)
        with self.grid.trace.named_scope("step.status"):
            # One all-reduce for everything that ranks have to agree on. It is issued before the
            # step and waited for after it, so that it overlaps with the compute.
            largest = collectives.all_reduce(status, world_axis(self.grid), "max")
        on_device = [batch.to(self.device) for batch in batches]
        # A graph replay does not call `before_update`, so wait here until the weights are copied.
        if run.plan.cuda_graph:
            self.checkpointer.wait_for_copies()
        state.guard.update_limit(state.step)
        begin_model_step(state.model, state.step)
        taken = self.take_step(on_device, lr, state.guard.step_limits, *self._pass_wrapper())
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
        experts = moe.router_statistics(state.parallel.load_balancer)
        more = [signals, held, factor, taken.num_targets, *experts, *heard]
        numbers = DeferredRead([*fate, *more], self.device)
        state.step += 1
        state.samples += run.plan.global_batch
        awaited = self.grid.trace.waited_events
        self.grid.trace.waited_events = []
        tokens = state.samples * run.data.seq_len
        return PendingStep(
            state.step - 1,
            tokens,
            lr,
            numbers,
            begun,
            loader.take_wait_seconds(),
            awaited,
            work=self.step_work.pop(state.step - 1, None),
            recurrence=getattr(state.model, "recurrence", None),
        )

    def _pass_wrapper(self) -> tuple[Callable[[Callable[[], Tensor]], Tensor], ...]:
        """The wrapper around forward and backward of this step, as optional last argument."""
        again = self.run.guard.replay_interval
        if again and self.state.step % again == 0:
            return (StepReplay(self.state.model, self.state.step).run_twice,)
        if self.memory_tracker.gradient_bytes or self.run.plan.cuda_graph:
            return ()
        # Gradient memory is measured once, in the first step that is neither replayed nor a graph.
        return (partial(self.memory_tracker.track_gradients, self.state.model),)

    def next_lr(self) -> float:
        """The learning rate of the next step."""
        run = self.run
        optim = self.run.optim
        return run.peak_lr * lr_factor(
            self.state.step,
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
        guard = self.state.guard
        loss, _, _, spike, signal, *_, left, failed = under.numbers.read()
        self.checkpointer.handle_status(int(left), int(failed))
        words = guard.judge_step(under)
        self.checkpointer.record_read_step(under.step + 1)
        if guard.is_exhausted():
            self.raise_nonfinite(under.step, loss)
        if spike:
            guard.check_spikes(under.step, self.checkpointer.describe_latest())
        if spike and self.run.guard.on_spike == "rewind" and self.checkpointer.latest_checkpoints():
            guard.rewind_tokens = under.tokens
        elif spike and self.run.guard.on_spike == "rewind":
            words += (
                "The run cannot rewind, because it has no checkpoint yet, and continues. Use a "
                "smaller checkpoint.interval."
            )
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
        # The update was masked out, so the step can be rerun with the same weights.
        batches = [batch.to(self.device) for batch in self._batch_maker()(step)]
        scaler = self.state.optimizer.grad_scaler
        scale = None if scaler is None else scaler.scale
        begin_model_step(self.state.model, step)
        name = find_first_nonfinite(self.state.model, batches, scale)
        if name:
            cause = f"The first non-finite tensor is {name}"
        else:
            cause = "When the step was repeated, all values were finite: a device may be faulty"
        raise NumericError(
            f"Step {step + 1} of {self.run.train.steps} (loss {loss}) has values that are not "
            f"finite. {cause}. At most guard.max_skipped_steps={self.run.guard.max_skipped_steps} "
            "such steps are skipped; they do not update weights and optimizer states. Use a lower "
            f"optim.lr or check samples {self.sample_range(step)}, and resume from "
            f"{self.checkpointer.describe_latest()}."
        )

    def sample_range(self, step: int) -> str:
        """The range of sample numbers of a step that has been issued."""
        first = self.state.samples - (self.state.step - step) * self.run.plan.global_batch
        return f"{first} to {first + self.run.plan.global_batch - 1}"

    def _evaluate_when(self, is_due: Callable[[int], bool]) -> Evaluation | None:
        """Evaluate what is due by its interval; None if nothing is. Communicates: as forward."""
        train = self.run.train
        if not is_due(train.eval_interval) and not is_due(train.canary_interval):
            return None
        loss = self.compute_val_loss() if is_due(train.eval_interval) else None
        scores = self.score_canaries() if is_due(train.canary_interval) else {}
        return Evaluation(loss, scores)

    def score_canaries(self) -> dict[str, Any]:
        """Metrics of the canaries; empty without any. Communicates: as `score_sequences`."""
        canaries = self.data.canaries if isinstance(self.data, CanaryData) else None
        if canaries is None:
            return {}
        with self.meter.time_phase("evaluation"):
            return memorization.score_canaries(
                self.state.model,
                canaries,
                suffix=self.run.train.canary_suffix,
                batch=self.run.plan.micro_batch,
            )

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
                order=run.plan.token_order,
            )
            micros = [batch.to(self.device) for batch in chain.from_iterable(batches)]
            self.state.val_loss = finite_or_none(evaluate(self.state.model, micros).item())
            return self.state.val_loss

    # ---- checkpoints --------------------------------------------------------------------

    def save_checkpoint(self, *, wait: bool = True) -> Path | None:
        """Save a checkpoint, possibly in the background; return the latest one, on rank 0.

        Communicates: see `AsyncSaver`.
        """
        if self.run.checkpoint.interval < 0:
            return None
        # Never save replicas that differ; a comparison that was due has just been done.
        if self.run.guard.replica_check_interval and not self._is_comparison_due():
            self.compare_replicas()
        with self.meter.time_phase("checkpoint"):
            return self.checkpointer.save(wait=wait or not self.run.checkpoint.async_save)

    def rewind(self) -> None:
        """Reload the latest good checkpoint and continue after the samples that led to a spike.

        Communicates: as `Checkpointer.resume_from`.
        """
        guard = self.state.guard
        after = self.state.step
        assert guard.rewind_tokens is not None, after
        samples = guard.rewind_tokens // self.run.data.seq_len
        # Loading restores the counts of the checkpoint, which do not include this spike.
        counts = guard.counts
        for line in self.checkpointer.resume_from(*self.checkpointer.latest_checkpoints()):
            self.warn_on_first_rank(line)
        self.state.samples = samples
        guard.record_rewind(counts)
        self.warn_on_first_rank(
            f"Rewound from step {after} to step {self.state.step}; continuing with sample "
            f"{samples}."
        )

    # ---- timeline and trace -------------------------------------------------------------

    def write_timeline(self) -> None:
        """Write the pipeline timeline of the last step; a write error is only a warning.

        Communicates: broadcast of a text from each stage.
        """
        step = self.state.step
        if self.grid.degrees["pipe"] == 1 or step == 0 or not self.run.train.output_dir:
            return
        facts = gather_timeline(
            self.state.parallel, step, self.run.plan.num_micro_batches, self.device
        )
        folder = Path(self.run.train.output_dir)
        timed = facts["seconds"] > 0.0
        if self.grid.rank == 0 and folder.is_dir() and timed:
            try:
                (folder / TIMELINE_FILE).write_text(json.dumps(facts))
            except OSError as error:
                self.warn_on_first_rank(
                    f"{folder / TIMELINE_FILE} cannot be written: {error.strerror}. The run "
                    "continues without it."
                )

    def write_trace(self, events: list[trace.Event]) -> None:
        """Write this rank's trace of the last step; rank 0 also prints it as a table."""
        folder = Path(self.run.train.output_dir)
        path = folder / f"trace-rank{self.grid.rank}.json"
        try:
            trace.write_chrome_trace(path, {self.grid.rank: events})
        # The step is done but not saved yet: a failing trace must not end the run.
        except OSError as error:
            print(
                f"{path} cannot be written: {error.strerror}. The run continues without it.",
                file=sys.stderr,
                flush=True,
            )
        if self.grid.rank == 0:
            print(trace.format_table(events))
            print(f"Traces: {folder}/trace-rank*.json (open them in Perfetto)")
