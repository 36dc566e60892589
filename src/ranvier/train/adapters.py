"""Adapters of a run: their settings and values before the first step."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from ranvier.checkpoint.manifest import Manifest
from ranvier.checkpoint.peft import read_adapter
from ranvier.errors import PlanError
from ranvier.models.adapter import adapters_of
from ranvier.parallel import parallel_of
from ranvier.run import Run

if TYPE_CHECKING:
    from ranvier.train.trainer import Trainer

INSIDE = ".adapters."
"""What the names of adapters' weights have, and no others."""


def settled(run: Run) -> Run:
    """The run with the settings of the adapter that it starts from."""
    if not run.lora.start:
        return run
    stored = read_adapter(Path(run.lora.start), run.model)
    if run.lora.rank not in (0, stored.lora.rank):
        raise PlanError(
            f"lora.rank={run.lora.rank}, but lora.start={run.lora.start!r} has rank "
            f"{stored.lora.rank}. A run that starts from an adapter has its settings. Leave "
            "lora.rank out, or lora.start empty."
        )
    return replace(run, lora=replace(run.lora, **asdict(stored.lora)))


def is_base(manifest: Manifest, run: Run) -> bool:
    """Whether a checkpoint has weights beside which a run trains adapters, but none of these."""
    return run.lora.rank > 0 and not any(INSIDE in name for name in manifest.tensors)


@torch.no_grad()
def begin(trainer: Trainer) -> None:
    """Give adapters their first values beside weights that have theirs.

    Communicates: with DoRA, weights over depth and the lengths of their rows.
    """
    run, parallel = trainer.run, parallel_of(trainer.model)
    if run.lora.rank == 0:
        return
    for _, adapter, layer in adapters_of(trainer.model):
        adapter.measure(layer)
    if run.lora.start:
        mine = {n: (w.rest, w.place) for n, w in parallel.weights.items() if INSIDE in n}
        read_adapter(Path(run.lora.start), run.model).fill(mine)
    parallel.queue.begin("")
    trainer.optimizer.reread()
