"""Verifies a run: trains the small model, saves, reloads and continues it, as `ranvier train` does.

`verify` compares passes and updates. This module covers all phases of a run on the configured grid:
initial weights or the weights of another model (`train.init_from`), masks of pruned matrices,
optimizer states and weights offloaded to the host, two steps, the final checkpoint, a second run
that resumes from it, and its final checkpoint. Only the files of the run are checked: the losses
and gradient norms in `metrics.jsonl`, the weights in the checkpoint and the status in `run.json`
are compared with plain PyTorch in one process, in float64. A pruned run starts from the weights of
another model, so that masks computed from the wrong weights are noticed.

Not covered: adapters, the text sample, dtypes other than float64.
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

import torch
from torch import Tensor, nn

from ranvier import counter_rng
from ranvier.checkpoint import async_saver
from ranvier.checkpoint import directory as checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.comm.consensus import broadcast_text
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.config.sections import LoraConfig
from ranvier.data.batch import SampleBatch
from ranvier.data.loader import load_micro_batches
from ranvier.data.run_data import data_source
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo
from ranvier.models.recurrent_decoder import RecurrentDecoder
from ranvier.optim import pruning
from ranvier.optim.lr_schedule import lr_factor
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.tools.serial_optimizer import build_serial_optimizer, serial_param_groups
from ranvier.train import train
from ranvier.train.memory.resolve import build_rule
from ranvier.train.resume import run_directory as folders

SAVED_STEPS = 2
TOTAL_STEPS = 3
"""Steps of the first run, and of both runs together."""
NOISE_RATIO = 1e-10
"""A gradient smaller than the model's largest one by this ratio is rounding noise."""


@dataclass(frozen=True)
class RunVerification:
    """Result of one rank: rank 0 has the differences, the other ranks have none."""

    differences: dict[str, tuple[float, bool]] = field(default_factory=dict)
    """Largest relative difference by quantity, and whether it results from a single pass."""
    complaints: list[str] = field(default_factory=list)
    """Wrong values in the files of the run."""


def short_run(run: ResolvedRun, folder: Path, *, steps: int) -> ResolvedRun:
    """Returns the small run, set up to train for `steps` steps in a directory, in float64."""
    memory = run.memory
    pruned = run.prune
    if memory.optimizer_states == "disk":
        memory = replace(memory, offload_dir=str(folder))
    # A mask file fits only the full model: prune by magnitude instead.
    if pruned.mask_file:
        pruned = replace(pruned, mask_file="", sparsity=pruned.sparsity or 0.5)
    # Let every step up to the checkpoint update the masks.
    if pruned.update_interval:
        pruned = replace(pruned, update_interval=1, final_step=SAVED_STEPS)
    # See the module docstring: a pruned run always starts from other weights.
    starts = run.train.init_from or pruned.is_enabled
    return replace(
        run,
        lora=LoraConfig(),
        data=replace(
            run.data,
            sources=(str(folder / "tokens"),),
            mixture_weights=(),
            validation_fraction=0.0,
            canary_samples=(TOTAL_STEPS + 1) * run.plan.global_batch if run.data.canaries else 0,
        ),
        # Everything that rounds, measures or is random is switched off.
        optim=replace(
            run.optim,
            state_dtype="master",
            warmup_steps=min(run.optim.warmup_steps, SAVED_STEPS),
        ),
        memory=replace(memory, auto=False, device_limit_gib=0.0, host_limit_gib=0.0),
        prune=pruned,
        checkpoint=replace(run.checkpoint, interval=0, resume="auto", keep_latest=0),
        train=replace(
            run.train,
            steps=steps,
            output_dir=str(folder / "run"),
            init_from=str(folder / "start") if starts else "",
            dtype="fp64",
            device=run.train.device if run.train.backend == "nccl" else "cpu",
            float8="off",
            eval_interval=0,
            canary_interval=0,
            sample_prompt="",
            loggers=(),
            trace_comm=False,
        ),
    )


