"""Verify a run: the shrunk model trained, saved, reloaded and trained on, as `ranvier train` does.

Where `verify` compares passes and updates, this goes through the whole life of a run on the
configured grid: initial weights or those of another model (`train.start`), masks of pruned
matrices, states and weights on the host, two steps, the final checkpoint, a second run that goes on
from it, and its final checkpoint. Everything is judged from outside, by the files that the run
leaves: the losses and gradient norms in `metrics.jsonl`, the weights in the checkpoint and the
status in `run.json` against plain PyTorch in one process, in float64. A run that is pruned begins
with the weights of another model, so that masks that are not taken from these are seen.

Left out: adapters, the sample of text, types other than float64.
"""

from __future__ import annotations

import contextlib
import json
import math
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ranvier import counter_rng
from ranvier.checkpoint import async_saver
from ranvier.checkpoint import directory as checkpoints
from ranvier.checkpoint.load import wholes
from ranvier.comm.consensus import told
from ranvier.config.run import Run
from ranvier.data.batch import Batch
from ranvier.data.cache import index_pairs
from ranvier.data.indexed_dataset import PairWriter
from ranvier.data.loader import micro_batches
from ranvier.grid import Grid
from ranvier.launch import Ranks
from ranvier.models import build
from ranvier.nn.cross_entropy import IGNORE
from ranvier.optim import pruning
from ranvier.optim.lr_schedule import share
from ranvier.parallel.parallelize import Parallel, parallel_of, parallelize
from ranvier.train import train
from ranvier.train.resume import run_directory as folders

SAVED, ALL = 2, 3
"""Steps of the first run, and of both together."""
NOISE = 1e-10
"""A gradient this much smaller than the model's largest is rounding noise of a true zero."""
DOCUMENT = 40
"""Mean length of the documents that are trained on, in tokens."""


@dataclass(frozen=True)
class Report:
    """What one rank knows of the run: rank 0 has the differences, others nothing."""

    differences: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Largest relative difference by quantity, and whether it is of one pass only."""
    complaints: list[str] = field(default_factory=list)
    """What the files of the run say that is not true."""


def short_run(run: Run, folder: Path, *, steps: int) -> Run:
    """A shrunk run that trains in a directory for so many steps, in float64."""
    memory, pruned = run.memory, run.prune
    if memory.states == "file":
        memory = replace(memory, path=str(folder))
    if pruned.masks:  # they fit the whole model only
        pruned = replace(pruned, masks="", sparsity=pruned.sparsity or 0.5)
    if pruned.every:
        pruned = replace(pruned, every=1, until=SAVED)
    starts = run.train.start or pruned.on
    return replace(
        run,
        lora=replace(run.lora, rank=0, start=""),
        data=replace(run.data, corpus=(str(folder / "tokens"),), weights=(), held_out=0.0),
        optim=replace(run.optim, moments="master"),
        memory=replace(memory, fit="off", limit=0.0, host=0.0),
        prune=pruned,
        checkpoint=replace(run.checkpoint, every=0, resume="auto", keep=0),
        train=replace(
            run.train,
            steps=steps,
            out=str(folder / "run"),
            start=str(folder / "start") if starts else "",
            dtype="fp64",
            device=run.train.device if run.train.backend == "nccl" else "cpu",
            fp8="off",
            evaluate=0,
            prompt="",
            log=(),
            trace=False,
        ),
    )


def train_shortly(run: Run, me: Ranks, grid: Grid, device: torch.device) -> Report:
    """Train the shrunk run, save it, go on, save it again; what rank 0 found.

    Communicates: all that two runs do; a path over all axes.
    """
    with _directory(run, grid, device) as folder:
        if grid.rank == 0:
            _write_tokens(folder, run)
            first = short_run(run, folder, steps=SAVED)
            if first.train.start:
                _write_start(folder, first)
        told("", grid, device)  # all is written
        for steps in (SAVED, ALL):
            now = short_run(run, folder, steps=steps)
            with _quiet(folder / f"rank{grid.rank}-{steps}.log"):
                code = train.train(now, me, [_stored(folder)])
            assert code == 0, f"a run of {steps} steps ended with {code}"
        told("", grid, device)  # all is saved
        return judge(run, folder) if grid.rank == 0 else Report()


@contextlib.contextmanager
def _directory(run: Run, grid: Grid, device: torch.device) -> Iterator[Path]:
    """A new directory that all ranks see, beside the run's if it has one; removed in the end."""
    made = ""
    if grid.rank == 0:
        near = Path(run.train.out).parent if run.train.out else None
        made = tempfile.mkdtemp(prefix="ranvier-verify-", dir=near)
    folder = Path(told(made, grid, device))
    try:
        yield folder
    finally:
        if grid.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _quiet(path: Path) -> Iterator[None]:
    """What a run prints goes to a file."""
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


