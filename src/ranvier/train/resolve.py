"""Resolves the settings that a user leaves open, with one ordered list of resolvers.

`resolve_run(run, context)` applies `RESOLVERS` in order. Each is a small function that looks at the
settings and at the context (ranks, device, machine, directory), fills in the settings it is
responsible for, and records why (`ResolvedRun.decide`). Settings that the context does not know yet
stay open and are resolved by a later call: the launcher does not know the output directory, and no
process knows the memory of all ranks before they are connected. A second call with the same context
changes nothing.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import torch

from ranvier import launch
from ranvier.config.plan import Compile
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import RunConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo, has_triton, read_environment
from ranvier.nn import float8
from ranvier.planner.cluster import Cluster
from ranvier.planner.matrix_load import check_hidden_matrices
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.sharding import ShardingTable
from ranvier.system.terminal import print
from ranvier.train import layout, lora
from ranvier.train.build_model import DTYPES
from ranvier.train.collective_algorithms import check_algorithms
from ranvier.train.health.determinism import check_deterministic, compiles_deterministically
from ranvier.train.resume import elastic, run_directory


class MemoryDecision(Protocol):
    """A run without open memory settings, and the reasons for their values."""

    @property
    def run(self) -> RunConfig:
        """The run."""

    @property
    def reasons(self) -> list[str]:
        """Why."""


@dataclass(frozen=True, kw_only=True)
class ResolveContext:
    """The inputs of the resolvers; settings that depend on a value that is None stay open."""

    world_size: int
    process: ProcessInfo = field(default_factory=ProcessInfo)
    device: torch.device | None = None
    """Device of this rank, or of the ranks that this process starts."""
    find_cluster: Callable[[], Cluster] | None = None
    """Describes the machine for the planner; called only if a layout has to be planned."""
    resumes_run: bool = False
    """Whether a run is continued with its own settings, so that it keeps its layout."""
    adapts_micro_batch: bool = False
    """Whether a micro-batch that does not divide the batch of a rank may be replaced."""
    fallback_grid: str = ""
    """The grid of `launch.fallback_grids` to continue on after ranks were lost."""
    output_dir: Path | None = None
    memory: MemoryDecision | None = None
    """The choice for the memory of all ranks."""
    reads_adapter: bool = True
    """Whether the adapter that a run starts from is read; a pipeline schedule does not need it."""

    @classmethod
    def for_process(cls, run: RunConfig, process: ProcessInfo) -> ResolveContext:
        """The context of a rank that has been started."""
        device = resolve_device(run, process)
        return cls(world_size=process.world_size, process=process, device=device)


Resolver = Callable[[ResolvedRun, ResolveContext], ResolvedRun]


def resolve_run(run: RunConfig, context: ResolveContext) -> ResolvedRun:
    """The run with all settings resolved that the context knows; raises all problems at once."""
    resolved = ResolvedRun.from_config(run)
    for resolver in RESOLVERS:
        resolved = resolver(resolved, context)
    return resolved


# ---- resolvers --------------------------------------------------------------------------


def resolve_layout(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Let the planner choose the layout of several ranks, if none of its degrees is set."""
    if not run.plan.auto:
        return run
    if context.resumes_run:
        return run.decide("layout", {"plan.auto": False}, "a continued run keeps its layout")
    if not layout.needs_planning(run, context.world_size):
        if context.world_size == 1:
            reason = "a single rank has only one layout"
        else:
            reason = "the degrees are set"
        return run.decide("layout", {"plan.auto": False}, reason)
    if context.find_cluster is None:
        return run
    # Problems of the settings are reported by `resolve_ranks`, all at once.
    if _has_problems(run):
        return run.decide("layout", {"plan.auto": False}, "other settings are invalid")
    try:
        machine = context.find_cluster()
    except PlanError as error:
        reason = f"All ranks are on the data axis, because the layout was not planned: {error}"
        if not launch.is_follower():
            print(reason)
        return run.decide("layout", {"plan.auto": False}, reason)
    known = resolve_device_settings(resolve_adapter(run, context), context)
    planned, prediction = layout.choose_layout(run, layout.build_workload(known), machine)
    chosen = run.adopt("layout", planned, {"": f"planned for {machine.name}: {prediction.why}"})
    return replace(chosen, prediction=prediction)


