"""Loads the weights of a run's checkpoint onto any grid, for inference and evaluation.

The model is parallelized without values, its buckets are allocated once, and every rank reads its
own slices into them. No rank ever holds the whole model, or a second copy of its shards.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import torch

from ranvier import counter_rng
from ranvier.checkpoint import manifest as manifests
from ranvier.checkpoint.directory import find_checkpoints, step_of
from ranvier.checkpoint.load import load_checkpoint as read
from ranvier.comm.consensus import run_and_raise_together
from ranvier.config import run as runs
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.models import AdapterConfig, Decoder, DecoderConfig, build_decoder
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.nn.materialize import materialize_parameters
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.pipeline.partition import TYPICAL_SEQ_LEN

MASTER_SUFFIX = ".master"
"""Suffix of the names of weights in a checkpoint."""


def load_model(
    folder: Path,
    grid: Grid,
    device: torch.device | str,
    *,
    step: int | None = None,
    plan: Plan | None = None,
    seq_len: int = TYPICAL_SEQ_LEN,
    dtype: torch.dtype | None = None,
    other_lora: AdapterConfig | None = None,
) -> Decoder:
    """Loads the model of a run onto a grid, in eval mode.

    step: of the checkpoint (default: the latest). plan, seq_len: see `parallelize`. dtype: type of
    the weights (default: as saved). other_lora: adapters to attach, which the run does not have;
    their weights are zero. Communicates: creation of process groups; one number over all axes.
    """
    run = load_config_from_dir(folder)
    checkpoint = find_checkpoint(folder, step)
    # Every rank reads the manifest itself; if one rank cannot, all ranks raise.
    dtype = dtype or run_and_raise_together(lambda: saved_dtype(checkpoint), grid, device)
    lora = run_and_raise_together(lambda: find_saved_adapters(checkpoint, run.lora), grid, device)
    model = build_empty_model(
        run.decoder, grid, device, lora=other_lora or lora, plan=plan, seq_len=seq_len, dtype=dtype
    )
    load_weights(model, checkpoint, device, base_only=other_lora is not None)
    return model.eval()


def saved_dtype(checkpoint: Path) -> torch.dtype:
    """Returns the dtype of most weights of a checkpoint; adapters may have a wider one."""
    counts: dict[torch.dtype, int] = {}
    for name, entry in manifests.read_manifest(checkpoint).tensors.items():
        if name.endswith(MASTER_SUFFIX):
            counts[entry.dtype] = counts.get(entry.dtype, 0) + math.prod(entry.shape)
    return max(counts, key=lambda one: counts[one], default=torch.float32)


def inference_dtype(dtype: torch.dtype, device: torch.device | str) -> torch.dtype:
    """Returns the dtype to run a model in; a CPU computes in fp32 instead of 16 bits."""
    narrow = dtype in (torch.bfloat16, torch.float16) and torch.device(device).type == "cpu"
    if narrow:
        return torch.float32
    return dtype


def find_saved_adapters(checkpoint: Path, lora: AdapterConfig) -> AdapterConfig:
    """Returns the adapter config of a run, or an empty one if the checkpoint has no adapters.

    A checkpoint from before the first step has none.
    """
    there = any(ADAPTER_INFIX in name for name in manifests.read_manifest(checkpoint).tensors)
    if there:
        return lora
    return AdapterConfig()


def build_empty_model(
    config: DecoderConfig,
    grid: Grid,
    device: torch.device | str,
    *,
    lora: AdapterConfig | None = None,
    plan: Plan | None = None,
    seq_len: int = TYPICAL_SEQ_LEN,
    dtype: torch.dtype = torch.float32,
) -> Decoder:
    """Returns a model on a grid with zero weights, of which each rank holds only its shards.

    Communicates: creation of process groups.
    """
    # No memory yet; the buckets are allocated once, below, only for the shards of this rank.
    with counter_rng.init_empty_weights():
        model = build_decoder(config, lora or AdapterConfig())
    parallelize(model, grid, plan, dtype=dtype, device=device, seq_len=seq_len, materialize=False)
    parallel = get_parallel_model(model)
    materialize_parameters(
        parallel.bucket_scheduler, parallel.layers, seed=0, dtype=dtype, device=device, blank=True
    )
    return model


def load_weights(
    model: torch.nn.Module,
    checkpoint: Path,
    device: torch.device | str,
    *,
    base_only: bool = False,
) -> None:
    """Reads my slices of the weights of a checkpoint; an error of one rank is raised on all ranks.

    base_only: leaves adapters as they are. Communicates: one number over all axes.
    """
    parallel = get_parallel_model(model)
    state = {
        f"{name}{MASTER_SUFFIX}": part
        for name, part in parallel.sharded_state().items()
        if not base_only or ADAPTER_INFIX not in name
    }
    run_and_raise_together(lambda: read(checkpoint, state, cast=True), parallel.grid, device)
    # Tells optimizers that the weights have changed, and drops gathered copies.
    parallel.bucket_scheduler.load_count += 1
    parallel.bucket_scheduler.begin_step("")


def load_config_from_dir(folder: Path) -> RunConfig:
    """Loads the settings of a run from its directory."""
    runs.check_is_run(folder)
    run = runs.load_run_config(folder / "config.toml", in_run=True)
    extensible = "max_seq" in run.model.changeable_settings
    if extensible and run.data.seq_len > run.model.sequence_limit:
        # Runs that were trained before this combination was rejected have seen sequences of this
        # length, so their maximum is raised.
        longer: Any = {"max_seq": run.data.seq_len}
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, **longer))
    known = math.prod(size for size in run.plan.degrees.values() if size > 0)
    # The file may have been edited by hand since the run wrote it.
    run.check_and_resolve(known)
    return run


def find_checkpoint(folder: Path, step: int | None = None) -> Path:
    """Returns the path of the checkpoint of a step, or of the latest one."""
    paths = find_checkpoints(folder / "checkpoints")
    if not paths:
        raise DataError(
            f"{folder} has no checkpoint. The weights are read from a checkpoint. Wait for the end "
            "of the run, or train with checkpoint.interval=100."
        )
    named = {step_of(path): path for path in paths}
    if step is not None and step not in named:
        raise PlanError(
            f"{folder} has no checkpoint of step {step}. Saved steps are "
            f"{', '.join(map(str, named))}. Use one of them."
        )
    if step is None:
        return paths[-1]
    return named[step]