def train_and_judge(
    run: ResolvedRun, me: ProcessInfo, grid: Grid, device: torch.device
) -> RunVerification:
    """Trains the small run, saves, resumes and saves it again; returns the findings of rank 0.

    Communicates: everything that two runs do; a path over all axes.
    """
    with _shared_directory(run, grid, device) as folder:
        if grid.rank == 0:
            samples = (TOTAL_STEPS + 1) * run.plan.global_batch
            stored = data_source(run.model).write_random(run, folder, samples)
            (folder / "stored").write_text(json.dumps(stored))
            first = short_run(run, folder, steps=SAVED_STEPS)
            if first.train.init_from:
                _write_start(folder, first)
        # Barrier: rank 0 has written all files.
        broadcast_text("", grid, device)
        for steps in (SAVED_STEPS, TOTAL_STEPS):
            now = short_run(run, folder, steps=steps)
            with _redirect_output(folder / f"rank{grid.rank}-{steps}.log"):
                code = train.train(now, me, _read_stored(folder))
            assert code == 0, f"a run of {steps} steps ended with {code}"
        # Barrier: all ranks have saved their part.
        broadcast_text("", grid, device)
        if grid.rank == 0:
            return judge_run(run, folder)
        return RunVerification()


@contextlib.contextmanager
def _shared_directory(run: RunConfig, grid: Grid, device: torch.device) -> Iterator[Path]:
    """A temporary directory that all ranks see, next to the run's if it has one; removed at
    exit.
    """
    made = ""
    if grid.rank == 0:
        if run.train.output_dir:
            near = Path(run.train.output_dir).parent
        else:
            near = None
        made = tempfile.mkdtemp(prefix="ranvier-verify-", dir=near)
    folder = Path(broadcast_text(made, grid, device))
    try:
        yield folder
    finally:
        if grid.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _redirect_output(path: Path) -> Iterator[None]:
    """Redirects stdout to a file."""
    with path.open("w", encoding="utf-8") as file, contextlib.redirect_stdout(file):
        yield


# ---- inputs of the run ------------------------------------------------------------------------


def _read_stored(folder: Path) -> list[str]:
    """Returns the sources with which the random data are opened."""
    stored: list[str] = json.loads((folder / "stored").read_text())
    return stored


def _single_rank_model(run: RunConfig, seed: int) -> ParallelModel:
    """Returns the model on one rank, with its initial values."""
    with counter_rng.init_empty_weights():
        model = run.model_kind.build_model(run.model, run.lora)
    return get_parallel_model(
        parallelize(model, Grid({}), seed=seed, dtype=torch.float64, device="cpu")
    )


def _write_start(folder: Path, run: RunConfig) -> None:
    """Writes a checkpoint of the same model with other weights."""
    state = _single_rank_model(run, run.train.seed + 1).sharded_state()
    named = {f"{name}.master": x for name, x in state.items()}
    facts = {"samples": 0, "fingerprint": "", "weights": True}
    async_saver.save_and_wait(folder / "start", 0, named, facts, Grid({}))


# ---- plain PyTorch ------------------------------------------------------------------------------


def begin_serial_step(model: nn.Module, batch: SampleBatch, *, seed: int, step: int) -> None:
    """Sets what the random numbers of a plain model depend on: those of a recurrent one."""
    if isinstance(model, RecurrentDecoder):
        model.begin_step(seed, step)
        model.initial_state.seed = seed
        model.initial_state.samples = batch.samples


