"""Resolve what a run leaves to the machine: device, dtype, backend, ranks; and whether it fits.

Tools and evaluation need these without training.
"""

from __future__ import annotations

import math
import os
import shutil
from dataclasses import replace
from typing import Any

import torch

from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.launch import (
    ProcessInfo,
    has_triton,
    read_environment,
)
from ranvier.nn import float8
from ranvier.sharding import ShardingTable
from ranvier.train import lora
from ranvier.train.build_model import DTYPES
from ranvier.train.health.determinism import check_deterministic, compiles_deterministically


def resolve_device(run: RunConfig, me: ProcessInfo) -> torch.device:
    """Return the device of this rank."""
    kind = run.train.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError("train.device='cuda', but torch sees no CUDA device. Use 'cpu' or 'auto'.")
    if kind == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", me.local_rank % torch.cuda.device_count())


def resolve_backend(run: RunConfig, me: ProcessInfo, device: torch.device) -> str:
    """Return the process group backend: nccl needs one GPU per rank, or `launch.share_gpu`."""
    backend = run.train.backend
    if backend == "nccl" and device.type != "cuda":
        raise PlanError(f"train.backend='nccl' on {device}. nccl needs CUDA devices. Use 'gloo'.")
    if backend == "gloo" or device.type != "cuda":
        return "gloo"
    # A launcher may make only its own device visible to each rank.
    count = torch.cuda.device_count()
    # NCCL refuses two ranks of one host on the same GPU.
    own = me.local_world_size <= count or (me.launcher not in ("", "torchrun") and count == 1)
    if own or run.launch.share_gpu:
        return "nccl"
    if backend == "nccl":
        raise PlanError(
            f"train.backend='nccl' for {me.local_world_size} ranks on {count} GPU(s). NCCL refuses "
            "two ranks of one host on a GPU, and ranks that share one are slow. Use at most "
            f"{count} rank(s) a node or train.backend='gloo'; launch.share_gpu=True lets them "
            "share it over NCCL, as a test bed."
        )
    return "gloo"


def resolve_device_and_dtype(
    run: RunConfig, device: torch.device, backend: str = "auto"
) -> RunConfig:
    """Resolve `auto` for device, backend, dtype and compile, and the settings of a LoRA adapter
    that the run starts from.
    """
    # torch reports emulated bf16 as supported by default, which would be slow.
    has = device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)
    dtype = run.train.dtype
    if dtype == "auto":
        if device.type == "cpu":
            dtype = "fp32"
        elif has:
            dtype = "bf16"
        else:
            dtype = "fp16"
    if dtype == "bf16" and not has:
        raise PlanError(
            f"train.dtype='bf16', but {torch.cuda.get_device_name(device)} does not compute in "
            "bf16. It would be emulated, slowly. Use 'fp16' (with its loss scale) or 'fp32'."
        )
    if run.train.float8 != "off" and device.type == "cuda" and dtype != "bf16":
        raise PlanError(
            f"train.float8={run.train.float8!r} with train.dtype={dtype!r}. On cuda products in 8 "
            "bits give bf16. Use train.dtype='bf16' or train.float8='off'."
        )
    if run.train.float8 != "off" and not float8.supports_device(device):
        raise PlanError(
            f"train.float8={run.train.float8!r}, but {torch.cuda.get_device_name(device)} does not "
            "multiply in 8 bits. That needs compute capability 8.9 or more. Use train.float8='off'."
        )
    if run.plan.cuda_graph and device.type != "cuda":
        raise PlanError(
            f"plan.cuda_graph=True on {device}. CUDA records graphs. Use plan.cuda_graph=False."
        )
    compiled = run.plan.compile
    if compiled == "auto":
        able = device.type == "cuda" and has_triton()
        # `auto` compiles only layers that are not split.
        whole = run.plan.has_whole_blocks
        repeats = not run.train.deterministic or compiles_deterministically()
        if able and whole and repeats:
            compiled = "on"
        else:
            compiled = "off"
    elif compiled == "on" and not (has_triton() if device.type == "cuda" else _has_cpp_compiler()):
        raise PlanError(
            f"plan.compile='on', but nothing compiles for {device.type} here. That needs Triton "
            "and a C compiler on cuda, g++ on cpu. Install them, or use plan.compile='off'."
        )
    if device.type == "cuda":
        check_deterministic(run)
    words: dict[str, Any] = {"dtype": dtype, "device": device.type, "backend": backend}
    plan = replace(run.plan, compile=compiled)
    return lora.resolve_lora(replace(run, plan=plan, train=replace(run.train, **words)))


def _has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (*read_environment("CXX").values(), "g++", "clang++"))


def default_local_ranks(run: RunConfig) -> int:
    """Number of local ranks if none is given: what the plan needs, up to the available devices."""
    # An axis of size -1 is inferred from the number of ranks.
    known = math.prod(size for size in run.plan.degrees.values() if size > 0)
    cuda = run.train.device != "cpu" and torch.cuda.is_available()
    # On a CPU one process with all cores is the fastest.
    if cuda:
        there = torch.cuda.device_count()
    else:
        there = 1
    inferred = any(size == -1 for size in run.plan.degrees.values())
    if inferred:
        return known * max(there // known, 1)
    return known


def check_memory(run: RunConfig, me: ProcessInfo, device: torch.device) -> None:
    """Refuse a model that cannot fit, by a lower bound of its memory, before it is built."""
    plan = run.plan
    memory = run.memory
    width = DTYPES[run.train.dtype].itemsize
    wide = max(width, 4)
    free = memory.auto
    trained = run.trainable_parameters * run.prune.initial_density
    moment = {"bf16": 2, "int8": 1}.get(run.optim.state_dtype, wide)
    # Offloaded or automatically placed tensors count as 0: this is only a lower bound.
    state = 0.0
    # Weights and gradients, split over pipe and the tensor axes.
    if memory.parameters == "device" and not free:
        state += (run.model.num_parameters + trained) * width / plan.ranks_per_copy
    if memory.optimizer_states == "device" and not free:
        # Two Adam moments, and an fp32 master copy if weights are 16-bit; sharded over all ranks.
        state += trained * (2 * moment + (wide if width < 4 else 0)) / plan.world_size
    layers = run.model.layers / plan.pipe
    # At least the input of each layer is saved for backward, even with full recomputation.
    shape = ShardingTable.from_plan(plan).local_shape(
        "embed", max(plan.micro_batch, 1), run.data.seq_len, run.model.embed, plan.degrees
    )
    kept = math.prod(shape) * layers * width
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // me.local_world_size
    if memory.device_limit_gib > 0.0:
        there = min(there, int(memory.device_limit_gib * 2**30))
    if state + kept > there:
        raise PlanError(
            f"A rank needs {(state + kept) / 2**30:,.2f} GiB at least ({state / 2**30:,.2f} for "
            f"weights, gradients and moments, {kept / 2**30:,.2f} for activations), but has "
            f"{there / 2**30:,.2f} GiB. They must fit. Use a smaller model.size, data.seq_len or "
            "plan.global_batch, "
            f"{'a larger memory.device_limit_gib, ' if memory.device_limit_gib > 0.0 else ''}"
            f"{'' if free else 'memory.auto=True, '}or more ranks on depth, row or col."
        )
