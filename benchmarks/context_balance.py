"""Compares orders of tokens over context, and assignments of windows to ranks, by balance.

    python benchmarks/context_balance.py                      five kinds of documents, C = 8 and 32
    python benchmarks/context_balance.py --lengths FILE       documents of these lengths as well
    python benchmarks/context_balance.py --output FILE.json   all numbers

First table: for each order, attention work of the rank with the most relative to the mean (mean and
maximum over windows), keys fetched by a rank (mean over ranks and windows) relative to an
all-gather, and segments of the rank with the most. `blocks` sorts blocks of 512 tokens by work and
deals them in turn, as others do. Second table: efficiency of windows assigned to ranks and
micro-batches, in the order they come and by cost, in an 8 B model; ranks meet once per step or in
every micro-batch. Last, the limits and whether they hold; exit status 1 if one does not.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from script_parser import ScriptParser

from ranvier.data.window_assignment import assign_windows, assignment_efficiency, window_cost
from ranvier.sharding import TokenOrder, TokenSegment, order_tokens

BLOCK = 512
"""Tokens of a block of the `blocks` order."""
MEAN_WORK, WORK, SEGMENTS = 1.05, 1.10, 50
"""Limits of the balanced order: work in the mean of windows and in each, segments in the mean."""
MIXED = ("code", "books", "tail")
FETCHED, MEAN_FETCHED = 0.75, 0.35
"""Limits of keys fetched relative to `blocks`: in each of `MIXED`, and in the geometric mean."""
SECONDS = 0.020
"""Limit for 64 ranks and 2,000 documents."""
EFFICIENCY = {"tail": 0.88, "books": 0.94, "code": 0.89}
"""Least efficiency of 32 ranks with 8 micro-batches that meet in each, windows of 131,072."""


def draw_length(kind: str, tokens: int, rng: np.random.Generator) -> int:
    """Returns the length of a document of a window of `tokens`."""
    if kind == "one":
        return tokens
    if kind == "equal":
        return tokens // 64
    if kind == "code":
        return int(np.exp(rng.normal(np.log(1500), 1.6)))
    if kind == "books":
        # Mostly short texts of the web.
        if rng.random() < 0.995:
            return int(np.exp(rng.normal(np.log(900), 1.0)))
        return int(rng.uniform(0.1, 0.6) * tokens)
    return int(300 * (rng.pareto(1.1) + 1))


KINDS = ("one", "equal", *MIXED)


def pack_window(lengths: Iterator[int], tokens: int) -> list[int]:
    """Returns the next documents that fill a window; the last one is truncated."""
    window: list[int] = []
    rest = tokens
    while rest:
        window.append(min(max(next(lengths), 1), rest))
        rest -= window[-1]
    return window


def draw_window(kind: str, tokens: int, rng: np.random.Generator) -> list[int]:
    """Returns the lengths of the documents of a window."""
    return pack_window(iter(lambda: draw_length(kind, tokens, rng), None), tokens)


def read_lengths(path: Path) -> list[int]:
    """Returns the lengths in a file, one on each line.

    Raises:
        ValueError: A line is not a positive integer, or there is none.
    """
    remedy = "Write one positive number of tokens on each line."
    try:
        words = path.read_text().split()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}. {remedy}") from error
    for number, word in enumerate(words, 1):
        if not word.isascii() or not word.isdigit() or int(word) == 0:
            raise ValueError(
                f"{path}: the length number {number} is {word!r}. Every document has at least one "
                f"token. {remedy}"
            )
    if not words:
        raise ValueError(f"{path} has no lengths. At least one is needed. {remedy}")
    return [int(word) for word in words]


def order_blocks(lengths: Sequence[int], num_ranks: int) -> TokenOrder:
    """Returns the order of blocks of 512 tokens sorted by work, dealt in turn and back."""
    num_blocks = sum(lengths) // BLOCK
    blocks = order_tokens(lengths, num_blocks, "contiguous").segments
    work = [sum(one.num_scores() for one in block) for block in blocks]
    ranks: list[list[TokenSegment]] = [[] for _ in range(num_ranks)]
    for i, block in enumerate(sorted(range(num_blocks), key=lambda block: -work[block])):
        turn, place = divmod(i, num_ranks)
        ranks[place if turn % 2 == 0 else num_ranks - 1 - place] += blocks[block]
    return TokenOrder(tuple(lengths), tuple(join_segments(rank) for rank in ranks))


def join_segments(segments: Sequence[TokenSegment]) -> tuple[TokenSegment, ...]:
    """Joins segments that continue each other."""
    joined: list[TokenSegment] = []
    for one in sorted(segments):
        if joined and joined[-1].document == one.document and joined[-1].stop == one.start:
            one = TokenSegment(one.document, joined.pop().start, one.stop)
        joined.append(one)
    return tuple(joined)


ORDERS: Mapping[str, Callable[[Sequence[int], int], TokenOrder]] = {
    "contiguous": lambda lengths, num_ranks: order_tokens(lengths, num_ranks, "contiguous"),
    "zigzag": lambda lengths, num_ranks: order_tokens(lengths, num_ranks, "zigzag"),
    "blocks": order_blocks,
    "balanced": lambda lengths, num_ranks: order_tokens(lengths, num_ranks, "balanced"),
}


class OrderRow(NamedTuple):
    """An order for the windows of one kind."""

    kind: str
    context: int
    order: str
    mean_work: float
    """Work of the rank with the most relative to the mean, mean over windows."""
    work: float
    """The same, the maximum over windows."""
    fetched: float
    """Keys fetched by a rank relative to an all-gather, mean over ranks and windows."""
    segments: float
    """Segments of the rank with the most, mean over windows."""
    equal_tokens: bool


def measure_order(kind: str, context: int, name: str, windows: Sequence[Sequence[int]]) -> OrderRow:
    """Returns the balance of an order for these windows."""
    works, fetched, segments = [], [], []
    equal_tokens = True
    for lengths in windows:
        order = ORDERS[name](lengths, context)
        work = order.attention_work()
        works.append(max(work) * context / sum(work))
        fetched.append(statistics.mean(order.num_fetched()) / (sum(lengths) * (1 - 1 / context)))
        segments.append(max(order.num_segments))
        tokens = {sum(one.num_tokens for one in rank) for rank in order.segments}
        equal_tokens &= tokens == {sum(lengths) // context}
    mean = statistics.mean
    return OrderRow(
        kind, context, name, mean(works), max(works), mean(fetched), mean(segments), equal_tokens
    )


class AssignmentRow(NamedTuple):
    """Efficiency of the windows of steps, mean over steps."""

    kind: str
    tokens: int
    num_ranks: int
    num_micro_batches: int
    assignment: str
    step: float
    """Ranks meet once per step."""
    micro_batch: float
    """Ranks meet in every micro-batch."""


def measure_assignments(seed: int, num_steps: int) -> list[AssignmentRow]:
    """Returns the efficiency of windows in the order they come and assigned by cost."""
    rng = np.random.default_rng(seed)
    rows = []
    cases = (("tail", 32768), ("tail", 131072), ("books", 131072), ("code", 131072))
    for (kind, tokens), (ranks, micro) in itertools.product(cases, ((8, 4), (32, 8))):
        found: dict[str, list[tuple[float, float]]] = {"in order": [], "by cost": []}
        for _ in range(num_steps):
            costs = [
                window_cost(
                    draw_window(kind, tokens, rng),
                    num_parameters=8 * 10**9,
                    attention_features=4096,
                    layer_windows=[0] * 32,
                )
                for _ in range(ranks * micro)
            ]
            in_order = np.arange(ranks * micro).reshape(ranks, micro, 1)
            by_cost = assign_windows(costs, ranks, micro)
            for name, assigned in (("in order", in_order), ("by cost", by_cost)):
                found[name].append(assignment_efficiency(costs, assigned))
        for name, pairs in found.items():
            step, micro_batch = (statistics.mean(values) for values in zip(*pairs, strict=True))
            rows.append(AssignmentRow(kind, tokens, ranks, micro, name, step, micro_batch))
    return rows


def time_order(seed: int, repeats: int = 20) -> float:
    """Returns the median seconds of the balanced order of 2,000 documents on 64 ranks."""
    rng = np.random.default_rng(seed)
    lengths = [max(draw_length("code", 1, rng), 1) for _ in range(2000)]
    lengths[-1] += -sum(lengths) % 64
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        order_tokens(lengths, 64, "balanced")
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


class Check(NamedTuple):
    """One limit."""

    text: str
    value: float
    limit: float
    holds: bool


def at_most(text: str, value: float, limit: float) -> Check:
    # The mean has a rounding error.
    return Check(text, value, limit, value <= limit * (1 + 1e-9))


def check_orders(rows: Sequence[OrderRow]) -> Iterator[Check]:
    """Yields the limits of the balanced order."""
    ratios = []
    by_name = {(row.kind, row.context, row.order): row for row in rows}
    for (kind, context, order), row in by_name.items():
        if order != "balanced":
            continue
        text = f"{kind}, context {context}"
        yield at_most(f"{text}: work in the mean", row.mean_work, MEAN_WORK)
        yield at_most(f"{text}: work in each window", row.work, WORK)
        yield at_most(f"{text}: segments", row.segments, SEGMENTS)
        yield Check(f"{text}: equal tokens", float(row.equal_tokens), 1, row.equal_tokens)
        if kind == "one":
            yield at_most(f"{text}: keys fetched", row.fetched, 0.75)
        elif kind == "equal":
            yield at_most(f"{text}: keys fetched", row.fetched, 0)
        elif kind in MIXED:
            ratio = row.fetched / by_name[kind, context, "blocks"].fetched
            ratios.append(ratio)
            yield at_most(f"{text}: keys fetched relative to blocks", ratio, FETCHED)
    if ratios:
        mean = math.exp(statistics.mean(map(math.log, ratios)))
        yield at_most("keys fetched relative to blocks, geometric mean", mean, MEAN_FETCHED)


def check_assignments(rows: Sequence[AssignmentRow]) -> Iterator[Check]:
    """Yields the limits of windows assigned by cost."""
    for row in rows:
        if row.assignment == "by cost" and (row.num_ranks, row.tokens) == (32, 131072):
            limit = EFFICIENCY[row.kind]
            text = f"{row.kind}: efficiency of assigned windows"
            yield Check(text, row.micro_batch, limit, row.micro_batch >= limit)


def print_table(rows: Sequence[NamedTuple]) -> None:
    """Prints rows of one type, with their fields as columns."""
    fields = rows[0]._fields
    lines = [fields, *([format_cell(cell) for cell in row] for row in rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(fields))]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def format_cell(cell: object) -> str:
    """Returns a number with three digits after the point, anything else as it is."""
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def parse_arguments(words: Sequence[str] | None) -> tuple[argparse.Namespace, dict[str, list[int]]]:
    """Returns the options, and the lengths of each file."""
    parser = ScriptParser(
        __doc__, smoke="--context 8 --windows 1 --steps 1 --tokens 8192 --output {folder}/rows.json"
    )
    parser.add_argument(
        "--context", type=int, nargs="+", default=[8, 32], help="ranks of context (8 32)"
    )
    parser.add_argument("--windows", type=int, default=20, help="windows of a kind (20)")
    parser.add_argument(
        "--tokens", type=int, help="tokens of a window (131,072 up to context 8, then 1,048,576)"
    )
    parser.add_argument(
        "--lengths",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="files with the length of a document on each line; repeated if a file is too short",
    )
    parser.add_argument("--steps", type=int, default=5, help="steps of assigned windows (5)")
    parser.add_argument("--seed", type=int, default=0, help="seed of all draws (0)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="JSON file with all numbers")
    options = parser.parse_args(words)
    try:
        files = {path.name: read_lengths(path) for path in options.lengths}
    except ValueError as error:
        parser.error(str(error))
    for context in options.context:
        tokens = options.tokens or window_tokens(context)
        if context < 2 or tokens % context or tokens % BLOCK or tokens // BLOCK % context:
            parser.error(
                f"context is {context} and a window has {tokens} tokens. Context is at least 2, "
                f"and a window a multiple of {BLOCK} tokens for each rank. Choose --tokens."
            )
    for name in ("windows", "steps"):
        if getattr(options, name) < 1:
            parser.error(f"--{name} is {getattr(options, name)}. It is at least 1. Choose more.")
    return options, files


def window_tokens(context: int) -> int:
    """Returns the default number of tokens of a window."""
    return 131072 if context <= 8 else 1048576


def main(words: Sequence[str] | None = None) -> int:
    """Prints the tables and the limits; returns the exit status."""
    options, files = parse_arguments(words)
    rng = np.random.default_rng(options.seed)
    rows = []
    for kind, context in itertools.product((*KINDS, *files), options.context):
        tokens = options.tokens or window_tokens(context)
        lengths = itertools.cycle(files[kind]) if kind in files else None
        windows = [
            pack_window(lengths, tokens) if lengths else draw_window(kind, tokens, rng)
            for _ in range(options.windows)
        ]
        rows += [measure_order(kind, context, name, windows) for name in ORDERS]
    print_table(rows)
    assignments = measure_assignments(options.seed, options.steps)
    print_table(assignments)
    seconds = time_order(options.seed)
    checks = [
        *check_orders(rows),
        at_most("seconds of 2,000 documents on 64 ranks", seconds, SECONDS),
        *check_assignments(assignments),
    ]
    print_table(checks)
    if options.output:
        tables: dict[str, Sequence[NamedTuple]] = {
            "orders": rows,
            "assignments": assignments,
            "checks": checks,
        }
        found = {name: [row._asdict() for row in table] for name, table in tables.items()}
        options.output.write_text(json.dumps(found, indent=1) + "\n")
    return 0 if options.smoke or all(check.holds for check in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