@dataclass
class SerialRun:
    """The same run in one process of plain PyTorch."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    masks: dict[str, Tensor] = field(default_factory=dict)
    max_grads: dict[str, float] = field(default_factory=dict)
    """Largest magnitude of each gradient of the first step."""

    @classmethod
    def train_serially(cls, folder: Path, run: RunConfig) -> SerialRun:
        """Takes all steps with the optimizer of the run in plain PyTorch, and prunes matrices."""
        seed = run.train.seed + (1 if run.train.init_from else 0)
        # Initial values come from the counter-based RNG, which is the same on any grid.
        parallel = _single_rank_model(run, seed)
        model = run.model_kind.build_model(run.model, run.lora).double()
        named = dict(model.named_parameters())
        values = parallel.sharded_state()
        with torch.no_grad():
            for name, param in named.items():
                param.copy_(values[name][0].view(param.shape))
        found = cls()
        # Experts are stacked in one tensor and are pruned one by one; other matrices get a leading
        # dim of 1.
        pruned = {
            name: named[name] if weight.dims[0] == "expert" else named[name].unsqueeze(0)
            for name, weight in parallel.weights.items()
            if pruning.is_prunable(weight)
        }
        found.prune_weights(run, pruned, step=0)
        optimizer = build_serial_optimizer(
            serial_param_groups(run, named, parallel.weight_summaries),
            build_rule(run),
            lr=run.peak_lr,
            betas=(run.optim.beta1, run.optim.beta2),
            eps=run.optim.eps,
        )
        data = data_source(run.model).open(run, _read_stored(folder)).train
        for step in range(TOTAL_STEPS):
            if run.prune.update_interval and 0 < step <= run.prune.final_step:
                found.prune_weights(run, pruned, step=step)
            size = run.plan.global_batch
            (batch,) = load_micro_batches(data, step * size, size, Grid({}), size)
            found.take_step(run, model, optimizer, batch, step)
        found.weights = {name: param.detach() for name, param in named.items()}
        return found

    @torch.no_grad()
    def prune_weights(self, run: RunConfig, weights: Mapping[str, Tensor], *, step: int) -> None:
        """Keeps the largest magnitudes of each matrix, among the elements that are not yet pruned.

        weights: `[matrices, n, m]`, views of the parameters.
        """
        config = run.prune
        for name, weight in weights.items() if config.is_enabled else ():
            size = weight.abs().to(torch.float32)
            if name in self.masks:
                # Magnitudes are never negative: -1 sorts pruned elements last, so that they stay
                # pruned.
                size = size.masked_fill(~self.masks[name].view(size.shape), -1.0)
            if config.pattern_n_m is not None:
                stay, of = config.pattern_n_m
                rows = size.reshape(-1, of)
            else:
                rows = size.flatten(1)
                sparsity = pruning.sparsity_at(step, config.sparsity, config.final_step)
                stay = pruning.num_kept_elements(rows.shape[1], sparsity)
            # A stable sort breaks ties as the sharded implementation does.
            order = rows.sort(dim=1, descending=True, stable=True).indices[:, :stay]
            mask = torch.zeros_like(rows, dtype=torch.bool).scatter_(1, order, True)
            self.masks[name] = mask.view(weight.shape)
            weight.mul_(self.masks[name])

    def take_step(
        self,
        run: RunConfig,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        batch: SampleBatch,
        step: int,
    ) -> None:
        """Takes one step with the learning rate of its run."""
        optim = run.optim
        # The schedule of the first run ends at its own last step, the second one's at the total.
        if step < SAVED_STEPS:
            steps = SAVED_STEPS
        else:
            steps = TOTAL_STEPS
        part = lr_factor(
            step,
            kind=optim.schedule,
            steps=steps,
            warmup=optim.warmup_steps,
            cooldown=optim.decay_ratio,
            floor=optim.min_lr_ratio,
        )
        for group in optimizer.param_groups:
            group["lr"] = run.peak_lr * part * group["factor"]
        optimizer.zero_grad()
        begin_serial_step(model, batch, seed=run.train.seed, step=step)
        count = batch.count_targets()
        loss = model(**batch.model_inputs()) / count
        loss.backward()
        extra = getattr(model, "aux_loss", None)
        self.losses.append(loss.item() - (0.0 if extra is None else extra.item() / count.item()))
        for name, param in model.named_parameters():
            # Pruned elements must not count in the gradient norm.
            if name in self.masks and param.grad is not None:
                param.grad.mul_(self.masks[name].view(param.shape))
            if step == 0 and param.grad is not None:
                self.max_grads[name] = float(param.grad.abs().max())
        if optim.max_grad_norm > 0.0:
            limit = optim.max_grad_norm
        else:
            limit = math.inf
        self.grad_norms.append(nn.utils.clip_grad_norm_(model.parameters(), limit).item())
        optimizer.step()
        # An element pruned later still has Adam moments that would move it away from zero.
        with torch.no_grad():
            for name, param in model.named_parameters():
                if name in self.masks:
                    param.mul_(self.masks[name].view(param.shape))
        for mixture in getattr(model, "moe_layers", ()):
            mixture.update_expert_bias()


# ---- files of the run -------------------------------------------------------------------------


def judge_run(run: ResolvedRun, folder: Path) -> RunVerification:
    """Compares the files of a run with plain PyTorch."""
    run = short_run(run, folder, steps=TOTAL_STEPS)
    want = SerialRun.train_serially(folder, run)
    where = folder / "run"
    rows = [json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()]
    found: dict[str, tuple[float, bool]] = {}
    # metrics.jsonl counts steps from 0, the report from 1.
    by_step = {int(row["step"]) + 1: row for row in rows}
    for step in range(1, TOTAL_STEPS + 1):
        for key, name, numbers in (
            ("loss", "loss", want.losses),
            ("grad_norm", "norm", want.grad_norms),
        ):
            have = by_step.get(step, {}).get(key)
            what = f"{name} of step {step}{_reload_note(step)}"
            found[what] = (_relative_difference(have, numbers[step - 1]), step == 1)
    newest = checkpoints.find_checkpoints(where / "checkpoints")[-1]
    weights = load_full_tensors(newest)
    if want.masks:
        differ = [
            float(((weights[name].view(mask.shape) != 0) != mask).double().mean())
            for name, mask in want.masks.items()
        ]
        found["masks of pruned matrices: share that differs"] = (max(differ), True)
    # Adam turns rounding noise into full steps: weights whose gradient is exactly zero are skipped.
    floor = NOISE_RATIO * max(want.max_grads.values())
    errors = {
        name: _max_relative_error(weights.get(name), x)
        for name, x in want.weights.items()
        if want.max_grads.get(name, 0.0) >= floor
    }
    worst = max(errors, key=lambda name: errors[name])
    found[f"weights in the checkpoint (largest: {worst})"] = (errors[worst], False)
    return RunVerification(found, list(_find_complaints(where, by_step)))


def _reload_note(step: int) -> str:
    if step > SAVED_STEPS:
        return " (reloaded)"
    return ""


def _relative_difference(have: Any, want: float) -> float:
    """Returns the relative difference of a number; inf if it is missing."""
    if isinstance(have, float):
        return abs(have - want) / abs(want)
    return math.inf


def _max_relative_error(have: Tensor | None, want: Tensor) -> float:
    """Returns the largest difference of a tensor, relative to its largest magnitude."""
    if have is None:
        return math.inf
    return float((have.view(want.shape) - want).abs().max() / want.abs().max())


def _find_complaints(where: Path, rows: Mapping[int, Any]) -> Iterator[str]:
    """Yields the wrong values in the files of the run."""
    facts = folders.read_run_json(where)
    if facts.get("status") != "finished":
        yield f"run.json has status {facts.get('status')!r}, but the run has finished"
    if sorted(rows) != list(range(1, TOTAL_STEPS + 1)):
        yield f"metrics.jsonl has the steps {sorted(rows)}, not 1 to {TOTAL_STEPS}"
    if facts.get("restarts") != [SAVED_STEPS]:
        yield (f"run.json has restarts after the steps {facts.get('restarts')}, not {SAVED_STEPS}")
    if not (where / "report.html").exists():
        yield "the run did not write report.html"
