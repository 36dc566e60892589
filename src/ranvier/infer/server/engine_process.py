"""An engine process of the server: one rank of a replica, which loads the model and runs steps.

The leader connects to the front and serves its requests; the other ranks follow it.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, open_engine
from ranvier.infer.model_source import ModelSource
from ranvier.infer.server.engine_worker import FrontConnection, run_engine_worker
from ranvier.infer.server.messages import EngineInfo
from ranvier.launch import ProcessInfo, join_process_group

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions:
    """What the ranks of a replica need to start."""

    source: ModelSource
    plan: Plan
    """With resolved degrees, data = 1."""
    engine: EngineConfig
    socket_path: str
    replica: int = 0
    device: str = "auto"
    dtype: str = "auto"
    algorithm: str = "auto"
    """Algorithm of collectives, as `comm.algorithm`."""
    share_gpu: bool = False
    """Whether ranks may share a GPU over NCCL, for tests."""
    timeout_seconds: float = 60.0
    """Time limit of collectives."""


def run_replica_rank(options: ReplicaOptions, me: ProcessInfo) -> int:
    """Loads the model as one rank of a replica and serves requests. Returns the exit code.

    Communicates: creation of process groups, then as the steps of the engine.
    """
    device = choose_device(options.device, me)
    connection = None
    if me.rank == 0:
        connection = FrontConnection(options.socket_path, options.replica)
        connection.report_progress("loading the model")
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
        start = time.monotonic()
        dtype = DTYPES.get(options.dtype)
        model = options.source.load(grid, device, options.plan, dtype)
        compiler = None
        if connection is not None:
            compiler = options.source.grammar_compiler(options.source.load_config().vocab)
        with open_engine(
            model,
            options.engine,
            end_token_ids=options.source.end_token_ids(),
            compile_grammar=None if compiler is None else compiler.compile,
            row_splits=options.plan.row_splits,
        ) as engine:
            if connection is None:
                engine.runner.follow()
                return 0
            loaded = f"loaded in {time.monotonic() - start:.1f} s"
            return run_engine_worker(
                engine, connection, describe_engine(engine, options, device, loaded)
            )


def choose_device(wanted: str, me: ProcessInfo) -> torch.device:
    """Returns the device of a rank."""
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", me.local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def describe_engine(
    engine: Engine, options: ReplicaOptions, device: torch.device, loaded: str
) -> EngineInfo:
    """Returns what the front shows about an engine."""
    degrees = {axis: size for axis, size in options.plan.degrees.items() if size > 1}
    plan = ", ".join(f"{axis}={size}" for axis, size in degrees.items()) or "one device"
    num_blocks = engine.stats().num_blocks
    longest = -(-engine.max_model_len // options.engine.block_size)
    return EngineInfo(
        replica=options.replica,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        block_size=options.engine.block_size,
        num_blocks=num_blocks,
        plan=f"{plan} on {device.type}",
        details={
            "loading": loaded,
            "requests of the longest length": f"{num_blocks // longest:,}",
        },
    )
