"""Trainer: put a run together and take its steps.

The same code runs on one process and on any grid; the batch of a step depends on the run only. The
host never waits for the step it has just issued: numbers, health and the wish to stop of step k are
read while step k + 1 runs.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ranvier import init, trace
from ranvier.checkpoint import files
from ranvier.comm import verbs
from ranvier.comm.agree import everyone, together
from ranvier.data.batch import Batch
from ranvier.data.dataset import Data
from ranvier.data.loader import Loader, held_out_batches, micro_batches
from ranvier.errors import DataError, NumericError
from ranvier.grid import Grid
from ranvier.models import Decoder
from ranvier.nn.leaf import Flow
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.scale import Scale
from ranvier.optim.schedule import share
from ranvier.parallel import parallel_of, parallelize
from ranvier.run import Run
from ranvier.sharding import State
from ranvier.train.diagnose import first_bad
from ranvier.train.fit import bounded, candidates, fit
from ranvier.train.graph import Graph
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
from ranvier.train.stages import TIMELINE, cut_of, timeline
from ranvier.train.step import Taken, evaluate, train_step
from ranvier.train.tune import tune

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@contextmanager
def frozen() -> Iterator[None]:
    """What is there now is no garbage: the collector does not look at it again in each round."""
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
    healthy: Tensor
    """Whether all losses and gradients so far were numbers; it lives on the device."""
    step: int = 0
    """Steps taken."""
    samples: int = 0
    """Samples used."""
    stopping: int = 0
    """The signal that ends the run, once all ranks know of it."""
    notes: list[str] = field(default_factory=list)
    """Lines on what was settled by measuring."""
    take: Callable[[Sequence[Batch], float, Tensor], Taken] = field(init=False)
    """Takes a step of these micro-batches with a learning rate, if all was healthy so far."""

    def __post_init__(self) -> None:
        self.take = partial(train_step, self.model, self.optimizer)

    @classmethod
    def assemble(
        cls, run: Run, grid: Grid, device: torch.device, data: Data, *, local_ranks: int = 0
    ) -> Trainer:
        """Model and optimizer of a checked run. Communicates: the making of groups; see `fit`.

        local_ranks: those that share the memory of this machine; 0: all.
        """
        optim, dtype = run.optim, DTYPES[run.train.dtype]
        with init.blank():
            model = Decoder(run.model)
        model = parallelize(
            model,
            grid,
            inner=run.plan.inner,
            overlap=run.plan.overlap,
            recompute=run.plan.unmeasured.recompute,
            compiled="inductor" if run.plan.compile == "on" else "",
            seed=run.train.seed,
            dtype=dtype,
            device=device,
            how=cut_of(run),
            keep=run.plan.gathered == "keep",
        )
        optimizer = Optimizer(
            parallel_of(model).queue,
            lr=run.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            decay=optim.decay,
            clip=optim.clip,
            factors={
                "matrix": optim.matrix_lr,
                "embedding": optim.embedding_lr,
                "vector": optim.vector_lr,
            },
            scale=Scale(device) if dtype == torch.float16 else None,
            moments=torch.bfloat16 if optim.moments == "bf16" else None,
        )
        micro = candidates(run.plan, run.data.seq)[0]
        flow = Flow(micro, run.data.seq, dtype.itemsize, statistics=4)
        notes = tune(run, model, grid, device, flow)
        run, more = fit(run, model, optimizer, device, local_ranks=local_ranks or grid.world)
        notes += bounded(run, model, optimizer, device, local_ranks or grid.world)
        plan, grid.trace.meter = run.plan, True
        flow = replace(flow, samples=plan.micro_batch)
        flops = step_flops(parallel_of(model), flow, plan.micro_batches)
        meter = Meter(plan.batch * run.data.seq, flops, peak_flops(device, dtype))
        healthy = torch.ones((), dtype=torch.bool, device=device)
        notes += more
        trainer = cls(run, grid, device, model, optimizer, data, meter, healthy, notes=notes)
        if plan.graph:
            trainer.take = Graph(model, optimizer).step
        return trainer

    # ---- steps --------------------------------------------------------------------------

    def steps(self, stop: Any = None) -> Iterator[dict[str, Any]]:
        """Take the steps that are left; metrics of each, one step behind the device.

        stop: its `signal` is looked at before each step; all ranks end after the same one.
        """
        every, last = self.run.train.evaluate, self.run.train.steps
        first = self.measure() if every and self.step == 0 else None
        before: Under | None = None
        ended: Mark | None = None
        runtime = parallel_of(self.model).pipeline.runtime
        with frozen(), Loader(self._loaded(), first=self.step) as loader:
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
                before = under
                if self.due(every):
                    under.held_out = self.measure()
                if self.due(every) or self.due(self.run.checkpoint.every):
                    yield self.read(under, ended)
                    before = ended = None
                    if self.due(self.run.checkpoint.every) and self.step < last:
                        self.save()
        if before is not None:
            yield self.read(before, ended)
        self.write_timeline()

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
        self.grid.trace.awaited = []  # what lay between is no part of a step
        begun, batches, lr = Mark(self.device), next(loader), self.lr()
        pinned = self.device.type == "cuda"  # a copy from other memory would wait for the device
        status = torch.tensor(
            [signal, memory(self.device)], dtype=torch.float64, pin_memory=pinned
        ).to(self.device, non_blocking=True)
        with self.grid.trace.at("step.status"):
            largest = verbs.all_reduce(status, everyone(self.grid), "max")
        on_device = [batch.to(self.device) for batch in batches]
        taken = self.take(on_device, lr, self.healthy)
        self.healthy = taken.healthy
        factor = torch.full_like(taken.loss, math.nan) if scale is None else scale.value
        both = largest.wait()
        if self.device.type == "cpu":  # here nothing is gained by reading it later
            self.stopping = int(both[0])
        numbers = Later([taken.loss, taken.norm, taken.healthy, *both, factor], self.device)
        self.step, self.samples = self.step + 1, self.samples + run.plan.batch
        awaited, self.grid.trace.awaited = self.grid.trace.awaited, []
        tokens = self.samples * run.data.seq
        return Under(self.step - 1, tokens, lr, numbers, begun, loader.waited(), awaited)

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
        """The metrics of a step; waits for it.

        A loss or gradient that is no number ends the run here.
        """
        loss, _, healthy, signal, *_ = under.numbers.read()
        if not healthy:
            self.fail(under.step, loss)
        self.stopping = self.stopping or int(signal)
        return self.meter.row(under, ended)

    def fail(self, step: int, loss: float) -> None:
        """Name the first tensor of a step that is no number. Communicates: as that step."""
        batches = [batch.to(self.device) for batch in self._loaded()(step)]
        scale = self.optimizer.scale
        name = first_bad(self.model, batches, None if scale is None else scale.value)
        cause = f"The first is {name}" if name else "Taken again, all are: a device may be faulty"
        kept = [path.name for path in files.found(self.checkpoints)]
        raise NumericError(
            f"Step {step + 1} of {self.run.train.steps} (loss {loss}) has numbers that are not "
            f"finite. {cause}. Weights and moments were not updated with them. Use a lower "
            f"optim.lr or look at samples {self.samples_of(step)}; checkpoints: "
            f"{', '.join(kept) or 'none yet'}."
        )

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
            loss = evaluate(self.model, micros)
            return known(loss.item())

    # ---- checkpoints --------------------------------------------------------------------

    @property
    def checkpoints(self) -> Path:
        """Where they lie."""
        return Path(self.run.train.out) / "checkpoints"

    def state(self) -> State:
        """All tensors that the run goes on from."""
        frozen = {
            f"{weight.name}.master": (weight.param.detach(), weight.place)
            for weight in parallel_of(self.model).weights.values()
            if not weight.trainable
        }
        return {**self.optimizer.state(), **frozen}

    def save(self) -> Path | None:
        """Save a checkpoint. Communicates: see `files.save`."""
        if self.run.checkpoint.every < 0:
            return None
        scale = self.optimizer.scale
        with self.meter.phase("checkpoint"):
            together(self._refuse_bad, self.grid, self.device)
            facts = {
                "samples": self.samples,
                "updates": self.optimizer.updates.item(),
                "scale": None if scale is None else [scale.value.item(), scale.good.item()],
                "fingerprint": self.data.fingerprint,
            }
            keep = self.run.checkpoint.keep
            return files.save(
                self.checkpoints,
                self.step,
                self.state(),
                facts,
                self.grid,
                self.device,
                keep=keep,
            )

    def _refuse_bad(self) -> None:
        """A checkpoint must be one to go on from."""
        for name, (part, _) in self.state().items():
            if not bool(part.isfinite().all()):
                raise NumericError(
                    f"{name} is not finite after step {self.step}. Such weights are not saved. "
                    "Use a lower optim.lr and go on from the checkpoint before."
                )

    def resume(self, checkpoint: Path) -> None:
        """Go on from a checkpoint. Communicates: all-gather of weights over data."""
        facts = files.facts(checkpoint)
        if facts["fingerprint"] != self.data.fingerprint and not self.run.checkpoint.other_data:
            raise DataError(
                f"The data has the fingerprint {self.data.fingerprint}, but {checkpoint} was "
                f"trained on {facts['fingerprint']}. A run goes on with the same corpora and "
                "weights. Restore them, or set checkpoint.other_data=True."
            )
        files.load(checkpoint, self.state(), self.grid)
        self.optimizer.restored(updates=facts["updates"])
        scale = self.optimizer.scale
        if scale is not None and facts["scale"] is not None:
            scale.value.fill_(facts["scale"][0])
            scale.good.fill_(facts["scale"][1])
        self.step, self.samples = int(facts["step"]), int(facts["samples"])

    def write_timeline(self) -> None:
        """Write what the stages did in the last step. Communicates: a text of each stage."""
        parallel = parallel_of(self.model)
        if self.grid.degrees["pipe"] == 1 or self.step == 0 or not self.run.train.out:
            return
        facts = timeline(parallel, self.step, self.run.plan.micro_batches, self.device)
        folder, timed = Path(self.run.train.out), facts["seconds"] > 0.0
        if self.grid.rank == 0 and folder.is_dir() and timed:
            (folder / TIMELINE).write_text(json.dumps(facts))

    def write_trace(self, events: list[trace.Event]) -> None:
        """Write this rank's part of the last step; rank 0 prints its table."""
        folder = Path(self.run.train.out)
        trace.write_chrome(folder / f"trace-rank{self.grid.rank}.json", {self.grid.rank: events})
        if self.grid.rank == 0:
            print(trace.table(events))
            print(f"Traces: {folder}/trace-rank*.json (open them in Perfetto)")
