"""Placement of weights, optimizer states and activations by the settings of a run."""

from __future__ import annotations

from torch import nn

from ranvier.buckets.offload import HostOffload
from ranvier.config.run import RunConfig
from ranvier.memory.activation_offload import ActivationOffload
from ranvier.memory.host import GIB, Arena, HostBufferPool, host_bytes_per_rank
from ranvier.memory.saved_results import InPlaceStore
from ranvier.optim.state_tiles import StatePlacement
from ranvier.parallel.parallel_model import get_parallel_model


def weight_offload_bytes(run: RunConfig, ranks: int) -> int | None:
    """Host bytes available for offloaded weights; None if weights stay on the device."""
    if run.memory.parameters == "host":
        return host_bytes_per_rank(ranks, run.memory.host_limit_gib)
    return None


def offload_weights(run: RunConfig, model: nn.Module, ranks: int) -> None:
    """Offload weights to the host if the run asks for it and they are not offloaded yet."""
    room = weight_offload_bytes(run, ranks)
    queue = get_parallel_model(model).bucket_scheduler
    if room is not None and queue.host_offload is None:
        queue.offload_weights(room)


def states_placement(
    run: RunConfig, ranks: int, homes: HostOffload | None = None
) -> StatePlacement:
    """The placement of optimizer states.

    ranks: number of ranks that share the host. homes: the offload of weights and gradients.
    """
    memory = run.memory
    if memory.optimizer_states == "device":
        return StatePlacement(tile_elements=memory.offload_tile)
    room = host_bytes_per_rank(ranks, memory.host_limit_gib)
    if homes is not None:
        # Offloaded weights are allocated already, so what is free now excludes them; room for
        # gradients is still to be reserved. A configured limit includes both.
        free = host_bytes_per_rank(ranks) - homes.pending_grad_bytes
        if memory.host_limit_gib > 0.0:
            room = min(free, room - homes.host_bytes - homes.pending_grad_bytes)
        else:
            room = free
    return StatePlacement(
        memory.optimizer_states,
        device_bytes=int(memory.optimizer_states_on_device_gib * GIB),
        host_bytes=max(room, 0),
        path=memory.offload_dir,
        update_device="cpu" if memory.optimizer_step_on == "cpu" else "device",
        tile_elements=memory.offload_tile,
    )


def offload_activations(run: RunConfig, model: nn.Module, local_ranks: int) -> None:
    """Offload a fraction of the activations of blocks to the host, or none."""
    get_parallel_model(model).step_context.save_policy.store = InPlaceStore()
    if run.memory.activation_offload_fraction <= 0.0:
        return
    parallel = get_parallel_model(model)
    room = host_bytes_per_rank(local_ranks, run.memory.host_limit_gib)
    blocks = parallel.blocks
    runtime = parallel.pipeline.executor
    stage = runtime.stage
    device = runtime.device
    # A stage may have no blocks.
    ends = stage.index == stage.num_stages - 1 and bool(blocks)
    parallel.step_context.save_policy.store = ActivationOffload(
        run.memory.activation_offload_fraction,
        blocks,
        device,
        weights=lambda: [bucket.data for bucket in parallel.bucket_scheduler.buckets],
        pool=HostBufferPool(lambda size: Arena(size, device).buffer, room=room),
        last=blocks[-1] if ends else "",
    )
