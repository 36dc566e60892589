"""Builds the parallel model of a run, for the trainer and for dry runs.

It also gathers the timeline of a step over all pipeline stages.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import nn

from ranvier import counter_rng
from ranvier.comm.consensus import broadcast_text
from ranvier.config.run import RunConfig
from ranvier.grid import Grid
from ranvier.nn.materialize import materialize_parameters
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.pipeline.executor import PipelineExecutor
from ranvier.pipeline.policy_search import policy_to_text
from ranvier.train.memory import placement

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


def build_model(run: RunConfig, grid: Grid, device: torch.device, *, local_ranks: int) -> nn.Module:
    """Build the model of a run on its grid. Communicates: creation of process groups."""
    # No rank ever holds the whole model: only the local shards are filled.
    with counter_rng.init_empty_weights():
        model = run.model_kind.build_model(run.model, run.lora)
    seed = run.train.seed
    dtype = DTYPES[run.train.dtype]
    parallelize(
        model,
        grid,
        run.plan.without_measuring,
        dtype=dtype,
        device=device,
        seed=seed,
        seq_len=run.data.seq_len,
        materialize=False,
    )
    parallel = get_parallel_model(model)
    parallel.step_context.save_policy.collectives = run.memory.recompute_collectives
    materialize_parameters(
        parallel.bucket_scheduler,
        parallel.layers,
        seed=seed,
        dtype=dtype,
        device=device,
        host_bytes=placement.weight_offload_bytes(run, local_ranks),
    )
    return model


def gather_timeline(
    parallel: ParallelModel, step: int, micro_batches: int, device: torch.device
) -> dict[str, Any]:
    """The jobs of all stages in the last timed step, on all ranks.

    Communicates: broadcast of a text from each stage over all axes.
    """
    grid = parallel.grid
    runtime = parallel.pipeline.executor
    # A job is [kind, micro, chunk, start, stop], in seconds since the stage began its step.
    mine = [
        [
            done.kind,
            done.micro,
            done.chunk,
            done.start - runtime.start_time,
            done.stop - runtime.start_time,
        ]
        for done in sorted(runtime.job_records, key=lambda done: done.start)
    ]
    words = json.dumps({"jobs": mine, "parts": _part_seconds(runtime), "begun": runtime.start_time})
    stages = [
        json.loads(broadcast_text(words, grid, device, rank=rank)) for rank in stage_leaders(grid)
    ]
    _align_clocks(stages)
    # Each stage knows only its own parts.
    parts: dict[str, float] = {}
    for one in stages:
        parts.update(one["parts"])
    seconds = max((job[4] for one in stages for job in one["jobs"]), default=0.0)
    return {
        "policy": parallel.pipeline.config.policy,
        "step": step,
        "micro_batches": micro_batches,
        "chunks": len(runtime.stage.chunks),
        "seconds": seconds,
        "credits": parallel.pipeline.config.max_in_flight,
        "chosen": policy_to_text(parallel.pipeline.policy_for_step(micro_batches)),
        "stages": [one["jobs"] for one in stages],
        "part_seconds": [parts[str(i)] for i in range(len(parts))],
    }


def _align_clocks(stages: list[dict[str, Any]]) -> None:
    """Shift times to the start of the first stage, if all stages share a clock (one machine)."""
    begun = [one["begun"] for one in stages]
    # Stages of one step begin almost together: a larger gap means clocks of different machines.
    if max(begun) - min(begun) > 1.0:
        return
    for one in stages:
        for job in one["jobs"]:
            job[3] += one["begun"] - min(begun)
            job[4] += one["begun"] - min(begun)


def stage_leaders(grid: Grid) -> list[int]:
    """The first rank of each stage."""
    stages = grid.ranks.reshape(grid.degrees["pipe"], -1)
    return [int(ranks[0]) for ranks in stages]


def _part_seconds(runtime: PipelineExecutor) -> dict[str, float]:
    """Seconds per micro-batch of the parts of this stage.

    Only chunks are timed; the time of a chunk is divided among its parts by their cost.
    """
    stage = runtime.stage
    found = dict[str, float]()
    for chunk, parts in enumerate(stage.chunks):
        jobs = [d for d in runtime.job_records if d.chunk == chunk and d.kind in ("F", "B", "W")]
        # Every micro-batch has one forward job, so their number is the number of micro-batches.
        count = max(sum(d.kind == "F" for d in jobs), 1)
        seconds = sum(d.stop - d.start for d in jobs) / count
        work = stage.part_costs[parts]
        for i, share in zip(range(parts.start, parts.stop), work, strict=True):
            found[str(i)] = seconds * share / sum(work)
    return found