# ---- what it begins with ------------------------------------------------------------------------


def _write_tokens(folder: Path, run: Run) -> None:
    """Documents of random tokens, enough for all steps, and their index."""
    drawn = np.random.default_rng(run.train.seed + 1)
    writer = PairWriter(folder / "tokens", "<i4")
    while writer.tokens < (ALL + 1) * run.plan.batch * (run.data.seq + 1):
        length = int(drawn.integers(2, 2 * DOCUMENT))
        writer.add(drawn.integers(0, run.model.vocab, length))
    writer.close()
    (folder / "stored").write_text(str(index_pairs([folder / "tokens"], folder)))


def _stored(folder: Path) -> str:
    """Where the index of the documents is."""
    return (folder / "stored").read_text()


def _alone(run: Run, seed: int) -> Parallel:
    """The model on one rank, with its initial values."""
    with counter_rng.blank():
        model = build(run.model, run.lora)
    return parallel_of(parallelize(model, Grid({}), seed=seed, dtype=torch.float64, device="cpu"))


def _write_start(folder: Path, run: Run) -> None:
    """A checkpoint of the same model with other weights."""
    state = _alone(run, run.train.seed + 1).state()
    named = {f"{name}.master": x for name, x in state.items()}
    facts = {"samples": 0, "fingerprint": "", "weights": True}
    async_saver.save(folder / "start", 0, named, facts, Grid({}))


# ---- plain PyTorch ------------------------------------------------------------------------------


@dataclass
class Reference:
    """The same run in one process."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    sizes: dict[str, float] = field(default_factory=dict)
    """Largest magnitude of each gradient of the first step."""

    @classmethod
    def of(cls, folder: Path, run: Run) -> Reference:
        """Take all steps with torch's AdamW; matrices are pruned as documented."""
        seed = run.train.seed + (1 if run.train.start else 0)
        parallel = _alone(run, seed)
        model = build(run.model, run.lora).double()
        named = dict(model.named_parameters())
        values = parallel.state()
        with torch.no_grad():
            for name, param in named.items():
                param.copy_(values[name][0].view(param.shape))
        found = cls()
        # Of experts each has a matrix of its own.
        pruned = {
            name: named[name] if weight.dims[0] == "expert" else named[name].unsqueeze(0)
            for name, weight in parallel.weights.items()
            if pruning.prunable(weight)
        }
        found.prune(run, pruned, step=0)
        optimizer = _adamw(run, parallel, named)
        data = train.opened(run, [_stored(folder)]).train
        for step in range(ALL):
            if run.prune.every and 0 < step <= run.prune.until:
                found.prune(run, pruned, step=step)
            size = run.plan.batch
            (batch,) = micro_batches(data, step * size, size, Grid({}), size)
            found.step(run, model, optimizer, batch, step)
        found.weights = {name: param.detach() for name, param in named.items()}
        return found

    @torch.no_grad()
    def prune(self, run: Run, weights: Mapping[str, Tensor], *, step: int) -> None:
        """Keep the largest magnitudes of each matrix, of those that are there still.

        weights: `[matrices, n, m]`, views of the parameters.
        """
        config = run.prune
        for name, weight in weights.items() if config.on else ():
            size = weight.abs().to(torch.float32)
            if name in self.masks:
                size = size.masked_fill(~self.masks[name].view(size.shape), -1.0)
            if config.groups is not None:
                stay, of = config.groups
                rows = size.reshape(-1, of)
            else:
                rows = size.flatten(1)
                sparsity = pruning.sparsity_at(step, config.sparsity, config.until)
                stay = pruning.stays(rows.shape[1], sparsity)
            order = rows.sort(dim=1, descending=True, stable=True).indices[:, :stay]
            mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, True)
            self.masks[name] = mask.view(weight.shape)
            weight.mul_(self.masks[name])

    def step(
        self, run: Run, model: nn.Module, optimizer: torch.optim.AdamW, batch: Batch, step: int
    ) -> None:
        """One step with the learning rate of its run."""
        optim = run.optim
        steps = SAVED if step < SAVED else ALL
        part = share(
            step,
            kind=optim.schedule,
            steps=steps,
            warmup=optim.warmup,
            cooldown=optim.cooldown,
            floor=optim.floor,
        )
        for group in optimizer.param_groups:
            group["lr"] = run.lr * part * group["factor"]
        optimizer.zero_grad()
        count = (batch.targets != IGNORE).sum()
        loss = model(**batch.inputs()) / count
        loss.backward()
        extra = getattr(model, "extra", None)
        self.losses.append(loss.item() - (0.0 if extra is None else extra.item() / count.item()))
        for name, param in model.named_parameters():
            if name in self.masks and param.grad is not None:
                param.grad.mul_(self.masks[name].view(param.shape))
            if step == 0 and param.grad is not None:
                self.sizes[name] = float(param.grad.abs().max())
        limit = optim.clip if optim.clip > 0.0 else math.inf
        self.norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        with torch.no_grad():  # what is pruned later has moments still
            for name, param in model.named_parameters():
                if name in self.masks:
                    param.mul_(self.masks[name].view(param.shape))
        for mixture in getattr(model, "mixtures", ()):
            mixture.move_bias()


