"""Starts an engine on the ranks of a grid: process group, model and KV cache."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, open_engine
from ranvier.infer.model_source import ModelSource
from ranvier.launch import ProcessInfo, join_process_group

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """What the ranks of an engine need to start."""

    source: ModelSource
    plan: Plan
    """With resolved degrees."""
    engine: EngineConfig
    device: str = "auto"
    dtype: str = "auto"
    algorithm: str = "auto"
    """Algorithm of collectives, as `comm.algorithm`."""
    share_gpu: bool = False
    """Whether ranks may share a GPU over NCCL, for tests."""
    timeout_seconds: float = 60.0
    """Time limit of collectives."""


@contextmanager
def open_engine_on_rank(
    options: EngineOptions, me: ProcessInfo, device: torch.device
) -> Iterator[Engine]:
    """Context with the engine of a grid on one of its ranks; only the first may run its steps.

    Communicates: creation of process groups, then as the steps of the engine.
    """
    backend = "gloo"
    if device.type == "cuda":
        enough = me.local_world_size <= torch.cuda.device_count()
        backend = "nccl" if enough or options.share_gpu else "gloo"
    with join_process_group(me, backend, options.timeout_seconds, share_gpu=options.share_gpu):
        grid = Grid.from_plan(
            options.plan,
            connected=me.world_size > 1,
            ranks_per_node=me.local_world_size,
            algorithms=AlgorithmTable.parse(options.algorithm),
            timeout_seconds=options.timeout_seconds,
            share_gpu=options.share_gpu,
        )
        model = options.source.load(grid, device, options.plan, DTYPES.get(options.dtype))
        compiler = None
        if me.rank == 0:
            compiler = options.source.grammar_compiler(options.source.load_config().vocab)
        with open_engine(
            model,
            options.engine,
            end_token_ids=options.source.end_token_ids(),
            compile_grammar=None if compiler is None else compiler.compile,
            row_splits=options.plan.row_splits,
            adapters=[adapter.name for adapter in options.source.adapters],
        ) as engine:
            yield engine


def choose_device(wanted: str, me: ProcessInfo) -> torch.device:
    """Returns the device of a rank."""
    check_device(wanted)
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_device(wanted: str) -> None:
    """Raises if a device is not available."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise PlanError("device='cuda' is not available. It needs a machine with a GPU. Use 'cpu'.")