def _has_problems(run: RunConfig) -> bool:
    """Whether settings of a run are invalid on any number of ranks."""
    if any(run.find_problems()):
        return True
    try:
        run.check_and_resolve(1)
    except PlanError:
        return True
    return False


def resolve_fallback_grid(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Continue on a smaller grid after ranks were lost; the global batch stays the same."""
    if not context.fallback_grid:
        return run
    degrees = elastic.parse_grid(context.fallback_grid)
    reason = f"ranks were lost; launch.fallback_grids contains {context.fallback_grid}"
    smaller = elastic.change_grid(run.plan, degrees)
    changed = run.adopt("fallback grid", replace(run, plan=smaller), {"": reason})
    # The prediction was for the grid that the planner chose. Whether blocks are compiled depends on
    # the degrees, and the backend on how many ranks share a GPU.
    return replace(changed, prediction=None).reopen("plan.compile").reopen("train.backend")


def resolve_ranks(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Derive degrees, micro-batch and learning rate from the number of ranks, and check them."""
    try:
        found = run.check_and_resolve(context.world_size)
    except PlanError as error:
        if not context.adapts_micro_batch:
            raise
        inferred = replace(run, plan=replace(run.plan, micro_batch=-1))
        try:
            found = inferred.check_and_resolve(context.world_size)
        except PlanError:
            # Another micro-batch does not help: report the problem of the original settings.
            raise error from None
    if found.plan.pipe > 1:
        share = "at most four micro-batches per stage"
    else:
        share = "all samples of a rank in one pass"
    if run.optim.lr_rule == "gemstone":
        rate = "the lr_eff of the Gemstones suite, which optim.lr_rule scales by the model's shape"
    elif run.starts_from_trained_weights:
        rate = "the usual learning rate for pretrained weights"
    else:
        rate = "derived from the width of the model and the tokens per step"
    reasons = {
        "plan.micro_batch": share,
        "optim.lr": rate,
        "optim.warmup_steps": "a tenth of all steps, but at least 10 if the run has that many",
        "": f"derived for {context.world_size} rank(s)",
    }
    return run.adopt("ranks", found, reasons)


def resolve_adapter(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Take over the settings of the adapter that a run starts from."""
    if not run.lora.init_from or not context.reads_adapter:
        return run
    theirs = lora.read_adapter_settings(run)
    reason = f"the adapter {run.lora.init_from} was trained with it"
    return run.decide("adapter", {f"lora.{name}": x for name, x in theirs.items()}, reason)


def resolve_device_settings(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Resolve `auto` for device, backend, dtype and compilation."""
    device = context.device
    if device is None:
        return run
    if device.type == "meta":
        # A dry run stands for a run on GPUs, where operations run one by one.
        where = "dry runs have no device: "
        run = run.decide("device", {"train.dtype": _dry_dtype(run)}, f"{where}the dtype of a GPU")
        off = {"plan.compile": "off", "plan.cuda_graph": False}
        return run.decide("device", off, f"{where}blocks run without compilation")
    _check_device(run, device)
    if device.type == "cuda":
        found = f"torch sees {torch.cuda.get_device_name(device)}"
    else:
        found = "torch sees no CUDA device"
    run = run.decide("device", {"train.device": device.type}, found)
    backend = resolve_backend(run, context.process, device)
    links = {"nccl": "one GPU per rank", "gloo": "ranks on CPUs, or several per GPU"}[backend]
    run = run.decide("device", {"train.backend": backend}, links)
    if run.train.dtype == "auto":
        dtype, reason = _default_dtype(device)
        run = run.decide("device", {"train.dtype": dtype}, reason)
    _check_dtype(run, device)
    if run.plan.compile == "auto":
        compiled, reason = _default_compile(run, device)
        run = run.decide("device", {"plan.compile": compiled}, reason)
    if device.type == "cuda":
        check_deterministic(run)
    return run


def resolve_balance(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Choose how samples are assigned to ranks; a resumed run keeps what it had."""
    if run.data.balance != "auto":
        return run
    before = _stored_data_setting(run, "balance")
    if before is not None:
        return run.decide("data", {"data.balance": before}, "a resumed run keeps what it had")
    if not run.data.document_mask:
        return run.decide("data", {"data.balance": "none"}, "all samples have the same cost")
    return run.decide("data", {"data.balance": "cost"}, "samples have documents of any length")


def resolve_packing(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Choose how conversations are packed into samples; a resumed run keeps what it had."""
    if run.data.packing != "auto":
        return run
    before = _stored_data_setting(run, "packing")
    if before is not None:
        return run.decide("data", {"data.packing": before}, "a resumed run keeps what it had")
    reason = "samples of similar cost, so that ranks wait less for each other"
    return run.decide("data", {"data.packing": "balanced"}, reason)


def resolve_canary_samples(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Choose the samples for canaries; a resumed run keeps what it had, even if it gets longer."""
    if run.data.canary_samples or not run.data.canaries:
        return run
    before = _stored_data_setting(run, "canary_samples")
    if before is not None:
        kept = {"data.canary_samples": int(before)}
        return run.decide("data", kept, "a resumed run keeps what it had")
    count = run.train.steps * run.plan.global_batch
    reason = "canaries are in all samples of the run alike"
    return run.decide("data", {"data.canary_samples": count}, reason)


def _stored_data_setting(run: ResolvedRun, name: str) -> str | None:
    """A data setting of the checkpoint that a run resumes from; None if it is not decided yet."""
    stored = run_directory.find_stored_settings(run) or {}
    value = str(stored.get("data", {}).get(name, "auto"))
    # 0 is the number that stands for auto.
    if value in ("auto", "0"):
        return None
    return value


def resolve_restart(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Resume from its own checkpoints if the launcher has restarted a run."""
    if not run_directory.has_own_checkpoints(run, context.process):
        return run
    reason = f"attempt {context.process.attempt + 1} resumes from the run's own checkpoints"
    return run.decide("restart", {"checkpoint.resume": "auto"}, reason)


def resolve_output_dir(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Set the directory that was claimed for a run."""
    if context.output_dir is None:
        return run
    if run.train.output_dir:
        reason = "the directory that was claimed"
    else:
        reason = "a new directory, as none was set"
    return run.decide("output directory", {"train.output_dir": str(context.output_dir)}, reason)


def resolve_memory_settings(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Take over the memory settings that were chosen for all ranks and verified."""
    if context.memory is None:
        return run
    reason = "; ".join(context.memory.reasons) or "the faster of the two, as measured"
    return run.adopt("memory", context.memory.run, {"": reason})


def resolve_algorithms(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Check the algorithms of collectives; ranks choose between them when they are connected."""
    if context.device is not None and context.device.type != "meta":
        grid = Grid.from_plan(run.plan, ranks_per_node=max(context.process.local_world_size, 1))
        check_algorithms(run.comm.algorithm, grid, run.train.backend)
    return run


def resolve_optimizer(run: ResolvedRun, context: ResolveContext) -> ResolvedRun:
    """Check that an optimizer of whole matrices has matrices to update."""
    optimizer = OptimizerSpec.from_run(run)
    if optimizer.matrix_rule is not None:
        check_hidden_matrices(resolve_model_spec(run), optimizer)
    return run


RESOLVERS: tuple[Resolver, ...] = (
    resolve_layout,
    resolve_fallback_grid,
    resolve_ranks,
    resolve_adapter,
    resolve_device_settings,
    resolve_optimizer,
    resolve_algorithms,
    resolve_balance,
    resolve_packing,
    resolve_canary_samples,
    resolve_restart,
    resolve_output_dir,
    resolve_memory_settings,
)
"""In this order, as each resolver relies on the decisions of the earlier ones."""


def resolve_fallback_runs(run: ResolvedRun, context: ResolveContext) -> list[ResolvedRun]:
    """The run on each of `launch.fallback_grids`; raises the problems of all at once.

    context: of the run on its own grid.
    """
    found = []
    problems = []
    for text in run.launch.fallback_grids:
        try:
            ranks = math.prod(elastic.parse_grid(text).values())
            # A fallback grid is for fewer ranks than the plan.
            if ranks >= run.plan.world_size:
                raise PlanError(
                    f"launch.fallback_grids={text!r} has {ranks} ranks, but the plan has "
                    f"{run.plan.world_size}. It is used after ranks were lost. Use a smaller grid."
                )
            local = min(context.process.local_world_size, ranks)
            smaller = replace(
                context,
                world_size=ranks,
                process=replace(context.process, local_world_size=local),
                fallback_grid=text,
                adapts_micro_batch=True,
            )
            found.append(resolve_run(run, smaller))
        except PlanError as error:
            named_in = f"launch.fallback_grids={text!r}"
            problems += [p if named_in in p else f"{named_in}: {p}" for p in error.problems]
    if problems:
        raise PlanError(problems)
    return found


# ---- device, backend, dtype -------------------------------------------------------------


def resolve_device(run: RunConfig, me: ProcessInfo) -> torch.device:
    """Return the device of this rank."""
    kind = run.train.device
    if kind == "cuda" and not torch.cuda.is_available():
        raise PlanError(
            "train.device='cuda', but torch sees no CUDA device. It needs a GPU, a driver and a "
            "CUDA build of torch; `ranvier doctor` shows which is missing. Fix that, or use "
            "train.device='auto'."
        )
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
            f"train.backend='nccl' for {me.local_world_size} ranks on {count} GPU(s). NCCL does "
            "not allow two ranks of one host on the same GPU, and ranks that share one are slow. "
            f"Use at most {count} rank(s) per node or train.backend='gloo'; launch.share_gpu=True "
            "lets ranks share a GPU over NCCL for tests."
        )
    return "gloo"


def _dry_dtype(run: RunConfig) -> str:
    if run.train.dtype == "auto":
        return "bf16"
    return run.train.dtype


def _default_dtype(device: torch.device) -> tuple[str, str]:
    """The dtype of a device, and why."""
    if device.type == "cpu":
        return "fp32", "the fastest dtype on CPUs"
    if _has_bf16(device):
        return "bf16", "the GPU supports it"
    return "fp16", "the GPU does not support bf16"


def _has_bf16(device: torch.device) -> bool:
    # torch reports emulated bf16 as supported by default, which would be slow.
    return device.type != "cuda" or torch.cuda.is_bf16_supported(including_emulation=False)


def _default_compile(run: RunConfig, device: torch.device) -> tuple[Compile, str]:
    """Whether blocks are compiled, and why."""
    if device.type != "cuda" or not has_triton():
        return "off", "blocks are only compiled on GPUs with Triton"
    if not run.plan.has_whole_blocks:
        return "off", "only blocks that are not split are compiled"
    samples = max(run.plan.micro_batch, 1) * run.model.streams
    if run.plan.chunk_of_samples(samples, run.data.seq_len):
        return "off", "blocks in chunks of tokens are not compiled"
    if run.train.deterministic and not compiles_deterministically():
        return "off", "compiled kernels would not be deterministic"
    return "on", "a GPU with Triton, and no block is split"


def _check_device(run: RunConfig, device: torch.device) -> None:
    if run.plan.cuda_graph and device.type != "cuda":
        raise PlanError(
            f"plan.cuda_graph=True on {device}. CUDA graphs need cuda. Use plan.cuda_graph=False."
        )
    able = has_triton() if device.type == "cuda" else _has_cpp_compiler()
    if run.plan.compile == "on" and not able:
        raise PlanError(
            f"plan.compile='on', but a compiler for {device.type} is missing. cuda needs Triton "
            "and a C compiler, cpu needs g++. Install them, or use plan.compile='off'."
        )


def _check_dtype(run: RunConfig, device: torch.device) -> None:
    dtype = run.train.dtype
    if dtype == "bf16" and not _has_bf16(device):
        raise PlanError(
            f"train.dtype='bf16', but {torch.cuda.get_device_name(device)} does not support bf16. "
            "Emulation would be slow. Use 'fp16' (with its loss scale) or 'fp32'."
        )
    if run.train.float8 != "off" and device.type == "cuda" and dtype != "bf16":
        raise PlanError(
            f"train.float8={run.train.float8!r} with train.dtype={dtype!r}. On cuda fp8 matmuls "
            "return bf16. Use train.dtype='bf16' or train.float8='off'."
        )
    if run.train.float8 != "off" and not float8.supports_device(device):
        raise PlanError(
            f"train.float8={run.train.float8!r}, but {torch.cuda.get_device_name(device)} does not "
            "support fp8. It needs compute capability 8.9 or higher. Use train.float8='off'."
        )


def _has_cpp_compiler() -> bool:
    """Whether there is a C++ compiler, which torch.compile needs on a CPU."""
    return any(shutil.which(name) for name in (*read_environment("CXX").values(), "g++", "clang++"))


def default_local_ranks(run: RunConfig) -> int:
    """Number of local ranks if none is set: as many as the plan needs, up to the devices."""
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


def check_memory(run: ResolvedRun, context: ResolveContext) -> None:
    """Refuse a model that cannot fit, by a lower bound of its memory, before it is built."""
    device = context.device
    # A smaller grid may have fewer ranks than this machine started.
    local = min(context.process.local_world_size, run.plan.world_size)
    plan = run.plan
    memory = run.memory
    width = DTYPES[run.train.dtype].itemsize
    wide = max(width, 4)
    free = memory.auto
    trained = run.trainable_parameters * run.prune.initial_density
    moments = OptimizerSpec.from_run(run).moment_bytes_per_element(wide)
    # Offloaded or automatically placed tensors count as 0: this is only a lower bound.
    state = 0.0
    # Weights and gradients, split over pipe and the tensor axes.
    if memory.parameters == "device" and not free:
        state += (run.model.num_parameters + trained) * width / plan.ranks_per_copy
    if memory.optimizer_states == "device" and not free:
        # Moments, and an fp32 master copy if weights are 16-bit; sharded over all ranks.
        state += trained * (moments + (wide if width < 4 else 0)) / plan.world_size
    layers = run.model.layers / plan.pipe
    # At least the input of each layer is saved for backward, even with full recomputation.
    shape = ShardingTable.from_plan(plan).local_shape(
        "embed", max(plan.micro_batch, 1), run.data.seq_len, run.model.embed, plan.degrees
    )
    kept = math.prod(shape) * layers * width
    if device is not None and device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // local
    if memory.device_limit_gib > 0.0:
        there = min(there, int(memory.device_limit_gib * 2**30))
    if state + kept > there:
        raise PlanError(
            f"A rank needs at least {(state + kept) / 2**30:,.2f} GiB ({state / 2**30:,.2f} GiB "
            f"for weights, gradients and optimizer states, {kept / 2**30:,.2f} GiB for "
            f"activations), but has {there / 2**30:,.2f} GiB. All of it must fit. Use a smaller "
            "model.size, data.seq_len or plan.global_batch, "
            f"{'a larger memory.device_limit_gib, ' if memory.device_limit_gib > 0.0 else ''}"
            f"{'' if free else 'memory.auto=True, '}or more ranks on depth, row or col."
        )
