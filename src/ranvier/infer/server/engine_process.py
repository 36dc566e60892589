"""An engine process of the server: one rank of a replica, which loads the model and runs steps.

The leader connects to the front and serves its requests; the other ranks follow it.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, replace

import torch

from ranvier.errors import CommunicationError
from ranvier.infer.engine import Engine
from ranvier.infer.engine_start import EngineOptions, choose_device, open_engine_on_rank
from ranvier.infer.memory_traffic import measure_bandwidth
from ranvier.infer.server.engine_worker import (
    FrontConnection,
    SignalHandler,
    handle_stop_signals,
    report_fault,
    run_engine_worker,
)
from ranvier.infer.server.messages import EngineInfo
from ranvier.launch import ProcessInfo


@dataclass(frozen=True, kw_only=True)
class ReplicaOptions(EngineOptions):
    """What the ranks of a replica need to start; its plan has data = 1."""

    socket_path: str
    replica: int = 0


def run_replica_rank(
    options: ReplicaOptions, me: ProcessInfo, on_signal: SignalHandler = signal.SIG_IGN
) -> int:
    """Loads the model as one rank of a replica and serves requests. Returns the exit code.

    on_signal: what to do with signals that stop the server, if this process gets them first.
    Communicates: creation of process groups, then as the steps of the engine.
    """
    handle_stop_signals(on_signal)
    device = choose_device(options.device, me)
    connection = None
    if me.rank == 0:
        connection = FrontConnection(options.socket_path, options.replica)
        connection.report_progress("loading the model")
    start = time.monotonic()
    if device.type == "cuda" and options.plan.compile == "auto" and me.world_size == 1:
        # A server runs long enough to compile its blocks.
        options = replace(options, plan=replace(options.plan, compile="on"))
    with open_engine_on_rank(options, me, device) as engine:
        if connection is None:
            _follow(engine, options)
            return 0
        if options.engine.cuda_graphs in ("auto", "startup"):
            engine.runner.capture_graphs(
                lambda done, total: connection.report_progress(
                    f"capturing CUDA graphs: {done} of {total}"
                )
            )
        loaded = f"loaded in {time.monotonic() - start:.1f} s"
        return run_engine_worker(
            engine, connection, describe_engine(engine, options, device, loaded)
        )


def _follow(engine: Engine, options: ReplicaOptions) -> None:
    """Runs the steps of the leader; an error that starts here is reported to the front."""
    try:
        engine.runner.follow()
    except CommunicationError:
        # Another rank has failed, which reports the cause.
        raise
    except Exception as error:
        report_fault(options.socket_path, options.replica, error)
        raise


def describe_engine(
    engine: Engine, options: ReplicaOptions, device: torch.device, loaded: str
) -> EngineInfo:
    """Returns what the front shows about an engine."""
    degrees = {axis: size for axis, size in options.plan.degrees.items() if size > 1}
    plan = ", ".join(f"{axis}={size}" for axis, size in degrees.items()) or "one device"
    num_blocks = engine.stats().num_blocks
    block_tokens = engine.runner.tokens_per_block
    # The last token is sampled and not stored.
    longest = max(1, -(-(engine.max_model_len - 1) // block_tokens))
    return EngineInfo(
        replica=options.replica,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        block_size=block_tokens,
        num_blocks=num_blocks,
        plan=f"{plan} on {device.type}",
        adapters=tuple(adapter.name for adapter in options.source.adapters),
        bandwidth=measure_bandwidth(device),
        details={
            "loading": loaded,
            "requests of the longest length": f"{num_blocks // longest:,}",
        },
    )
