"""The picture of the README, docs/images/overview.svg: the grid, and measured ratios.

Usage: python scripts/picture.py [--check]
Ratios are read from the rows of benchmarks/data whose contestants were checked. --check writes
nothing and returns 1 if the picture is stale.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from ranvier.html.plot import DARK_THEME, LIGHT_THEME

ROOT = Path(__file__).resolve().parents[1]
PICTURE = ROOT / "docs" / "images" / "overview.svg"
WIDTH, HEIGHT = 880, 330
BAR_LEFT, BAR_SCALE, BAR_STEP = 602, 68, 33
TITLE = "One grid of ranks, and the speed of Ranvier on one H200 relative to other frameworks"

BARS = (
    (
        "dense 1.5B, torchtitan",
        "one_gpu_peers.csv",
        {"contestant": "ranvier bf16", "size": "1.5b", "peer": "torchtitan"},
        "speedup",
    ),
    (
        "float8 1.5B, torchtitan bf16",
        "one_gpu_peers.csv",
        {"contestant": "ranvier float8", "size": "1.5b", "peer": "torchtitan"},
        "speedup",
    ),
    (
        "mixture, torchtitan",
        "moe_one_gpu.csv",
        {"contestant": "torchtitan's", "note": "2026"},
        "ranvier_speedup",
    ),
    ("LoRA 8B, PEFT", "lora.csv", {"size": "8b", "peft": "eager"}, "speedup"),
    ("LoRA 8B, PEFT compiled", "lora.csv", {"size": "8b", "peft": "compiled"}, "speedup"),
    (
        "CPU offload 1.5B, FSDP2",
        "memory_fsdp2.csv",
        {"configuration": "memory."},
        "speedup_over_fsdp2",
    ),
    ("model size, plain AdamW", "memory_largest.csv", {"configuration": "8-bit"}, "times_plain"),
)
"""Label, file, how the values of a row begin, and the column of a ratio. The first row counts."""


def read_ratio(name: str, wanted: Mapping[str, str], column: str) -> float | None:
    """Returns the ratio in the first checked row that matches and has one; None if none is."""
    was_found = False
    with (ROOT / "benchmarks" / "data" / name).open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row[column] and all(row[key].startswith(text) for key, text in wanted.items()):
                # A table of one model's sizes compares no contestants.
                if row.get("checked", "yes") == "yes":
                    return float(row[column])
                was_found = True
    if was_found:
        return None
    raise ValueError(f"{name} has no row with {wanted} and a value of {column}.")


def text(x: float, y: float, words: str, style: str = "", anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{style}" text-anchor="{anchor}">{words}</text>'


def draw_arrow(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" class="{colour} line"'
        f' marker-start="url(#{colour})" marker-end="url(#{colour})"/>'
    )


def draw_grid() -> Iterator[str]:
    """Yields eight ranks on depth 2, row 2 and col 2."""
    yield text(28, 40, "One grid, seven named axes", "title")
    for depth, (left, top) in enumerate(((50, 116), (206, 74))):
        layer = f'<rect x="{left - 14}" y="{top - 14}" width="154" height="128" rx="8"'
        yield f'{layer} class="layer"/>'
        for row in range(2):
            for col in range(2):
                x, y = left + 66 * col, top + 54 * row
                yield f'<rect x="{x}" y="{y}" width="60" height="46" rx="5" class="rank"/>'
                yield text(x + 30, y + 28, f"rank {4 * depth + 2 * row + col}", "ink", "middle")
    yield draw_arrow(54, 246, 172, 246, "c0")
    yield text(113, 266, "col", "c0 bold", "middle")
    yield draw_arrow(20, 114, 20, 222, "c1")
    yield text(12, 246, "row", "c1 bold")
    yield draw_arrow(206, 240, 330, 207, "c2")
    yield text(284, 244, "depth", "c2 bold", "middle")
    yield text(28, 314, "and pipe, data, expert, context", "muted")


def draw_bars() -> Iterator[str]:
    """Yields one bar per ratio, and a line at 1."""
    yield text(400, 40, "Measured on one H200, other = 1", "title")
    ratios = [(label, column, read_ratio(name, rows, column)) for label, name, rows, column in BARS]
    number = 0
    for label, column, ratio in ratios:
        if ratio is None:
            continue
        y = 62 + BAR_STEP * number
        number += 1
        width = BAR_SCALE * ratio
        yield text(BAR_LEFT - 12, y + 15, label, "ink", "end")
        colour = "c2" if column == "times_plain" else "c0"
        bar = f'<rect x="{BAR_LEFT}" y="{y}" width="{width:g}" height="21" rx="3"'
        yield f'{bar} class="{colour}"/>'
        yield text(BAR_LEFT + width + 8, y + 15, f"{ratio:.2f}x", "ink bold")
    x = BAR_LEFT + BAR_SCALE
    bottom = 62 + BAR_STEP * number
    yield f'<line x1="{x}" y1="54" x2="{x}" y2="{bottom - 4}" class="one"/>'
    yield text(400, 314, "Conditions, commands and raw rows: docs/benchmarks", "muted")


def draw_picture() -> str:
    """Returns the SVG. It has its own background, so it is readable on light and dark pages."""
    style = "".join(
        f"{opening}:root{{{''.join(f'--{key}:{value};' for key, value in theme.items())}}}{closing}"
        for opening, theme, closing in (
            ("", LIGHT_THEME, ""),
            ("@media (prefers-color-scheme: dark){", DARK_THEME, "}"),
        )
    )
    markers = "".join(
        f'<marker id="c{n}" viewBox="0 0 8 8" refX="6" refY="4" markerWidth="6" markerHeight="6"'
        f' orient="auto-start-reverse"><path d="M0 0 L8 4 L0 8 z" class="c{n}"/></marker>'
        for n in range(3)
    )
    rules = "".join(f".c{n}{{fill:var(--c{n});stroke:none}}" for n in range(3))
    rules += "".join(f".c{n}.line{{stroke:var(--c{n});stroke-width:2}}" for n in range(3))
    rules += (
        ".paper{fill:var(--paper);stroke:var(--rule)}.layer{fill:var(--rule);stroke:var(--axis)}"
        ".rank{fill:var(--paper);stroke:var(--axis)}.ink{fill:var(--ink)}.muted{fill:var(--muted)}"
        ".title{fill:var(--ink);font-size:17px;font-weight:600}.bold{font-weight:600}"
        ".one{stroke:var(--ink);stroke-dasharray:4 3}"
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}"'
        f' height="{HEIGHT}" role="img" font-family="Helvetica, Arial, sans-serif" font-size="14">',
        f"<title>{TITLE}</title>",
        f"<style>{style}{rules}</style>",
        f"<defs>{markers}</defs>",
        f'<rect x="1" y="1" width="{WIDTH - 2}" height="{HEIGHT - 2}" rx="10" class="paper"/>',
        *draw_grid(),
        *draw_bars(),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def main(arguments: Sequence[str]) -> int:
    """Writes the picture, or compares it."""
    picture = draw_picture()
    if "--check" in arguments:
        return int(not PICTURE.exists() or PICTURE.read_text(encoding="utf-8") != picture)
    PICTURE.write_text(picture, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
