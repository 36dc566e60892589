"""Trainer: put a run together and take its steps.

The same code runs on one process and on any grid; the batch of a step depends on the run only. The
host never waits for the step it has just issued: numbers, health and the wish to stop of step k are
read while step k + 1 runs.
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
from ranvier.checkpoint.async_saver import Saver
from ranvier.checkpoint.directory import found
from ranvier.comm import collectives
from ranvier.comm.consensus import everyone, told
from ranvier.config.run import Run
from ranvier.cost.layers import Flow
from ranvier.data.batch import Batch
from ranvier.data.dataset import Data
from ranvier.data.loader import Loader, held_out_batches, micro_batches
from ranvier.errors import ElsewhereError, NumericError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.optim.lr_schedule import share
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallel_of
from ranvier.sharding import State
from ranvier.system.terminal import print
from ranvier.train import lora, pruning
from ranvier.train.build_model import DTYPES, built
from ranvier.train.build_stage import TIMELINE, timeline
from ranvier.train.cuda_graph import Graph
from ranvier.train.health.loss_guard import Guard
from ranvier.train.health.nan_diagnosis import first_bad
from ranvier.train.health.replay import Replay
from ranvier.train.health.replica_check import compare
from ranvier.train.memory import saved_collectives
from ranvier.train.memory.breakdown import Account
from ranvier.train.memory.probe import bounded, candidates
from ranvier.train.memory.resolve import settle
from ranvier.train.metrics import (
    Later,
    Mark,
    Meter,
    Under,
    known,
    memory,
    peak_flops,
    step_flops,
)
from ranvier.train.model_converters import choose_arithmetic
from ranvier.train.prediction import Comparison
from ranvier.train.report import moe
from ranvier.train.resume import checkpointing
from ranvier.train.resume.open_directory import OpenDirectory
from ranvier.train.step import Taken, evaluate, train_step

PATIENCE = 5.0
"""Seconds that a run waits for the checkpoint before when the next is due, then does without."""


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is no garbage: the collector does not look at it again in each round.

    A program that has frozen what it holds before is left as it is: thawing would undo that.
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
    """A run that is ready to take steps."""

    run: Run
    grid: Grid
    device: torch.device
    model: Decoder
    optimizer: Optimizer
    data: Data
    meter: Meter
    guard: Guard
    step: int = 0
    """Steps taken."""
    samples: int = 0
    """Samples used."""
    stopping: int = 0
    """The signal that ends the run, once all ranks know of it."""
    notes: list[str] = field(default_factory=list)
    """Lines on what was settled by measuring."""
    compared: Comparison | None = None
    """What was foretold, and the steps since."""
    held_out: float | None = None
    """The last held-out loss."""
    skipped_saves: int = 0
    """Checkpoints that were due while the one before was still being written."""
    account: Account = field(default_factory=Account)
    """What is known of its memory."""
    directory: OpenDirectory = field(default_factory=OpenDirectory)
    """Where it saves, on rank 0; without it the run ends."""
    take: Callable[..., Taken] = field(init=False)
    """Takes a step of these micro-batches with a learning rate, if its numbers are good."""

    def __post_init__(self) -> None:
        self.take = partial(train_step, self.model, self.optimizer)
        self._saver: Saver | None = None
        self._read = self.step
        """Steps that the host has read."""

    @classmethod
    def assemble(
        cls, run: Run, grid: Grid, device: torch.device, data: Data, *, local_ranks: int = 0
    ) -> Trainer:
        """Model and optimizer of a checked run. Communicates: the making of groups; see `fit`.

        local_ranks: those that share the memory of this machine; 0: all.
        """
        run = lora.settled(run)
        dtype = DTYPES[run.train.dtype]
        model = built(run, grid, device, local_ranks=local_ranks or grid.world)
        pruning.begin(run, parallel_of(model))
        micro, local_ranks = candidates(run.plan, run.data.seq)[0], local_ranks or grid.world
        flow = Flow(micro, run.data.seq, dtype.itemsize, statistics=4)
        notes = choose_arithmetic(run, model, grid, device, flow)
        found = settle(run, model, device, local_ranks=local_ranks)
        run, optimizer = found.run, found.optimizer
        notes += saved_collectives.settle(run, model, optimizer, device, local_ranks)
        notes += bounded(run, model, device, local_ranks)
        plan, grid.trace.meter = run.plan, True
        flow = replace(flow, samples=plan.micro_batch)
        flops = step_flops(parallel_of(model), flow, plan.micro_batches)
        meter = Meter(plan.batch * run.data.seq, flops, peak_flops(device, dtype))
        guard = Guard(run.guard, device)
        notes += found.notes
        trainer = cls(run, grid, device, model, optimizer, data, meter, guard, notes=notes)
        trainer.account = found.account
        lora.begin(trainer)
        if plan.graph:
            trainer.take = Graph(model, optimizer).step
        return trainer

    # ---- steps --------------------------------------------------------------------------

    def steps(self, stop: Any = None) -> Iterator[dict[str, Any]]:
        """Take the steps that are left; metrics of each, one step behind the device.

        stop: its `signal` is looked at before each step; all ranks end after the same one.
        """
        first = self.measure() if self.run.train.evaluate and self.step == 0 else None
        yield from self._stretch(stop, first)
        while self.guard.goes_back():
            self.rewind()
            yield from self._stretch(stop, None)
        if self._saver is not None:
            self._saver.finish()

    def _stretch(self, stop: Any, first: float | None) -> Iterator[dict[str, Any]]:
        """Take steps to the end, or until the run has to go back."""
        every, last, guard = self.run.train.evaluate, self.run.train.steps, self.guard
        before: Under | None = None
        ended: Mark | None = None
        runtime = parallel_of(self.model).pipeline.runtime
        patience = self.run.train.timeout
        with frozen(), Loader(self._loaded(), self.step, patience=patience) as loader:
            while self.step < last and not self.stopping:
                runtime.timing = runtime.stage.count > 1 and self._timed()
                try:
                    under = self._traced(loader, getattr(stop, "signal", 0))
                except BaseException:
                    if before is not None:  # that step was taken all the same
                        yield self.read(before, ended)
                    raise
                under.held_out, first = first, None
                if before is not None:
                    yield self.read(before, ended)
                    ended = before.numbers.mark
                if guard.goes_back():  # what was just issued is thrown away, too
                    return
                before, saved = under, self.due(self.run.checkpoint.every)
                if self.due(every):
                    under.held_out = self.measure()
                if self.due(every) or self._compared() or (saved and self._reads_first()):
                    yield self.read(under, ended)
                    before = ended = None
                    if guard.goes_back():
                        return
                    if self._compared():
                        self.compare()
                if saved and self.step < last:
                    self.save(wait=False)
        if before is not None:
            yield self.read(before, ended)

    def _reads_first(self) -> bool:
        """Whether a step is read before it is saved; else the device need not even pause."""
        waits = self.device.type == "cpu" or not self.run.checkpoint.background
        return waits or self.run.guard.spike == "rewind"

    def _compared(self) -> bool:
        """Whether the copies of weights are compared after this step."""
        every = self.run.guard.replicas if self.grid.world > 1 else 0
        return every > 0 and self.step % every == 0

    def compare(self) -> None:
        """Compare all copies of weights. Communicates: see `compare`."""
        if self.grid.world > 1:
            with self.meter.phase("comparison of copies"):
                compare(self.optimizer, self.grid, self.device, self._kept)

    def _timed(self) -> bool:
        """Whether the next step shows what its stages do: on a device it takes longer then."""
        return self.device.type == "cpu" or self.step == self.run.train.steps - 1

    def _traced(self, loader: Loader[list[Batch]], signal: int) -> Under:
        """Issue a step; the last one is traced if the run asks for it."""
        if not self.run.train.trace or self.step < self.run.train.steps - 1:
            return self.issue(loader, signal=signal)
        with self.grid.trace.recording() as events:
            under = self.issue(loader, signal=signal)
        self.write_trace(events)
        return under

    def due(self, every: int) -> bool:
        """Whether something is to be done after this step: each `every`, and at the end."""
        return every > 0 and (self.step % every == 0 or self.step == self.run.train.steps)

    def _loaded(self) -> Callable[[int], list[Batch]]:
        """The micro-batches of this rank by the number of the step."""
        run, offset = self.run, self.samples - self.step * self.run.plan.batch

        def make(step: int) -> list[Batch]:
            return micro_batches(
                self.data.train,
                offset + step * run.plan.batch,
                run.plan.batch,
                self.grid,
                run.plan.micro_batch,
                pin=self.device.type == "cuda",
            )

        return make

    def issue(self, loader: Loader[list[Batch]], *, signal: int = 0) -> Under:
        """Start the next step.

        Communicates: all of a step; the largest signal and memory of all ranks.
        """
        run, scale = self.run, self.optimizer.scale
        self.meter.pulse.beat("step", self.step)
        pruning.renew(self)
        self.grid.trace.awaited = []  # what lay between is no part of a step
        begun, batches, lr = Mark(self.device), next(loader), self.lr()
        pinned = self.device.type == "cuda"  # a copy from other memory would wait for the device
        status = torch.tensor(
            [signal, memory(self.device), *self._reported()], dtype=torch.float64, pin_memory=pinned
        ).to(self.device, non_blocking=True)
        with self.grid.trace.at("step.status"):
            largest = collectives.all_reduce(status, everyone(self.grid), "max")
        on_device = [batch.to(self.device) for batch in batches]
        if run.plan.graph and self._saver is not None:  # a recorded step asks nobody
            self._saver.changing()
        self.guard.before(self.step)
        taken = self.take(on_device, lr, self.guard.watch, *self._passes())
        factor = torch.full_like(taken.loss, math.nan) if scale is None else scale.value
        signals, held, *heard = largest.wait()
        if self.device.type == "cpu":  # here nothing is gained by reading it later
            self.stopping = int(signals)
        fate = [taken.loss, taken.norm, taken.bad, taken.spike]
        experts = moe.numbers(parallel_of(self.model).balance)
        numbers = Later([*fate, signals, held, factor, *experts, *heard], self.device)
        self.step, self.samples = self.step + 1, self.samples + run.plan.batch
        awaited, self.grid.trace.awaited = self.grid.trace.awaited, []
        tokens = self.samples * run.data.seq
        return Under(self.step - 1, tokens, lr, numbers, begun, loader.waited(), awaited)

    def _passes(self) -> tuple[Callable[[Callable[[], Tensor]], Tensor], ...]:
        """A way of its own to do the passes of this step, if there is one."""
        again = self.run.guard.replay
        if again and self.step % again == 0:
            return (Replay(self.model, self.step).twice,)
        if self.account.gradients or self.run.plan.graph:
            return ()
        return (partial(self.account.watch, self.model),)

    def _reported(self) -> tuple[int, int]:
        """How far this rank's part of a checkpoint is, and what failed."""
        left, failed = (0, 0) if self._saver is None else self._saver.report()
        return left, failed or self.directory.code()

    def _hear(self, left: int, failed: int) -> None:
        """Take note of what all ranks have reported; what failed on one ends all of them."""
        if failed:
            self.directory.check()
        if self._saver is not None:
            self._saver.hear(left, failed)
        elif failed:
            raise ElsewhereError(failed)

    def lr(self) -> float:
        """The learning rate of the next step."""
        run, optim = self.run, self.run.optim
        return run.lr * share(
            self.step,
            kind=optim.schedule,
            steps=run.train.steps,
            warmup=optim.warmup,
            cooldown=optim.cooldown,
            floor=optim.floor,
        )

    def read(self, under: Under, ended: Mark | None) -> dict[str, Any]:
        """The metrics of a step; waits for it. Too many that are wrong end the run here.

        Communicates: after a spike from which the run goes back, the name of a checkpoint.
        """
        loss, _, _, spike, signal, *_, left, failed = under.numbers.read()
        self._hear(int(left), int(failed))
        words = self.guard.judge(under)
        self._read = under.step + 1
        if self._saver is not None and self._saver.step == self._read:
            self._saver.note(guard=self.guard.facts())
        if self.guard.exhausted():
            self.fail(under.step, loss)
        if spike:
            self.guard.check_spikes(under.step, self._kept())
        if spike and self.run.guard.spike == "rewind" and self.newest():
            self.guard.back = under.tokens
        elif spike and self.run.guard.spike == "rewind":
            words += "There is no checkpoint to go back to."
        if words:
            self.say(words)
        self.stopping = self.stopping or int(signal)
        return self.meter.row(under, ended)

    def say(self, words: str) -> None:
        """Warn, once for all ranks."""
        if self.grid.rank == 0:
            print(words.strip(), file=sys.stderr, flush=True)

    def fail(self, step: int, loss: float) -> None:
        """Name the first tensor of a step that is no number. Communicates: as that step."""
        batches = [batch.to(self.device) for batch in self._loaded()(step)]
        scale = self.optimizer.scale
        name = first_bad(self.model, batches, None if scale is None else scale.value)
        cause = f"The first is {name}" if name else "Taken again, all are: a device may be faulty"
        raise NumericError(
            f"Step {step + 1} of {self.run.train.steps} (loss {loss}) has numbers that are not "
            f"finite. {cause}. At most guard.skips={self.run.guard.skips} such steps are left out; "
            "weights and moments were not updated with them. Use a lower optim.lr or look at "
            f"samples {self.samples_of(step)}; go on from {self._kept()}."
        )

    def _kept(self) -> str:
        """The checkpoint to go on from, in words. Communicates: see `Saver.finish`."""
        if self._saver is not None:
            self._saver.finish()
        return next((str(path) for path in found(self.checkpoints)[::-1]), "none yet")

    def samples_of(self, step: int) -> str:
        """Numbers of the samples of a step that has been issued."""
        first = self.samples - (self.step - step) * self.run.plan.batch
        return f"{first} to {first + self.run.plan.batch - 1}"

    def measure(self) -> float | None:
        """Mean loss of the held-out samples; None if there are none. Communicates: as forward."""
        held_out, run = self.data.held_out, self.run
        if held_out is None:
            return None
        with self.meter.phase("evaluation"):
            batches = held_out_batches(
                held_out,
                run.train.evaluate_samples,
                run.plan.batch,
                self.grid,
                run.plan.micro_batch,
            )
            micros = [batch.to(self.device) for batch in chain.from_iterable(batches)]
            self.held_out = known(evaluate(self.model, micros).item())
            return self.held_out

    # ---- checkpoints --------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
        return Path(self.run.train.out) / "checkpoints"

    @property
    def saver(self) -> Saver:
        """What saves this run. Communicates: a word over all axes, when first asked for."""
        if self._saver is None:
            self._saver = checkpointing.saver(self)
        return self._saver

    def state(self) -> State:
        """All tensors that the run goes on from."""
        return checkpointing.tensors(self)

    def watch_directory(self, directory: OpenDirectory) -> None:
        """End the run, and save nothing, once these directories are gone (on rank 0)."""
        self.directory = directory
        if self._saver is not None:
            self._saver.check = directory.check

    def save(self, *, wait: bool = True) -> Path | None:
        """Save a checkpoint, perhaps behind the run; the last one that is there, on rank 0.

        Communicates: what `Saver` does.
        """
        if self.run.checkpoint.every < 0:
            return None
        if self.run.guard.replicas and not self._compared():  # else it has been done just now
            self.compare()
        saver, wait = self.saver, wait or not self.run.checkpoint.background
        with self.meter.phase("checkpoint"):
            if not saver.settle(math.inf if wait else PATIENCE):
                self._skip_save(saver.step)
            elif saver.step != self.step:
                mine, sparse = checkpointing.written(self)
                also = [Path(self.run.train.out) / "metrics.jsonl"]
                saver.save(self.step, mine, checkpointing.facts(self), also=also, sparse=sparse)
                if self._read == self.step:
                    saver.note(guard=self.guard.facts())
            return saver.finish() if wait else saver.saved

    def _skip_save(self, before: int) -> None:
        self.skipped_saves += 1
        self.say(
            f"No checkpoint after step {self.step}: that of step {before} is still being written. "
            "Use a larger checkpoint.every or a faster disk."
        )

    def newest(self) -> list[Path]:
        """The checkpoints, newest first. Communicates: what rank 0 sees, to all."""
        if self._saver is not None:
            self._saver.finish()
        mine = [str(path) for path in found(self.checkpoints)[::-1]]
        return [*map(Path, json.loads(told(json.dumps(mine), self.grid, self.device)))]

    def rewind(self) -> None:
        """Go back to the newest good checkpoint, and on behind the samples that led to a spike.

        Communicates: as `resume`.
        """
        guard, after = self.guard, self.step
        assert guard.back is not None, after
        samples, counts = guard.back // self.run.data.seq, guard.counts
        for line in self.resume(*self.newest()):
            self.say(line)
        self.samples = samples
        guard.went_back(counts)
        self.say(f"Gone back from step {after} to {self.step}, on with sample {samples}.")

    def resume(self, *candidates: Path) -> list[str]:
        """Go on from the first of these checkpoints that is good. Communicates: see `saves`."""
        lines = checkpointing.resume(self, candidates)
        self._read = self.step
        return lines

    def write_timeline(self) -> None:
        """Write what the stages did in the last step; a run can do without.

        Communicates: a text of each stage.
        """
        parallel = parallel_of(self.model)
        if self.grid.degrees["pipe"] == 1 or self.step == 0 or not self.run.train.out:
            return
        facts = timeline(parallel, self.step, self.run.plan.micro_batches, self.device)
        folder, timed = Path(self.run.train.out), facts["seconds"] > 0.0
        if self.grid.rank == 0 and folder.is_dir() and timed:
            try:
                (folder / TIMELINE).write_text(json.dumps(facts))
            except OSError as error:
                self.say(f"{folder / TIMELINE} cannot be written: {error.strerror}.")

    def write_trace(self, events: list[trace.Event]) -> None:
        """Write this rank's part of the last step; rank 0 prints its table."""
        folder = Path(self.run.train.out)
        path = folder / f"trace-rank{self.grid.rank}.json"
        try:
            trace.write_chrome(path, {self.grid.rank: events})
        except OSError as error:  # the step is taken, and is to be saved
            print(f"{path} cannot be written: {error.strerror}.", file=sys.stderr, flush=True)
        if self.grid.rank == 0:
            print(trace.table(events))
            print(f"Traces: {folder}/trace-rank*.json (open them in Perfetto)")