def _adamw(run: Run, parallel: Parallel, named: Mapping[str, nn.Parameter]) -> torch.optim.AdamW:
    """Torch's AdamW with a group for each weight."""
    optim = run.optim
    groups = [
        {
            "params": [param],
            "weight_decay": optim.decay if parallel.shapes[name][0] == "matrix" else 0.0,
            "factor": float(getattr(optim, f"{parallel.shapes[name][0]}_lr")),
        }
        for name, param in named.items()
    ]
    betas = (optim.beta1, optim.beta2)
    return torch.optim.AdamW(groups, lr=run.lr, betas=betas, eps=optim.eps)


# ---- what it left -------------------------------------------------------------------------------


def judge(run: Run, folder: Path) -> Report:
    """The files of a run against plain PyTorch."""
    run = short_run(run, folder, steps=ALL)
    want = Reference.of(folder, run)
    where = folder / "run"
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, tuple[float, bool]] = {}
    by_step = {int(row["step"]) + 1: row for row in rows}
    for step in range(1, ALL + 1):
        for key, name, numbers in (
            ("loss", "loss", want.losses),
            ("grad_norm", "norm", want.norms),
        ):
            have = by_step.get(step, {}).get(key)
            what = f"{name} of step {step}{_when(step)}"
            found[what] = (_relative(have, numbers[step - 1]), step == 1)
    newest = checkpoints.found(where / "checkpoints")[-1]
    weights = wholes(newest)
    if want.masks:
        differ = [
            float(((weights[name].view(mask.shape) != 0) != mask).double().mean())
            for name, mask in want.masks.items()
        ]
        found["masks of pruned matrices: share that differs"] = (max(differ), True)
    floor = NOISE * max(want.sizes.values())  # Adam makes full steps of rounding noise
    errors = {
        name: _error(weights.get(name), x)
        for name, x in want.weights.items()
        if want.sizes.get(name, 0.0) >= floor
    }
    worst = max(errors, key=lambda name: errors[name])
    found[f"weights in the checkpoint (largest: {worst})"] = (errors[worst], False)
    return Report(found, list(_complaints(where, by_step)))


def _when(step: int) -> str:
    return " (reloaded)" if step > SAVED else ""


def _relative(have: Any, want: float) -> float:
    """How far a number is off; one that is not there is off for ever."""
    return abs(have - want) / abs(want) if isinstance(have, float) else math.inf


def _error(have: Tensor | None, want: Tensor) -> float:
    """How far a tensor is off, relative to its largest magnitude."""
    if have is None:
        return math.inf
    return float((have.view(want.shape) - want).abs().max() / want.abs().max())


def _complaints(where: Path, rows: Mapping[int, Any]) -> Iterator[str]:
    """What the run says of itself that is not true."""
    facts = folders.facts(where)
    if facts.get("status") != "finished":
        yield f"run.json says {facts.get('status')!r} of a run that has finished"
    if sorted(rows) != list(range(1, ALL + 1)):
        yield f"metrics.jsonl has the steps {sorted(rows)}, not 1 to {ALL}"
    if facts.get("restarts") != [SAVED]:
        yield f"run.json says it was reloaded after the steps {facts.get('restarts')}, not {SAVED}"
    if not (where / "report.html").exists():
        yield "the run left no report.html"
