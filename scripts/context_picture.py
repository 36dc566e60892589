"""The picture of orders of tokens and methods of attention over context, docs/images/context.svg.

Usage: python scripts/context_picture.py [--check]
Orders, work and keys are those of the code, for one sample with five documents on four ranks.
--check writes nothing and returns 1 if the picture is stale.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from ranvier.config.plan import ContextOrder
from ranvier.cost.context_attention import KVGatherLayout
from ranvier.html.plot import DARK_THEME, LIGHT_THEME
from ranvier.sharding import TokenOrder, order_tokens

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "context.svg"
WIDTH, HEIGHT = 900, 372
TITLE = (
    "Orders of the tokens of a sample over four ranks of context, and the keys that methods send"
)
LENGTHS = (1920, 768, 576, 512, 320)
RANKS = 4
PANEL, LEFT, ROW = 290, 66, 24
"""Width of a panel, left edge of its first bar, and height of a row."""
BAR = 192
"""Width of a bar."""
ORDERS: tuple[ContextOrder, ...] = ("contiguous", "zigzag", "balanced")
METHODS = {
    "kv_gather": "the keys that its tokens see",
    "ring": "all keys, block by block",
    "ulysses": "all tokens of a part of the heads",
}


def draw_text(x: float, y: float, words: str, style: str = "ink", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def draw_bar(x: float, y: float, width: float, height: float, style: str) -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" class="{style}"/>'


def draw_ranks(left: float, top: float) -> Iterator[str]:
    """Yields the names of the rows of a panel."""
    for rank in range(RANKS):
        yield draw_text(left - 8, top + ROW * rank + 13, f"rank {rank}", "muted", "end")


def draw_order(name: ContextOrder, left: float, top: float) -> Iterator[str]:
    """Yields the documents of each rank, and its attention work relative to the mean."""
    order = order_tokens(LENGTHS, RANKS, name)
    work = order.attention_work()
    cell = BAR * RANKS / sum(LENGTHS)
    title = f"{name} (default)" if name == "balanced" else name
    yield draw_text(left, top - 14, title, "bold")
    yield from draw_ranks(left, top)
    for rank, segments in enumerate(order.segments):
        x = left
        y = top + ROW * rank
        for one in segments:
            yield draw_bar(x, y, cell * one.num_tokens, 17, f"d{one.document} edge")
            x += cell * one.num_tokens
        yield draw_text(x + 4, y + 13, f"{work[rank] * RANKS / sum(work):.2f}")


def sample_numbers(order: TokenOrder, rank: int) -> set[int]:
    """Returns the numbers in the sample of the tokens of a rank."""
    return set(order.token_numbers[rank].tolist())


def fetched_numbers(order: TokenOrder, rank: int) -> set[int]:
    """Returns the numbers in the sample of the keys that a rank gets by kv_gather."""
    layout = KVGatherLayout((order,), 0)
    found = set[int]()
    for source in range(RANKS):
        if source != rank:
            sent = KVGatherLayout(layout.orders, source).sent_rows[rank]
            found |= set(order.token_numbers[source][sent].tolist())
    return found


def draw_method(name: str, left: float, top: float) -> Iterator[str]:
    """Yields the keys of each rank by their number in the sample: own ones and received ones."""
    order = order_tokens(LENGTHS, RANKS, "balanced")
    documents = [i for i, length in enumerate(LENGTHS) for _ in range(length)]
    cell = BAR / len(documents)
    yield draw_text(left, top - 30, name, "bold")
    yield draw_text(left, top - 12, METHODS[name], "muted")
    yield from draw_ranks(left, top)
    for rank in range(RANKS):
        y = top + ROW * rank
        height = 17.0
        own = sample_numbers(order, rank)
        received = set(range(len(documents)))
        if name == "kv_gather":
            received = fetched_numbers(order, rank)
        yield draw_bar(left, y, BAR, height, "empty")
        if name == "ulysses":
            # Each rank has a quarter of the heads, of all tokens.
            own = received
            height /= RANKS
            y += height * rank
        styles = [
            f"d{document}" if number in own else f"d{document} received" * (number in received)
            for number, document in enumerate(documents)
        ]
        x = left
        for shown, some in groupby(styles):
            width = cell * len(list(some))
            if shown:
                yield draw_bar(x, y, width, height, shown)
            x += width


def draw_picture() -> str:
    """Returns the SVG. It has its own background, so it is readable on light and dark pages."""
    style = "".join(
        f"{opening}:root{{{''.join(f'--{key}:{value};' for key, value in theme.items())}}}{closing}"
        for opening, theme, closing in (
            ("", LIGHT_THEME, ""),
            ("@media (prefers-color-scheme: dark){", DARK_THEME, "}"),
        )
    )
    colours = ("c0", "c1", "c2", "c4", "c7")
    rules = "".join(f".d{n}{{fill:var(--{name})}}" for n, name in enumerate(colours))
    rules += (
        ".paper{fill:var(--paper);stroke:var(--rule)}.edge{stroke:var(--paper);stroke-width:1.5}"
        ".empty{fill:var(--rule)}.received{opacity:.45}.ink{fill:var(--ink)}"
        ".muted{fill:var(--muted)}.bold{fill:var(--ink);font-weight:600}"
        ".title{fill:var(--ink);font-size:16px;font-weight:600}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="13">',
        f"<title>{TITLE}</title>",
        f"<style>{style}{rules}</style>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" class="paper"/>',
        draw_text(18, 30, "Tokens of each rank by document, and its attention work", "title"),
        draw_text(18, 206, "Keys of each rank in the balanced order: own and received", "title"),
    ]
    for number, order in enumerate(ORDERS):
        parts += draw_order(order, LEFT + PANEL * number, 74)
    for number, method in enumerate(METHODS):
        parts += draw_method(method, LEFT + PANEL * number, 264)
    return "\n".join([*parts, "</svg>"]) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Writes the picture, or compares it."""
    picture = draw_picture()
    if "--check" in arguments:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
