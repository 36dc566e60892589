"""Loaded: the weights of a run's checkpoint on any grid, for those who do not train.

The model is put on the grid without values, its buckets are made once, and every rank reads its own
slices into them: no rank ever holds the whole model, nor a second copy of its part.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ranvier import counter_rng
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.load import load as read
from ranvier.comm.consensus import together
from ranvier.config.plan import Inner
from ranvier.grid import Grid
from ranvier.infer.generate import checkpoint_of, run_of
from ranvier.models import AdapterConfig, Decoder, DecoderConfig, build
from ranvier.nn.materialize import fill_values
from ranvier.parallel.parallelize import parallel_of, parallelize
from ranvier.pipeline.partition import Cut

MASTER = ".master"
"""How the names of weights end in a checkpoint."""


def load(
    folder: Path,
    grid: Grid,
    device: torch.device | str,
    *,
    step: int | None = None,
    inner: Inner = "samples",
    how: Cut | None = None,
    dtype: torch.dtype | None = None,
) -> Decoder:
    """The model of a run after a step (None: the newest checkpoint) on a grid, ready to be asked.

    inner: what col splits inside. how: its stages over pipe. dtype: of the weights; None: the one
    they were saved in. Communicates: the making of groups; one number over all axes.
    """
    run, checkpoint = run_of(folder), checkpoint_of(folder, step)
    dtype = dtype or together(lambda: saved_dtype(checkpoint), grid, device)
    lora = together(lambda: adapters_in(checkpoint, run.lora), grid, device)
    model = empty(run.model, grid, device, lora=lora, inner=inner, how=how, dtype=dtype)
    fill_from(model, checkpoint, device)
    return model.eval()


def saved_dtype(checkpoint: Path) -> torch.dtype:
    """The type of most weights of a checkpoint: adapters may have a wider one."""
    counts: dict[torch.dtype, int] = {}
    for name, entry in manifests.read(checkpoint).tensors.items():
        if name.endswith(MASTER):
            counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    return max(counts, key=lambda one: counts[one], default=torch.float32)


def spoken_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """The type to ask a model in: a CPU computes in fp32 rather than in 16 bits."""
    narrow = dtype in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"
    return torch.float32 if narrow else dtype


def adapters_in(checkpoint: Path, lora: AdapterConfig) -> AdapterConfig:
    """The adapters of a run, if a checkpoint has them: before the first step it has none."""
    there = any(".adapters." in name for name in manifests.read(checkpoint).tensors)
    return lora if there else AdapterConfig()


def empty(
    config: DecoderConfig,
    grid: Grid,
    device: torch.device | str,
    *,
    lora: AdapterConfig | None = None,
    inner: Inner = "samples",
    how: Cut | None = None,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """A model on a grid with weights of 0, of which a rank has its own part only.

    Communicates: the making of groups.
    """
    with counter_rng.blank():
        model = build(config, lora or AdapterConfig())
    parallelize(model, grid, inner=inner, dtype=dtype, device=device, how=how, materialize=False)
    parallel = parallel_of(model)
    fill_values(parallel.queue, parallel.leaves, seed=0, dtype=dtype, device=device, blank=True)
    return model


def fill_from(model: torch.nn.Module, checkpoint: Path, device: torch.device | str) -> None:
    """Read my slices of the weights of a checkpoint; an error of one rank is one on all.

    Communicates: one number over all axes.
    """
    parallel = parallel_of(model)
    state = {f"{name}{MASTER}": part for name, part in parallel.state().items()}
    together(lambda: read(checkpoint, state, cast=True), parallel.grid, device)
    parallel.queue.loads += 1
    parallel.queue.begin("")
