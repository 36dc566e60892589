"""Heat map as inline SVG: one cell per row and column, darker for larger fractions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ranvier.html.plot import escape_html, open_svg

CELL_HEIGHT = 34
"""Height of a cell in pixels."""
MAX_CELL_WIDTH = 110
LABEL_WIDTH = 70
"""Width of the labels of rows in pixels."""
TOP_MARGIN = 62
BOTTOM_MARGIN = 14


def heat_map(
    columns: Mapping[str, Mapping[str, float]],
    rows: Sequence[str],
    *,
    title: str,
    column_label: str,
    row_label: str,
    width: int = 720,
) -> str:
    """Fractions from 0 to 1 by column and row, each cell with its percentage; some may be missing.

    columns: fractions by row, for each column from left to right. rows: from top to bottom.
    """
    wide = min((width - LABEL_WIDTH - 16) / max(len(columns), 1), MAX_CELL_WIDTH)
    height = TOP_MARGIN + CELL_HEIGHT * len(rows) + BOTTOM_MARGIN
    words = [
        f"{column_label} {name}, {row_label} {row}: {100 * cells[row]:.0f} %"
        for name, cells in columns.items()
        for row in rows
        if row in cells
    ]
    out = open_svg(title, escape_html("; ".join(words) or "nothing"), (width, height))
    out.append(f'<text x="8" y="{TOP_MARGIN - 8}">{escape_html(row_label)}</text>')
    out.append(f'<text class="end" x="{width - 8}" y="20">{escape_html(column_label)}</text>')
    for j, row in enumerate(rows):
        y = TOP_MARGIN + CELL_HEIGHT * j + CELL_HEIGHT / 2 + 5
        out.append(f'<text x="8" y="{y:g}">{escape_html(row)}</text>')
    for i, (name, cells) in enumerate(columns.items()):
        x = LABEL_WIDTH + wide * i
        middle = f'class="middle" x="{x + wide / 2:.1f}" y="{TOP_MARGIN - 8}"'
        out.append(f"<text {middle}>{escape_html(name)}</text>")
        for j, row in enumerate(rows):
            if row in cells:
                label = f"{column_label} {name}, {row_label} {row}"
                out += _draw_cell(x, TOP_MARGIN + CELL_HEIGHT * j, wide, cells[row], label)
    return "\n".join([*out, "</svg>"])


def _draw_cell(x: float, y: float, wide: float, value: float, label: str) -> list[str]:
    share = min(max(value, 0.0), 1.0)
    percent = f"{100 * value:.0f} %"
    # The text stays readable on the darkest cell, in light and dark pages.
    shade = 0.06 + 0.54 * share
    box = f'x="{x:.1f}" y="{y:g}" width="{wide - 2:.1f}" height="{CELL_HEIGHT - 2}" rx="3"'
    place = f'x="{x + wide / 2 - 1:.1f}" y="{y + CELL_HEIGHT / 2 + 4:g}"'
    return [
        f'<rect class="f2" fill-opacity="{shade:.2f}" {box}>'
        f"<title>{escape_html(f'{label}: {percent}')}</title></rect>",
        f'<text class="ink middle" {place}>{percent}</text>',
    ]
