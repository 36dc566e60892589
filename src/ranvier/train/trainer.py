"""Trainer: put a run together, take its steps, write what happened.

The same code runs on one process and on any grid; the batch of a step depends on the run only.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch

from ranvier import init, trace
from ranvier import run as runs
from ranvier.comm import verbs
from ranvier.data import corpus
from ranvier.data.batch import Batch
from ranvier.data.corpus import Corpus, packing
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.launch import Ranks
from ranvier.models import Decoder
from ranvier.nn.loss import IGNORE
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.schedule import cosine
from ranvier.parallel import parallel_of, parallelize
from ranvier.run import Run
from ranvier.train.step import train_step

DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass
class Trainer:
    """A run that is ready to take steps."""

    run: Run
    grid: Grid
    model: Decoder
    optimizer: Optimizer
    corpus: Corpus
    device: torch.device

    @classmethod
    def assemble(cls, run: Run, grid: Grid, device: torch.device) -> Trainer:
        """Model, optimizer and data of a checked run. Communicates: the making of groups."""
        dtype = run.train.dtype
        auto = "bf16" if device.type == "cuda" else "fp32"
        with init.blank():
            model = Decoder(run.model)
        model = parallelize(
            model,
            grid,
            inner=run.plan.inner,
            overlap=run.plan.overlap,
            recompute=run.plan.recompute,
            seed=run.train.seed,
            dtype=DTYPES[auto if dtype == "auto" else dtype],
            device=device,
        )
        optim = run.optim
        optimizer = Optimizer(
            parallel_of(model).queue,
            lr=optim.lr,
            betas=(optim.beta1, optim.beta2),
            eps=optim.eps,
            decay=optim.decay,
            clip=optim.clip,
        )
        return cls(run, grid, model, optimizer, read(run), device)

    def batch(self, step: int) -> Batch:
        """The global batch of a step."""
        run = self.run
        first = step * run.plan.batch
        tokens, targets = self.corpus.batch(first, run.plan.batch, run.train.seed)
        samples = torch.arange(first, first + run.plan.batch)
        if not run.data.packed:
            return Batch(tokens, targets, samples=samples)
        documents, positions = packing(tokens)
        # what follows an END is another document
        targets = targets.masked_fill(tokens == corpus.END, IGNORE)
        return Batch(tokens, targets, positions, documents, samples)

    def step(self, step: int) -> dict[str, Any]:
        """Take a step; its metrics."""
        start, optim = time.perf_counter(), self.run.optim
        lr = cosine(step, steps=self.run.train.steps, warmup=optim.warmup, lr=optim.lr)
        batch = self.batch(step)
        micros = batch.micro_batches(self.grid, self.run.plan.micro_batch)
        loss, norm = train_step(self.model, [b.to(self.device) for b in micros], self.optimizer, lr)
        seconds = time.perf_counter() - start
        return {
            "step": step,
            "tokens": (step + 1) * batch.tokens.numel(),
            "loss": loss.item(),
            "lr": lr,
            "grad_norm": norm.item(),
            "seconds": seconds,
            "tokens_per_second": batch.tokens.numel() / seconds,
        }

    def steps(self) -> Iterator[dict[str, Any]]:
        """Take all steps; the last one is traced if the run asks for it."""
        last = self.run.train.steps - 1
        for step in range(self.run.train.steps):
            traced = self.run.train.trace and step == last
            with self.grid.trace.recording() if traced else nullcontext() as events:
                metrics = self.step(step)
            yield metrics
            if events is not None:
                self.write_trace(events)

    def write_trace(self, events: list[trace.Event]) -> None:
        """Write this rank's part of the last step; rank 0 prints its table."""
        folder = Path(self.run.train.out)
        trace.write_chrome(folder / f"trace-rank{self.grid.rank}.json", {self.grid.rank: events})
        if self.grid.rank == 0:
            print(trace.table(events))
            print(f"Traces: {folder}/trace-rank*.json (open them in Perfetto)")


def check_data(run: Run) -> None:
    """Refuse a vocabulary that cannot name the tokens of the corpus."""
    if run.model.vocab < corpus.VOCAB:
        raise DataError(
            f"model.vocab={run.model.vocab} is smaller than the {corpus.VOCAB} tokens of the "
            f"corpus (bytes and an end of document). Use model.vocab={corpus.VOCAB} or more."
        )


