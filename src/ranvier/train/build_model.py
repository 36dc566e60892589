"""Builds the parallel model of a run, for the trainer and for dry runs."""

from __future__ import annotations

import torch

from ranvier import counter_rng
from ranvier.config.run import RunConfig
from ranvier.grid import Grid
from ranvier.models import Decoder, build_decoder
from ranvier.parallel.parallelize import parallelize
from ranvier.train.build_stage import pipeline_config
from ranvier.train.memory import placement

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_model(run: RunConfig, grid: Grid, device: torch.device, *, local_ranks: int) -> Decoder:
    """Build the model of a run on its grid. Communicates: creation of process groups."""
    # No rank ever holds the whole model: `parallelize` fills only the local shards.
    with counter_rng.init_empty_weights():
        model = build_decoder(run.model, run.lora)
    return parallelize(
        model,
        grid,
        inner=run.plan.inner,
        overlap=run.plan.overlap,
        recompute=run.plan.without_measuring.recompute,
        collectives=run.memory.collectives,
        dispatch=run.plan.dispatch,
        compiled="inductor" if run.plan.compile == "on" else "",
        seed=run.train.seed,
        dtype=DTYPES[run.train.dtype],
        device=device,
        how=pipeline_config(run),
        keep=run.plan.gathered == "keep",
        room=placement.weight_offload_bytes(run, local_ranks),
    )
