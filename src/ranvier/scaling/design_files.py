"""Writes the runs of a design as TOML files, with the hours that they take."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.config.plan import AXES
from ranvier.config.run import load_run_config, run_from_tables, tables_to_toml
from ranvier.errors import PlanError
from ranvier.models.config import GEMSTONE_HEAD_DIM
from ranvier.planner.cluster import Cluster
from ranvier.scaling.cluster_time import fitting_micro_batch, predict_shape
from ranvier.scaling.design import (
    DECAY_RATIO,
    DEPTHS,
    EVALUATIONS,
    MAX_TOKENS_PER_PARAMETER,
    MIN_STEPS,
    WIDTHS,
    DesignedRun,
    design_runs,
)
from ranvier.scaling.flops import GEMSTONE_SEQ, GEMSTONE_VOCAB

MAX_BATCH_TOKENS = 2**19
STEPS_OF_SHORTEST_RUN = 1000
"""Steps of the run with the fewest tokens, which determines the batch of all."""
MIN_RUNS = 3
CHOSEN_SETTINGS = {
    "plan": (*AXES, "auto", "global_batch", "micro_batch"),
    "train": ("steps", "eval_interval", "output_dir"),
}
"""Settings of a run that a design determines, in addition to the model."""


@dataclass(frozen=True)
class PlannedRun:
    """A run of a design as settings."""

    run: DesignedRun
    steps: int
    batch: int
    """Sequences per step."""
    micro_batch: int
    seconds: float
    """Predicted time on one device."""

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self.steps * self.batch * self.run.seq

    @property
    def flops(self) -> float:
        """FLOPs of all steps."""
        return self.tokens * self.run.flops_per_token

    @property
    def name(self) -> str:
        """Name of its file and its run."""
        return f"{self.run.width}x{self.run.depth}"


def read_base(path: str) -> tuple[dict[str, Any], int, int]:
    """Returns the settings that all files share, the vocabulary size and the sequence length."""
    if not path:
        return {}, GEMSTONE_VOCAB, GEMSTONE_SEQ
    # Reports unknown settings and wrong types.
    load_run_config(Path(path))
    tables = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    model = tables.get("model", {})
    taken = [f"model.{key}" for key in model if key not in ("vocab", "max_seq")]
    # `plan = "auto"` is not a table.
    if not isinstance(tables.get("plan", {}), dict):
        tables["plan"] = {"auto": True}
    for section, names in CHOSEN_SETTINGS.items():
        taken += [f"{section}.{key}" for key in tables.get(section, {}) if key in names]
    if taken:
        raise PlanError(
            f"{path} sets {', '.join(taken)}. The design chooses the shapes, their batch and "
            "steps, and one device for each; a base can set the vocabulary (model.vocab), the data "
            "and the rest. Remove it."
        )
    if tables.get("optim", {}).get("schedule", "wsd") != "wsd":
        raise PlanError(
            f"{path} sets optim.schedule={tables['optim']['schedule']!r}. A design counts on "
            "losses at the peak learning rate along each run. Use 'wsd', or remove it."
        )
    if tables.get("data", {}).get("validation_fraction") == 0:
        raise PlanError(
            f"{path} sets data.validation_fraction=0. Laws are fitted to held-out losses. Use e.g. "
            "0.02, or remove it."
        )
    seq = int(tables.get("data", {}).get("seq_len", GEMSTONE_SEQ))
    return tables, int(model.get("vocab", GEMSTONE_VOCAB)), seq


def plan_design(
    count: int, budget: float, machine: Cluster, *, vocab: int, seq: int
) -> list[PlannedRun]:
    """Returns the runs of a design with their steps and times; raises if there are not enough."""
    if count < MIN_RUNS:
        raise PlanError(
            f"--design {count} is too few. A law of parameters and tokens needs at least "
            f"{MIN_RUNS} shapes. Use e.g. --design 6."
        )
    if not math.isfinite(budget) or budget <= 0.0:
        raise PlanError(
            f"--budget {budget:g} is out of range. It is the number of FLOPs of all runs together, "
            "above 0. Use e.g. --budget 1e17."
        )

    # The batch follows from the runs. A step of many micro-batches also has to fit, whose gradients
    # are accumulated.
    largest_batch = max(MAX_BATCH_TOKENS // seq, 1)

    def fits(width: int, depth: int) -> bool:
        prediction = predict_shape(
            width, depth, machine, vocab=vocab, seq=seq, batch=largest_batch, micro_batch=1
        )
        return prediction.fits_memory

    runs = design_runs(count, budget, vocab=vocab, seq=seq, fits=fits)
    smallest = DesignedRun(min(WIDTHS), min(DEPTHS), budget / count, vocab, seq)
    if not runs and smallest.tokens > MAX_TOKENS_PER_PARAMETER * smallest.parameters:
        raise PlanError(
            f"--budget {budget:g} is too large for {count} runs on one device of {machine.name}. A "
            f"run has at most {MAX_TOKENS_PER_PARAMETER:,.0f} tokens per parameter, and larger "
            "models do not fit the device. Use a smaller budget, or a --cluster with more memory."
        )
    if runs:
        fewest = min(run.tokens for run in runs)
        batch = _batch_of_design(fewest, seq)
    if not runs or fewest < MIN_STEPS * seq:
        raise PlanError(
            f"--budget {budget:g} is too small for {count} runs with sequences of {seq} tokens: "
            f"the smallest models, of width {GEMSTONE_HEAD_DIM}, could not be trained for "
            f"{MIN_STEPS} steps. Use a larger budget, fewer runs, or a --base with a smaller "
            "model.vocab and data.seq_len."
        )
    found = []
    for run in runs:
        steps = max(round(run.tokens / (batch * seq)), 1)
        fitted = fitting_micro_batch(
            run.width, run.depth, machine, vocab=vocab, seq=seq, batch=batch
        )
        assert fitted is not None, f"{run.size} fitted with one sample"
        micro, prediction = fitted
        found.append(PlannedRun(run, steps, batch, micro, steps * prediction.step_seconds))
    return found


def _batch_of_design(fewest_tokens: float, seq: int) -> int:
    """Sequences per step, a power of two: all runs have the same batch, as losses depend on it."""
    tokens = min(fewest_tokens / STEPS_OF_SHORTEST_RUN, MAX_BATCH_TOKENS)
    return int(2 ** max(math.floor(math.log2(max(tokens / seq, 1.0))), 0))


def settings_of(planned: PlannedRun, base: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Returns the settings of a run: those of the base, and those of the design."""
    run = planned.run
    longest = base.get("model", {}).get("max_seq", GEMSTONE_SEQ)
    own: dict[str, dict[str, Any]] = {
        "model": {"size": run.size, "vocab": run.vocab, "max_seq": max(run.seq, longest)},
        "data": {"seq_len": run.seq},
        "optim": {
            "lr_rule": "gemstone",
            "schedule": "wsd",
            "decay_ratio": DECAY_RATIO,
            "min_lr_ratio": 0.0,
        },
        "plan": {"global_batch": planned.batch, "micro_batch": planned.micro_batch},
        "train": {
            "steps": planned.steps,
            "eval_interval": max(planned.steps // EVALUATIONS, 1),
            "output_dir": str(folder / "runs" / planned.name),
        },
    }
    # A base may choose another optimizer or schedule, but not what the design computes with.
    yields = {"optim"}
    merged: dict[str, Any] = {name: dict(table) for name, table in base.items()}
    for section, table in own.items():
        before = merged.get(section, {})
        merged[section] = {**table, **before} if section in yields else {**before, **table}
    return merged


def write_design(
    planned: Sequence[PlannedRun], base: Mapping[str, Any], folder: Path
) -> list[Path]:
    """Writes one TOML file per run; every file is read back and checked."""
    paths = []
    folder.mkdir(parents=True, exist_ok=True)
    for one in planned:
        settings = settings_of(one, base, folder)
        # Also raises if a setting of the base does not suit the model.
        run_from_tables(settings).check_and_resolve(1)
        path = folder / f"{one.name}.toml"
        text = (
            f"# {one.run.size}: {one.run.parameters:,} parameters, {one.tokens:,} tokens, "
            f"{one.flops:.3g} FLOPs\n\n"
        )
        path.write_text(text + tables_to_toml(settings), encoding="utf-8")
        load_run_config(path)
        paths.append(path)
    return paths
