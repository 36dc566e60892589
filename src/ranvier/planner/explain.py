"""Explains a search result: the best layouts, why the first one is best, and how to run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.html.number_format import format_number, format_percent
from ranvier.planner import comm_volume, predict
from ranvier.planner.baselines import (
    RANVIER_STYLE,
    PredictedCandidate,
    baseline_slowdowns,
    find_baselines,
    layout_family,
)
from ranvier.planner.matrix_load import matrix_seconds, stage_matrix_load
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.predict import Prediction
from ranvier.planner.search import SearchRequest, SearchResult
from ranvier.planner.time import links
from ranvier.planner.time.compute import FP8_SCALING

TIE_RATIO = 1.01
"""Ratio of step times below which they count as equal."""
LONG_CONTEXT_TOKENS = 4096
"""Tokens per sample from which on the explanation names why context does not split samples."""
MIN_SHOWN_SHARE = 0.04
"""Minimum share of the step time for a part to be listed."""
TABLE_HEADER = (
    "layout",
    "micro",
    "recompute",
    "step",
    "tok/s",
    "MFU",
    "GiB",
    "where the time goes",
)
PART_LABELS = {
    "compute": "matmuls",
    "attention": "attention",
    "recompute": "recomputation",
    "row": "communication over row",
    "col": "communication over col",
    "depth": "communication over depth",
    "data": "communication over data",
    "pipe": "messages between stages",
    "bubble": "the pipeline bubble",
    "update": "the optimizer update",
    "host": "host transfers",
    "expert": "communication over expert",
    "context": "communication over context",
    "other": "waiting for the slowest node",
}


def format_degrees(plan: Plan) -> str:
    """Returns the axes that a plan uses, such as `pipe 4 data 8`, or `1 device`."""
    used = [f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1]
    return " ".join(used) or "1 device"


def describe_candidate(found: PredictedCandidate) -> str:
    """Returns the settings of a layout except its micro-batch and recompute mode."""
    plan = found.plan
    words = [format_degrees(found.plan)]
    if plan.col > 1 and plan.col_splits == "features":
        words.append("col splits features")
    if plan.virtual_stages > 1:
        words.append(f"{plan.virtual_stages} virtual stages")
    if plan.shard_weights_over == "depth_context" and plan.context > 1:
        words.append("weights over depth and context")
    if plan.reshard_after == "step" and plan.gather_ranks > 1:
        words.append("reshard after step")
    if plan.compile == "on":
        words.append("compiled")
    if found.candidate.states == "host":
        words.append("states on host")
    if plan.rank_order:
        words.append(f"{' '.join(_innermost_axes(plan))} innermost")
    return ", ".join(words)


def _innermost_axes(plan: Plan) -> list[str]:
    return [axis for axis in plan.axis_order if plan.degrees[axis] > 1][-2:]


def format_seconds(value: float) -> str:
    """Formats a time with three digits."""
    # Below 0.9995, three digits never round up to 1000 ms.
    if value < 0.9995:
        return f"{1000 * value:.3g} ms"
    return f"{value:.3g} s"


def part_shares(prediction: Prediction, least: float = MIN_SHOWN_SHARE) -> list[tuple[str, float]]:
    """Returns the parts of a step above a share, largest first."""
    parts = [
        (name, value / prediction.step_seconds)
        for name, value in prediction.seconds_by_part.items()
    ]
    return sorted((one for one in parts if one[1] >= least), key=lambda one: -one[1])


def table_row(found: PredictedCandidate) -> tuple[str, ...]:
    """Returns the cells of a layout under `TABLE_HEADER`."""
    it = found.prediction
    plan = found.plan
    parts = " ".join(f"{name} {format_percent(share)}" for name, share in part_shares(it))
    figures = (
        format_seconds(it.step_seconds),
        format_number(it.tokens_per_second),
        format_percent(it.mfu),
        f"{it.memory.total_bytes / GIB:.1f}",
    )
    return (describe_candidate(found), str(plan.micro_batch), plan.recompute, *figures, parts)


def distinct_candidates(found: Sequence[PredictedCandidate], top: int) -> list[PredictedCandidate]:
    """Returns the best layouts with distinct degrees."""
    seen: dict[tuple[int, ...], PredictedCandidate] = {}
    for one in found:
        if len(seen) == top:
            break
        seen.setdefault(tuple(one.plan.degrees.values()), one)
    return list(seen.values())


def format_columns(
    head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]
) -> list[str]:
    """Returns the rows of cells as text; columns in `left` are left-aligned."""
    cells = [head, *rows]
    widths = [max(len(one[i]) for one in cells) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(one, widths, strict=True))
        ).rstrip()
        for one in cells
    ]


def candidate_table(result: SearchResult, top: int) -> list[str]:
    """Returns the best layouts, one line each."""
    rows = [
        (str(i), *table_row(one))
        for i, one in enumerate(distinct_candidates(result.feasible_candidates, top), 1)
    ]
    return format_columns(("", *TABLE_HEADER), rows, left=(1, 3, 8))


def baseline_table(result: SearchResult) -> list[str]:
    """Returns the best layout of each style compared to ours."""
    best = find_baselines(result.feasible_candidates, result.request.cluster.per_node)
    gained = baseline_slowdowns(best)
    rows = [
        (name, *table_row(one)[:7], f"{gained[name]:.2f}x" if name in gained else "")
        for name, one in best.items()
    ]
    return format_columns(("best of", *TABLE_HEADER[:7], "relative time"), rows, left=(0, 1, 3))


# ---- sentences ----------------------------------------------------------------------------


def summarize_choice(result: SearchResult) -> str:
    """Returns the choice and its reason, in one line."""
    best = result.best
    it = result.best.prediction
    return (
        f"{describe_candidate(best)}, micro-batch {best.plan.micro_batch}, recompute="
        f"{best.plan.recompute}: predicted {format_seconds(it.step_seconds)} per step, best of "
        f"{result.num_candidates:,} layouts. "
        f"{' '.join([*explain_context(result), describe_bottleneck(result)])}"
    )


def explain_choice(result: SearchResult) -> list[str]:
    """Returns a few sentences that describe and justify the choice."""
    best = result.best
    it = result.best.prediction
    low, high = it.interval
    kind = layout_family(best.plan)
    # Omit the name of the family if the degrees already show it.
    if kind not in format_degrees(best.plan):
        named = f" ({kind})"
    else:
        named = ""
    said = [
        f"{describe_candidate(best)}{named}: {format_seconds(it.step_seconds)} per step (80% "
        f"interval: {format_seconds(low)} to {format_seconds(high)}), "
        f"{format_number(it.tokens_per_second)} tokens/s, MFU {format_percent(it.mfu)}, "
        f"{it.memory.total_bytes / GIB:.1f} of {it.limit / GIB:.1f} GiB per device.",
        "Time is spent on "
        f"{_join_words([f'{PART_LABELS[n]} ({format_percent(s)})' for n, s in part_shares(it)])}.",
        describe_bottleneck(result),
        *explain_context(result),
        *_explain_documents(result),
        *_explain_compile(result),
        *_explain_matrix_update(result),
        *_compare_styles(result),
        *_compare_tensor_dims(result),
    ]
    return [text for text in said if text]


def explain_context(result: SearchResult) -> Iterator[str]:
    """Yields why long samples are split over context, or why not."""
    wish = result.request
    job = wish.workload
    if wish.world_size == 1 or "context" in wish.fixed_degrees:
        return
    samples = f"{job.batch:,} sample{'s' * (job.batch != 1)} of {job.seq:,} tokens"
    ours = result.best
    context = ours.plan.context
    other = next(
        (one for one in result.feasible_candidates if (one.plan.context > 1) != (context > 1)), None
    )
    slower = ""
    if other is not None:
        times = other.prediction.step_seconds / ours.prediction.step_seconds
        slower = f"({describe_candidate(other)}) takes {times:.2f}x as long"
        slower += _main_difference(other.prediction, ours.prediction)
        if times < TIE_RATIO:
            slower = f"({describe_candidate(other)}) is about as fast"
    if context > 1:
        rest = f"The best layout without context {slower}" if slower else "No other layout fits"
        yield (
            f"context {context}: {samples} per step over {wish.world_size:,} ranks, of which each "
            f"has {job.seq // context:,} tokens of a sample. {rest}."
        )
    elif slower:
        yield f"Context is not used: the best layout with it {slower}."
    elif job.seq >= LONG_CONTEXT_TOKENS:
        why = f"{samples} per step are enough for {wish.world_size:,} ranks"
        if len(wish.context_degrees) > 1:
            why = "no layout with it is valid and fits into memory"
        elif job.batch < wish.world_size:
            why = f"samples of {job.seq:,} tokens are too short to be split"
        yield f"Context is not used: {why}."


def _explain_documents(result: SearchResult) -> Iterator[str]:
    """Yields what the given lengths of documents change."""
    documents = result.request.workload.documents
    if documents is None:
        return
    mean = sum(map(len, documents.samples)) / len(documents.samples)
    text = (
        f"Samples have {mean:.1f} documents on average, so that attention has "
        f"{format_percent(documents.score_share())} of the work of whole samples"
    )
    plan = result.best.plan
    if plan.context > 1:
        orders = documents.token_orders(plan.context, plan.token_order)
        others = (plan.context - 1) * documents.seq * len(orders)
        fetched = sum(sum(order.num_fetched()) for order in orders) / others
        text += f", and {format_percent(fetched)} of the keys of other ranks of context are fetched"
    yield f"{text}."


def _explain_compile(result: SearchResult) -> Iterator[str]:
    """Yields a sentence on the gain of compiled blocks, which overlap less communication."""
    best = result.best
    wish = result.request
    if best.plan.compile == "on" and wish.plan.compile != "on":
        plain = replace(best.candidate, plan=replace(best.plan, compile="auto"))
        spent = sum(predict.step_seconds_by_part(wish.workload, plain, wish.cluster).values())
        yield (
            "Its blocks are compiled (--plan.compile on). Communication inside a compiled block is "
            f"not overlapped, but eager blocks take {format_seconds(spent)} per step."
        )


def _explain_matrix_update(result: SearchResult) -> Iterator[str]:
    """Yields how the update of whole matrices is balanced, if some ranks have none of them."""
    wish = result.request
    job = wish.workload
    rule = job.optimizer.matrix_rule
    plan = result.best.plan
    if rule is None:
        return
    ranks = plan.world_size // plan.pipe
    device = wish.cluster.device
    stages = comm_volume.distinct_stages(job.model, plan, job.seq)
    loads = [stage_matrix_load(job.model, one, ranks, rule) for one in stages]
    load = max(loads, key=lambda one: (one.num_idle, one.max_flops))
    if load.num_idle:
        what = "tiles" if rule.tile_size else "whole matrices"
        busy, even = (matrix_seconds(device, load, rule, mean=mean) for mean in (False, True))
        yield (
            f"{load.num_idle:,} of {ranks:,} ranks of a stage are idle in the update of "
            f"{load.num_owned:,} {what} ({job.optimizer.name}), each of which one rank "
            f"updates. It takes {format_seconds(busy)} per step instead of {format_seconds(even)}, "
            f"{format_percent((busy - even) / result.best.prediction.step_seconds)} of the step."
        )


def _join_words(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def describe_bottleneck(result: SearchResult) -> str:
    """Returns the bottleneck: memory, compute, the batch, or communication."""
    best = result.best
    it = result.best.prediction
    # Memory is the bottleneck if a layout that does not fit would be faster.
    faster = [
        one
        for one in result.oversized_candidates
        if one.prediction.step_seconds * TIE_RATIO < it.step_seconds
    ]
    if faster:
        one = min(faster, key=lambda one: (one.prediction.memory.total_bytes, one.sort_key))
        return (
            f"Bottleneck: memory. The layout ({describe_candidate(one)}, micro-batch "
            f"{one.plan.micro_batch}, recompute={one.plan.recompute}) would take "
            f"{format_seconds(one.prediction.step_seconds)} per step, but needs "
            f"{one.prediction.memory.total_bytes / GIB:.1f} GiB of {it.limit / GIB:.1f} GiB."
        )
    # Otherwise the largest part that is neither compute nor recomputation.
    waits = [one for one in part_shares(it) if one[0] not in ("compute", "attention", "recompute")]
    if not waits:
        return "Bottleneck: compute. No layout has less of it."
    name, share = waits[0]
    if name == "bubble":
        return _describe_slowest_stage(result) or (
            f"Bottleneck: the batch. Stages are idle {format_percent(share)} of the time, because "
            f"{best.plan.global_batch} sequences are only {best.plan.num_micro_batches} "
            "micro-batches."
        )
    return (
        f"Bottleneck: {PART_LABELS[name]} ({format_percent(share)} of the step, not overlapped "
        "with compute)."
    )


def _describe_slowest_stage(result: SearchResult) -> str:
    """Returns a sentence if the slowest stage is the bottleneck, otherwise an empty string.

    It is the bottleneck if the other stages wait for it longer than for the pipeline to fill and
    drain.
    """
    best = result.best
    wish = result.request
    plan = best.plan
    bubble = best.prediction.seconds_by_part["bubble"]
    times = predict.stage_seconds(wish.workload, best.candidate, wish.cluster)
    slowest = max(times)
    mean = sum(times) / len(times)
    # The bubble is fill and drain plus imbalance; imbalance must be at least half of it.
    if 2 * plan.num_micro_batches * (slowest - mean) < bubble:
        return ""
    at = times.index(slowest)
    here = comm_volume.build_all_stages(wish.workload.model, plan, wish.workload.seq)[at]
    blocks = sum(count for part, count in here.block_counts if part.is_block)
    held = [f"{blocks} block{'s' * (blocks != 1)}"] * (blocks > 0)
    names = {part.name for part, _ in here.block_counts}
    parts = wish.workload.model.parts
    held += ["the embedding"] * (parts[0].name in names) + ["the head"] * (parts[-1].name in names)
    return (
        f"Bottleneck: the slowest stage. Stage {at} of {plan.pipe} ({_join_words(held)}) takes "
        f"{format_seconds(slowest)} per micro-batch, the average stage {format_seconds(mean)}; "
        f"stages are idle {format_percent(bubble / best.prediction.step_seconds)} of the time."
    )


def _compare_styles(result: SearchResult) -> Iterator[str]:
    """Yields how much slower the best layouts of other styles are."""
    best = find_baselines(result.feasible_candidates, result.request.cluster.per_node)
    behind = baseline_slowdowns(best)
    same = [name for name, times in behind.items() if times < TIE_RATIO]
    if "FSDP" in same:
        yield "The best FSDP layout is as fast as any other: other axes gain nothing here."
    elif same:
        verb = "is" if len(same) == 1 else "are"
        plural = "" if len(same) == 1 else "s"
        yield f"The best layout{plural} of {_join_words(same)} {verb} equally fast."
    for name, times in behind.items():
        if times >= TIE_RATIO:
            one = best[name]
            yield (
                f"The best {name} layout ({describe_candidate(one)}) takes {times:.2f}x as "
                f"long{_main_difference(one.prediction, best[RANVIER_STYLE].prediction)}."
            )
    missing = [name for name in ("FSDP", "Megatron-LM", "AxoNN") if name not in best]
    # FSDP shards over several devices, so a single device has no such layout.
    if missing and result.request.world_size > 1:
        yield f"No {' or '.join(missing)} layout is valid and fits into memory."


def _main_difference(slow: Prediction, fast: Prediction) -> str:
    """Returns the part of a step that causes most of the difference."""
    names = {*slow.seconds_by_part, *fast.seconds_by_part}
    more = {
        n: slow.seconds_by_part.get(n, 0.0) - fast.seconds_by_part.get(n, 0.0)
        for n in sorted(names)
    }
    name = max(more, key=lambda n: more[n])
    if more[name] > 0:
        return f", mostly due to {PART_LABELS[name]} (+{format_seconds(more[name])})"
    return ""


def _compare_tensor_dims(result: SearchResult) -> Iterator[str]:
    """Yields whether 2-D tensor parallelism (row and col) is faster than 1-D (row only)."""
    alike = [f for f in result.feasible_candidates if f.plan.pipe == result.best.plan.pipe]
    one = next((f for f in alike if f.plan.row > 1 and f.plan.col == 1), None)
    two = next((f for f in alike if f.plan.col > 1), None)
    if one is None or two is None or result.best.plan.row * result.best.plan.col == 1:
        return
    ratio = two.prediction.step_seconds / one.prediction.step_seconds
    what = (
        f"1-D {_describe_traffic(one, result.request)}; 2-D "
        f"{_describe_traffic(two, result.request)}"
    )
    if ratio > TIE_RATIO:
        yield f"1-D is {format_percent(ratio - 1)} faster than 2-D: {what}."
    elif ratio < 1 / TIE_RATIO:
        yield f"2-D is {format_percent(1 / ratio - 1)} faster than 1-D: {what}."
    else:
        yield f"1-D and 2-D take the same time: {what}."


def _describe_traffic(found: PredictedCandidate, wish: SearchRequest) -> str:
    """Returns the traffic of the busiest stage of a layout over row and col per step, its rate,
    and its exposed time.
    """
    plan = found.plan
    job = wish.workload
    size = {"fp32": 4, "fp64": 8}.get(job.dtype, 2)
    flow = ActivationShape(plan.micro_batch, job.seq, size, max(size, 4))
    words = []
    for axis in ("row", "col"):
        ranks = links.locate_group(
            (axis,), plan.degrees, found.candidate.axis_order, wish.cluster.per_node
        )
        if ranks.size == 1:
            continue
        total = max(_axis_traffic(job, plan, flow, axis))
        pace = GIB / links.collective_seconds(wish.cluster, "all_gather", GIB, ranks)
        if ranks.num_nodes == 1:
            place = "inside nodes"
        else:
            place = "between nodes"
        words.append(f"{total / 1e9:,.0f} GB over {axis} {place} at {pace / 1e9:.0f} GB/s")
    waits = sum(found.prediction.seconds_by_part.get(axis, 0.0) for axis in ("row", "col", "depth"))
    return (
        f"({describe_candidate(found)}) moves {_join_words(words)} "
        f"({format_seconds(waits)} exposed)"
    )


def _axis_traffic(
    job: predict.Workload, plan: Plan, flow: ActivationShape, axis: str
) -> Iterator[int]:
    """Yields the bytes that a rank of each kind of stage communicates over an axis per step."""
    for stage in comm_volume.distinct_stages(job.model, plan, job.seq):
        rows = comm_volume.step_comm_volume(
            job.model, plan, flow, stage=stage.stage_spec.index, orders=0, optimizer=job.optimizer
        ).rows
        yield sum(round(one.bytes * one.count) for one in rows if one.axis == (axis,))


# ---- how to run it ------------------------------------------------------------------------


def candidate_settings(found: PredictedCandidate, wish: SearchRequest) -> dict[str, Any]:
    """Returns the settings of a layout that differ from the defaults, by dotted name."""
    plan = found.plan
    usual = Plan()
    names = (
        *(
            "col_splits",
            "virtual_stages",
            "reshard_after",
            "shard_weights_over",
            "recompute",
            "compile",
            "rank_order",
            "schedule",
        ),
        *("micro_batch", "global_batch"),
    )
    out: dict[str, Any] = {f"plan.{axis}": size for axis, size in plan.degrees.items() if size > 1}
    out |= {f"plan.{n}": getattr(plan, n) for n in names if getattr(plan, n) != getattr(usual, n)}
    out["plan.global_batch"] = plan.global_batch
    if found.candidate.states == "host":
        out["memory.optimizer_states"] = "host"
    if wish.fp8:
        out["train.float8"] = next(
            word for word, scales in FP8_SCALING.items() if scales == wish.fp8
        )
    return out


def train_command(found: PredictedCandidate, wish: SearchRequest, carried: Sequence[str]) -> str:
    """Returns the command that runs a layout, with the user's own options (`carried`)."""
    chosen = candidate_settings(found, wish)
    words = ["ranvier train", *carried]
    for name, value in chosen.items():
        if isinstance(value, tuple):
            text = " ".join(value)
        else:
            text = value
        words.append(f"--{name.replace('_', '-')} {text}")
    cluster = wish.cluster
    # On several nodes Slurm starts the ranks; on one node `ranvier train` does.
    if cluster.nodes > 1:
        return (
            f"srun --nodes {cluster.nodes} --ntasks-per-node {cluster.per_node} {' '.join(words)}"
        )
    return " ".join([*words, f"--nproc {cluster.num_devices}"])