def read(run: Run) -> Corpus:
    """The corpus of a run."""
    check_data(run)
    return Corpus.of(corpus.standard_library(run.data.max_bytes), seq=run.data.seq)


def device_of(run: Run, me: Ranks) -> torch.device:
    """The device of this rank."""
    kind = run.train.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("train.device='cuda', but torch sees no CUDA device. Use 'cpu' or 'auto'.")
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", me.local_rank % torch.cuda.device_count())


def backend_of(run: Run, me: Ranks, device: torch.device) -> str:
    """The backend of the process groups: nccl needs a device for each rank."""
    if run.train.backend == "nccl" and device.type != "cuda":
        raise PlanError(f"train.backend='nccl' on {device}. nccl needs CUDA devices. Use 'gloo'.")
    if run.train.backend != "auto":
        return run.train.backend
    own = device.type == "cuda" and me.local_world <= torch.cuda.device_count()
    return "nccl" if own else "gloo"


def claim(run: Run) -> str:
    """Make the directory of a run: the one asked for, or a new one. Only one run can claim it."""
    if run.train.out:
        folder = Path(run.train.out)
        if (folder / "metrics.jsonl").exists():
            raise PlanError(
                f"train.out={run.train.out!r} holds a run already. A run is not overwritten. "
                "Choose another directory or leave train.out empty."
            )
        folder.mkdir(parents=True, exist_ok=True)
        return run.train.out
    for number in itertools.count(1):
        folder = Path("runs") / (run.model.size if number == 1 else f"{run.model.size}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
    return str(folder)


def told(text: str, grid: Grid, device: torch.device) -> str:
    """The text of rank 0 on all ranks. Communicates: broadcast of 1024 bytes over all axes."""
    buffer = torch.zeros(1024, dtype=torch.uint8, device=device)
    words = text.encode()[:1024]
    buffer[: len(words)] = torch.tensor(list(words), dtype=torch.uint8).to(device)
    every = verbs.broadcast(buffer, grid.axis(*grid.degrees)).wait()
    return bytes(every.tolist()).rstrip(b"\0").decode()


def train(run: Run, me: Ranks) -> None:
    """Train as one rank; rank 0 prints and writes metrics. Communicates: all of it."""
    device = device_of(run, me)
    grid = Grid.of(
        run.plan, rank=me.rank, connected=me.world > 1, timeout_seconds=run.train.timeout
    )
    grid.trace.check = run.train.debug
    out = told(claim(run) if me.rank == 0 else "", grid, device)
    run = replace(run, train=replace(run.train, out=out))
    trainer = Trainer.assemble(run, grid, device)
    if me.rank > 0:
        for _ in trainer.steps():
            pass
        return
    folder = Path(out)
    (folder / "config.toml").write_text(runs.to_toml(run))
    print(describe(trainer), flush=True)
    with (folder / "metrics.jsonl").open("w") as file:
        show(trainer, file)
    print(f"Metrics: {folder}/metrics.jsonl")


def describe(trainer: Trainer) -> str:
    """One line on what is about to be trained."""
    run, parallel = trainer.run, parallel_of(trainer.model)
    count = sum(math.prod(weight.sharding.shape) for weight in parallel.weights.values())
    shape = " · ".join(f"{a} {n}" for a, n in run.plan.degrees.items() if n > 1) or "one rank"
    return (
        f"{run.model.size}: {count / 1e6:.2f} M parameters, {parallel.queue.dtype} gradients, "
        f"on {trainer.device}, grid: {shape}; {run.plan.batch} x {run.data.seq} tokens a step "
        f"in {run.plan.micro_batches} micro-batch(es)"
    )


def show(trainer: Trainer, file: TextIO) -> None:
    """Write each step's metrics and print some of them."""
    total = trainer.run.train.steps
    every = max(total // 20, 1)
    for metrics in trainer.steps():
        file.write(json.dumps(metrics) + "\n")
        file.flush()
        step = metrics["step"]
        if step % every == 0 or step == total - 1:
            print(
                f"step {step:>5}/{total}  loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  "
                f"norm {metrics['grad_norm']:.3f}  {metrics['tokens_per_second']:,.0f} tokens/s",
                flush=True,
            )
