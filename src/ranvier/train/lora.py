"""LoRA adapters of a run: their settings and their initial values."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ranvier.checkpoint import directory
from ranvier.checkpoint.hf.peft_read import read_adapter
from ranvier.checkpoint.manifest import CheckpointManifest
from ranvier.config.run import RunConfig
from ranvier.errors import CheckpointError, PlanError
from ranvier.models.lora import ADAPTER_INFIX, named_adapters
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import get_parallel_model

FIXED_LORA_SETTINGS = ("rank", "alpha", "target_modules", "layers", "dora", "rslora", "shared")
"""Settings that must not change, as the weights of adapters depend on them."""


def read_adapter_settings(run: RunConfig) -> dict[str, Any]:
    """The settings of the adapter that a run starts from; raises if they contradict the run's."""
    stored = read_adapter(Path(run.lora.init_from), run.decoder)
    if run.lora.rank not in (0, stored.lora.rank):
        raise PlanError(
            f"lora.rank={run.lora.rank}, but lora.init_from={run.lora.init_from!r} has rank "
            f"{stored.lora.rank}. A run that starts from an adapter uses its settings. Remove "
            "lora.rank or lora.init_from."
        )
    return asdict(stored.lora)


def is_base_checkpoint(manifest: CheckpointManifest, run: RunConfig) -> bool:
    """Whether a run with adapters reads a checkpoint that has only base weights."""
    return run.lora.rank > 0 and not any(ADAPTER_INFIX in name for name in manifest.tensors)


def check_same_adapters(
    manifest: CheckpointManifest, stored: Mapping[str, Any], run: RunConfig
) -> None:
    """Raise if a run starts from a run with adapters, but has none or different ones.

    stored: the settings of the run that saved the checkpoint.
    """
    if not any(ADAPTER_INFIX in name for name in manifest.tensors):
        return
    start = run.train.init_from
    theirs = dict(stored.get("lora", {}))
    # A JSON round trip, as in the manifest: tuples become lists.
    mine = json.loads(json.dumps(asdict(run.lora)))
    other = [key for key in FIXED_LORA_SETTINGS if key in theirs and theirs[key] != mine[key]]
    if not other and run.lora.rank > 0:
        return
    have = ", ".join(f"lora.{key}={mine[key]!r}" for key in other) or "lora.rank=0"
    want = ", ".join(f"lora.{key}={theirs[key]!r}" for key in other) or "the same lora settings"
    path = Path(start)
    origin = shlex.quote(start)
    if directory.CHECKPOINT_NAME.fullmatch(path.name):
        origin = f"{shlex.quote(str(path.parent.parent))} --step {manifest.step}"
    raise CheckpointError(
        f"train.init_from={start!r} is a run with adapters of rank {theirs.get('rank', '?')}, but "
        f"this run has {have}. Its checkpoint has the base weights without the trained adapters. "
        f"Merge them with `ranvier export {origin} --output DIR` and use train.init_from=DIR, or "
        f"train with the same adapters: {want}."
    )


@torch.no_grad()
def init_adapters(run: RunConfig, model: nn.Module, optimizer: Optimizer) -> None:
    """Initialize adapters after the base weights are loaded.

    Communicates: with DoRA, weights over depth and the norms of their rows.
    """
    parallel = get_parallel_model(model)
    if run.lora.rank == 0:
        return
    for _, adapter, layer in named_adapters(model):
        # DoRA starts with the row norms of the base weight, so this needs its final values.
        adapter.init_magnitudes(layer)
    if run.lora.init_from:
        mine = {n: (w.storage, w.shard) for n, w in parallel.weights.items() if ADAPTER_INFIX in n}
        read_adapter(Path(run.lora.init_from), run.decoder).fill_state(mine)
    parallel.bucket_scheduler.begin_step("")
    # The working weights have changed: refresh the master copies.
    optimizer.reload_master_weights()
