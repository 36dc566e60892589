"""Search request of a run on a machine, with assumed values for settings that the user omitted.

A run without batch or sequence length gets typical values of published runs of its size:

    seq     the model's maximum, at most 4096
    batch   a power of two of sequences, times the odd part of the number of devices: near
            2^19 · sqrt(parameters / 10^9) tokens (8B: 1.5M, 70B: 4.4M, 405B: 10.5M), and at least

                one sequence per device, up to 2^26 tokens (Kimi K2, arXiv 2507.20534: 67M)
                2^10 tokens per device (Llama 3 405B, arXiv 2407.21783: 16M on 16,384)
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Set
from dataclasses import replace
from typing import Literal

from ranvier.config.plan import AXES, Plan
from ranvier.config.run import RunConfig
from ranvier.cost.optimizer import OptimizerSpec
from ranvier.errors import PlanError
from ranvier.html.number_format import format_number
from ranvier.planner.algorithm_choice import restrict_algorithms
from ranvier.planner.cluster import Cluster
from ranvier.planner.document_lengths import DocumentLengths
from ranvier.planner.matrix_load import check_hidden_matrices
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.predict import Workload
from ranvier.planner.search import SearchRequest
from ranvier.planner.time.compute import DTYPE_BYTES, FP8_SCALING

DEFAULT_SEQ = 4096
LARGEST_BATCH = 2**26
"""Tokens per step up to which each device gets a sequence."""
MIN_TOKENS_PER_DEVICE = 2**10
"""Minimum number of tokens per step and device."""
SMALL_MODEL = 10**8
"""Number of parameters below which the settings of a run are used unchanged."""
SEARCHED_FIELDS = (
    "col_splits",
    "micro_batch",
    "schedule",
    "virtual_stages",
    "reshard_after",
    "recompute",
    "rank_order",
    "shard_weights_over",
)
"""Fields of a plan, in addition to the degrees, that are searched unless they are given."""

COMMAND_SETTINGS = (
    *(f"plan.{name}" for name in (*AXES, *SEARCHED_FIELDS, "compile", "global_batch")),
    "train.float8",
)
"""Settings that the command of a layout sets itself (`explain.candidate_settings`)."""

Precision = Literal["", "fp32", "fp16", "bf16", "fp8"]


def assume_batch_and_seq(
    run: RunConfig, cluster: Cluster, given: Set[str]
) -> tuple[RunConfig, list[str]]:
    """Returns the run with sequence length and batch filled in, and the options that set them."""
    words: list[str] = []
    parameters = run.model.num_parameters
    if parameters < SMALL_MODEL:
        return run, words
    if "data.seq_len" not in given:
        seq = min(run.model.sequence_limit, DEFAULT_SEQ)
        run = replace(run, data=replace(run.data, seq_len=seq))
        words.append(f"--data.seq-len {run.data.seq_len}")
    if "plan.global_batch" not in given:
        batch, _ = default_batch(parameters, run.data.seq_len, cluster.num_devices)
        run = replace(run, plan=replace(run.plan, global_batch=batch))
        words.append(f"--plan.global-batch {batch}")
    return run, words


def default_batch(parameters: int, seq: int, devices: int) -> tuple[int, str]:
    """Returns the sequences per step that published runs use, and the reason as text."""
    # With the odd part as a factor, the batch is divisible by all devices.
    odd = devices
    while odd % 2 == 0:
        odd //= 2
    usual = 2**19 * math.sqrt(parameters / 1e9)
    each = min(devices * seq, LARGEST_BATCH)
    least = max(each, MIN_TOKENS_PER_DEVICE * devices)
    batch = odd * 2 ** max(round(math.log2(usual / seq / odd)), 0)
    why = (
        f"runs of {format_number(parameters)} parameters use about {format_number(usual)} "
        "tokens per step"
    )
    if batch * seq < least:
        # The small offset keeps exact powers of two from being rounded up.
        batch = odd * 2 ** max(math.ceil(math.log2(least / seq / odd) - 1e-9), 0)
        why = f"at least one sequence for each of {devices:,} devices"
        if each < devices * seq:
            if least == each:
                why = (
                    f"{format_number(LARGEST_BATCH)} tokens, as in Kimi K2, is the largest batch "
                    "that is assumed"
                )
            else:
                why = f"at least {MIN_TOKENS_PER_DEVICE} tokens for each of {devices:,} devices"
    return batch, why


def build_workload(
    run: RunConfig,
    cluster: Cluster,
    *,
    precision: Precision = "",
    lengths: Mapping[int, int] | None = None,
) -> Workload:
    """Returns the workload of a run. lengths: number of documents of each length, if known."""
    # fp8 concerns only matmuls: weights and activations stay in bf16.
    if precision == "fp8":
        wanted = "bf16"
    else:
        wanted = precision or run.train.dtype
    if wanted == "auto":
        dtype = "fp32" if cluster.cores else "bf16"
    else:
        dtype = wanted
    if dtype != "fp64" and cluster.device.peak and dtype not in cluster.device.peak:
        raise PlanError(
            f"{cluster.device.name} does not support {dtype}. It supports "
            f"{', '.join(cluster.device.peak)}. Use one of these."
        )
    model = resolve_model_spec(run)
    optimizer = OptimizerSpec.from_config(run.optim, DTYPE_BYTES[dtype], on_cpu=bool(cluster.cores))
    check_hidden_matrices(model, optimizer)
    return Workload(
        model=model,
        seq=run.data.seq_len,
        batch=run.plan.global_batch,
        dtype=dtype,
        optimizer=optimizer,
        packs_documents=run.data.document_mask,
        documents=DocumentLengths.from_histogram(lengths, run.data.seq_len) if lengths else None,
    )


def can_split_context(run: RunConfig) -> bool:
    """Returns whether the settings of a run allow context above 1."""
    others = {*run.find_problems()}
    return not {*replace(run, plan=replace(run.plan, context=2)).find_problems()} - others


def build_request(
    run: RunConfig,
    cluster: Cluster,
    given: Set[str],
    *,
    precision: Precision = "",
    lengths: Mapping[int, int] | None = None,
) -> SearchRequest:
    """Returns the search request of a run. given: dotted names of settings that are fixed; lengths:
    number of documents of each length, if known."""
    eight = FP8_SCALING[run.train.float8] or ("tensor" if precision == "fp8" else "")
    if eight and "fp8" not in cluster.device.peak:
        raise PlanError(
            f"{cluster.device.name} does not support fp8 matmuls. fp8 needs an H100 or later. "
            "Use --precision bf16."
        )
    fixed = frozenset(name for name in (*AXES, *SEARCHED_FIELDS) if f"plan.{name}" in given)
    if not can_split_context(run):
        fixed |= {"context"}
    if "memory.optimizer_states" in given:
        states = run.memory.optimizer_states
    else:
        states = None
    # `split` and `file` keep less on the device, but the search does not distinguish them.
    if states not in (None, "device", "host"):
        states = "host"
    return SearchRequest(
        build_workload(run, cluster, precision=precision, lengths=lengths),
        restrict_algorithms(cluster, run.comm.algorithm),
        plan=_reset_searched_fields(run.plan, fixed),
        fixed_fields=fixed,
        states=states,
        fp8=eight,
    )


def _reset_searched_fields(plan: Plan, fixed: Set[str]) -> Plan:
    """Returns the plan with all searched fields at their defaults."""
    usual = Plan()
    return replace(
        plan,
        **{name: getattr(usual, name) for name in (*AXES, *SEARCHED_FIELDS) if name not in fixed},
    )
