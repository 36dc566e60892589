"""Explain: a search in words: the best layouts, why the first is first, how to run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from ranvier.config.plan import Plan
from ranvier.cost.layers import Flow
from ranvier.html.number_format import percent, short
from ranvier.planner import comm_volume, predict
from ranvier.planner.baselines import OURS, Found, family, gains, rivals
from ranvier.planner.memory.breakdown import GIB
from ranvier.planner.predict import Prediction
from ranvier.planner.search import Result, Wish
from ranvier.planner.time import links
from ranvier.planner.time.compute import SCALES

SAME = 1.01
"""Times of a step that differ by less are the same to a prediction."""
SOME = 0.04
"""Share of a step from which on a part is named."""
HEAD = ("layout", "micro", "again", "step", "tok/s", "MFU", "GiB", "where the time goes")
WORDS = {
    "compute": "matrix products",
    "attention": "attention",
    "again": "what is computed again",
    "row": "communication over row",
    "col": "communication over col",
    "depth": "communication over depth",
    "data": "communication over data",
    "pipe": "messages between stages",
    "bubble": "stages that wait",
    "update": "the update",
    "host": "states on the host",
    "expert": "communication over expert",
    "context": "communication over context",
    "other": "waiting for the slowest node",
}


def degrees(plan: Plan) -> str:
    """The axes that a plan uses, such as `pipe 4 data 8`, or `1 device`."""
    used = [f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1]
    return " ".join(used) or "1 device"


def layout(found: Found) -> str:
    """All that tells a layout from others but its micro-batch and recomputation."""
    plan, words = found.plan, [degrees(found.plan)]
    if plan.col > 1 and plan.inner == "features":
        words.append("features")
    if plan.chunks > 1:
        words.append(f"chunks {plan.chunks}")
    if plan.gathered == "keep" and plan.depth > 1:
        words.append("keep")
    if plan.compile == "on":
        words.append("compiled")
    if found.layout.states == "host":
        words.append("host")
    if plan.order:
        words.append(f"[{' '.join(_inside(plan))} inside]")
    return " ".join(words)


def _inside(plan: Plan) -> list[str]:
    return [axis for axis in plan.placed if plan.degrees[axis] > 1][-2:]


def seconds(value: float) -> str:
    """A time in a few characters."""
    return f"{1000 * value:.3g} ms" if value < 0.9995 else f"{value:.3g} s"


def shares(prediction: Prediction, least: float = SOME) -> list[tuple[str, float]]:
    """The parts of a step above a share, largest first."""
    parts = [(name, value / prediction.total) for name, value in prediction.parts.items()]
    return sorted((one for one in parts if one[1] >= least), key=lambda one: -one[1])


def row(found: Found) -> tuple[str, ...]:
    """The cells of a layout under `HEAD`."""
    it, plan = found.prediction, found.plan
    parts = " ".join(f"{name} {percent(share)}" for name, share in shares(it))
    figures = (seconds(it.total), short(it.rate), percent(it.mfu), f"{it.memory.total / GIB:.1f}")
    return (layout(found), str(plan.micro_batch), plan.recompute, *figures, parts)


def distinct(found: Sequence[Found], top: int) -> list[Found]:
    """The best layouts with different degrees."""
    seen: dict[tuple[int, ...], Found] = {}
    for one in found:
        if len(seen) == top:
            break
        seen.setdefault(tuple(one.plan.degrees.values()), one)
    return list(seen.values())


def lines(head: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int]) -> list[str]:
    """Rows of cells as text; columns in `left` begin at their left edge."""
    cells = [head, *rows]
    widths = [max(len(one[i]) for one in cells) for i in range(len(head))]
    return [
        "  ".join(
            f"{cell:<{width}}" if i in left else f"{cell:>{width}}"
            for i, (cell, width) in enumerate(zip(one, widths, strict=True))
        ).rstrip()
        for one in cells
    ]


def table(result: Result, top: int) -> list[str]:
    """The best layouts, one line each."""
    rows = [(str(i), *row(one)) for i, one in enumerate(distinct(result.found, top), 1)]
    return lines(("", *HEAD), rows, left=(1, 3, 8))


def compared(result: Result) -> list[str]:
    """The best of each style beside ours."""
    best = rivals(result.found, result.wish.cluster.per_node)
    gained = gains(best)
    rows = [
        (name, *row(one)[:7], f"{gained[name]:.2f} x" if name in gained else "")
        for name, one in best.items()
    ]
    return lines(("best of", *HEAD[:7], "time"), rows, left=(0, 1, 3))


# ---- sentences ----------------------------------------------------------------------------


def reason(result: Result) -> str:
    """The choice and why, in one line."""
    best, it = result.best, result.best.prediction
    return (
        f"{layout(best)}, micro-batch {best.plan.micro_batch}, recompute {best.plan.recompute}: "
        f"{seconds(it.total)} a step predicted, best of {result.count:,} layouts; {binding(result)}"
    )


def why(result: Result) -> list[str]:
    """The choice in a few sentences."""
    best, it = result.best, result.best.prediction
    low, high = it.interval
    kind = family(best.plan)
    named = f" ({kind})" if kind not in degrees(best.plan) else ""
    said = [
        f"{layout(best)}{named}: {seconds(it.total)} a step (80 % of such predictions lie between "
        f"{seconds(low)} and {seconds(high)}), {short(it.rate)} tokens/s, MFU {percent(it.mfu)}, "
        f"{it.memory.total / GIB:.1f} of {it.limit / GIB:.1f} GiB of a device.",
        f"Its time goes into {_and([f'{WORDS[n]} ({percent(s)})' for n, s in shares(it)])}.",
        binding(result),
        *_graphs(result),
        *_styles(result),
        *_two_dims(result),
    ]
    return [text for text in said if text]


def _graphs(result: Result) -> Iterator[str]:
    """What compiled blocks of split layers gain, although they overlap less."""
    best, wish = result.best, result.wish
    if best.plan.compile == "on" and wish.plan.compile != "on":
        plain = replace(best.layout, plan=replace(best.plan, compile="auto"))
        spent = sum(predict.seconds(wish.job, plain, wish.cluster).values())
        yield (
            "Its blocks are compiled (--plan.compile on): inside a graph communication is not "
            f"overlapped; with eager blocks a step takes {seconds(spent)}."
        )


def _and(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), *words[-1:]]))


def binding(result: Result) -> str:
    """What keeps it from being faster."""
    best, it = result.best, result.best.prediction
    faster = [one for one in result.tight if one.prediction.total * SAME < it.total]
    if faster:
        one = min(faster, key=lambda one: (one.prediction.memory.total, one.key))
        return (
            f"Memory binds: {layout(one)} with micro-batch {one.plan.micro_batch} and recompute "
            f"{one.plan.recompute} would take {seconds(one.prediction.total)}, but needs "
            f"{one.prediction.memory.total / GIB:.1f} of {it.limit / GIB:.1f} GiB."
        )
    waits = [one for one in shares(it) if one[0] not in ("compute", "attention", "again")]
    if not waits:
        return "Compute binds: no layout has less to do."
    name, share = waits[0]
    if name == "bubble":
        return _uneven(result) or (
            f"The batch binds: stages wait {percent(share)} of the time, since {best.plan.batch} "
            f"sequences are only {best.plan.micro_batches} micro-batches."
        )
    return f"{WORDS[name].capitalize()} binds: {percent(share)} of a step that nothing hides."


def _uneven(result: Result) -> str:
    """That the slowest stage binds, if the others wait for it more than for the first and last
    micro-batch."""
    best, wish = result.best, result.wish
    plan, bubble = best.plan, best.prediction.parts["bubble"]
    times = predict.stage_seconds(wish.job, best.layout, wish.cluster)
    slowest, mean = max(times), sum(times) / len(times)
    if 2 * plan.micro_batches * (slowest - mean) < bubble:
        return ""
    at = times.index(slowest)
    here = comm_volume.stages(wish.job.model, plan, wish.job.seq)[at]
    blocks = sum(count for part, count in here.here if part.is_block)
    held = [f"{blocks} block{'s' * (blocks != 1)}"] * (blocks > 0)
    names = {part.name for part, _ in here.here}
    parts = wish.job.model.parts
    held += ["the embedding"] * (parts[0].name in names) + ["the head"] * (parts[-1].name in names)
    return (
        f"The slowest stage binds: stage {at} of {plan.pipe} ({_and(held)}) takes "
        f"{seconds(slowest)} for a micro-batch, the mean stage {seconds(mean)}; stages wait "
        f"{percent(bubble / best.prediction.total)} of the time."
    )


def _styles(result: Result) -> Iterator[str]:
    """How far others are behind, or that they are not."""
    best = rivals(result.found, result.wish.cluster.per_node)
    behind = gains(best)
    same = [name for name, times in behind.items() if times < SAME]
    if "FSDP" in same:
        yield "FSDP is as good as anything here: nothing is gained by other axes."
    elif same:
        yield f"The best {' and the best '.join(same)} layout takes the same time."
    for name, times in behind.items():
        if times >= SAME:
            one = best[name]
            yield (
                f"The best {name} layout ({layout(one)}) takes {times:.2f} times as long"
                f"{_since(one.prediction, best[OURS].prediction)}."
            )
    missing = [name for name in ("Megatron", "FSDP", "AxoNN") if name not in best]
    if missing:
        yield f"No {' and no '.join(missing)} layout fits or divides."


def _since(slow: Prediction, fast: Prediction) -> str:
    """The part of a step that makes most of the difference."""
    names = {*slow.parts, *fast.parts}
    more = {n: slow.parts.get(n, 0.0) - fast.parts.get(n, 0.0) for n in sorted(names)}
    name = max(more, key=lambda n: more[n])
    return f", mostly for {WORDS[name]} (+{seconds(more[name])})" if more[name] > 0 else ""


def _two_dims(result: Result) -> Iterator[str]:
    """Whether splitting features over col as well pays where ranks split a layer."""
    alike = [f for f in result.found if f.plan.pipe == result.best.plan.pipe]
    one = next((f for f in alike if f.plan.row > 1 and f.plan.col == 1), None)
    two = next((f for f in alike if f.plan.col > 1), None)
    if one is None or two is None or result.best.plan.row * result.best.plan.col == 1:
        return
    ratio = two.prediction.total / one.prediction.total
    what = f"1-D {_carried(one, result.wish)}; 2-D {_carried(two, result.wish)}"
    if ratio > SAME:
        yield f"1-D wins over 2-D by {percent(ratio - 1)}: {what}."
    elif ratio < 1 / SAME:
        yield f"2-D wins over 1-D by {percent(1 / ratio - 1)}: {what}."
    else:
        yield f"1-D and 2-D tie: {what}."


def _carried(found: Found, wish: Wish) -> str:
    """What the busiest stage of a layout moves over row and col in a step, how fast, and what of it
    nothing hides."""
    plan, job = found.plan, wish.job
    size = {"fp32": 4, "fp64": 8}.get(job.dtype, 2)
    flow = Flow(plan.micro_batch, job.seq, size, max(size, 4))
    words = []
    for axis in ("row", "col"):
        ranks = links.group((axis,), plan.degrees, found.layout.order, wish.cluster.per_node)
        if ranks.size == 1:
            continue
        total = max(_moved(job, plan, flow, axis))
        pace = GIB / links.seconds(wish.cluster, "all_gather", GIB, ranks)
        place = "inside nodes" if ranks.nodes == 1 else "between nodes"
        words.append(f"{total / 1e9:,.0f} GB over {axis} {place} at {pace / 1e9:.0f} GB/s")
    waits = sum(found.prediction.parts.get(axis, 0.0) for axis in ("row", "col", "depth"))
    return f"({layout(found)}) moves {_and(words)} and waits {seconds(waits)} in all"


def _moved(job: predict.Job, plan: Plan, flow: Flow, axis: str) -> Iterator[int]:
    """Bytes that a rank of each kind of stage moves over an axis in a step."""
    for stage in comm_volume.kinds_of_stages(job.model, plan, job.seq):
        rows = comm_volume.moves(job.model, plan, flow, stage=stage.seat.index, orders=0).rows
        yield sum(one.bytes * one.count for one in rows if one.axis == (axis,))


# ---- how to run it ------------------------------------------------------------------------


def settings(found: Found, wish: Wish) -> dict[str, Any]:
    """The settings of a layout by their dotted names, where they are not the default."""
    plan, usual = found.plan, Plan()
    names = (
        *("inner", "chunks", "gathered", "recompute", "compile", "order", "policy"),
        *("micro_batch", "batch"),
    )
    out: dict[str, Any] = {f"plan.{axis}": size for axis, size in plan.degrees.items() if size > 1}
    out |= {f"plan.{n}": getattr(plan, n) for n in names if getattr(plan, n) != getattr(usual, n)}
    out["plan.batch"] = plan.batch
    if found.layout.states == "host":
        out["memory.states"] = "host"
    if wish.fp8:
        out["train.fp8"] = next(word for word, scales in SCALES.items() if scales == wish.fp8)
    return out


def command(found: Found, wish: Wish, carried: Sequence[str]) -> str:
    """The command that runs a layout; carried: words of the user's own that stay."""
    chosen = settings(found, wish)
    words = ["ranvier train", *carried]
    for name, value in chosen.items():
        text = " ".join(value) if isinstance(value, tuple) else value
        words.append(f"--{name.replace('_', '-')} {text}")
    cluster = wish.cluster
    if cluster.nodes > 1:
        return (
            f"srun --nodes {cluster.nodes} --ntasks-per-node {cluster.per_node} {' '.join(words)}"
        )
    return " ".join([*words, f"--nproc {cluster.devices}"])
