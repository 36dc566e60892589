"""Accuracy of the task needle by length and depth, as a section of a report."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ranvier.html.heat_map import heat_map
from ranvier.html.page import render_section
from ranvier.html.plot import escape_html
from ranvier.system import safe_files

RESULTS_FILE = re.compile(r"eval-(\d+)\.json")


def render_needle_section(folder: Path) -> str:
    """The section of the latest evaluated step of a run; empty if there is none."""
    found = {}
    for path in folder.iterdir():
        name = RESULTS_FILE.fullmatch(path.name)
        if name is not None:
            found[int(name[1])] = path
    for step in sorted(found, reverse=True):
        table = _read_needle_table(found[step], folder)
        if table:
            return render_needle_table(table, step)
    return ""


def render_needle_table(table: Mapping[str, Mapping[str, Any]], step: int) -> str:
    """The heat map of accuracies by length and depth; keys that are not depths are ignored."""
    columns = {
        f"{int(length):,}": {key: float(v) for key, v in row.items() if _is_depth(key)}
        for length, row in sorted(table.items(), key=lambda item: int(item[0]))
    }
    depths = sorted({depth for cells in columns.values() for depth in cells}, key=float)
    trials = sorted({int(row["trials"]) for row in table.values() if "trials" in row})
    words = f"Exact answers after step {step}"
    if trials:
        words += f", {' or '.join(map(str, trials))} trials per cell"
    svg = heat_map(
        columns,
        depths,
        title="Needle in a haystack",
        column_label="length in tokens",
        row_label="depth",
    )
    words += ". Depth is the fraction of the text before the needle."
    text = f'<p class="muted">{escape_html(words)}</p>'
    return render_section("Needle in a haystack", text, f"<figure>{svg}</figure>")


def _is_depth(key: str) -> bool:
    return re.fullmatch(r"[01](\.\d+)?", key) is not None


def _read_needle_table(path: Path, folder: Path) -> dict[str, dict[str, Any]]:
    """The accuracies in a file of results; empty if there are none or it is not valid."""
    try:
        found = json.loads(safe_files.read_text(path, root=folder, errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    table = found.get("needle") if isinstance(found, dict) else None
    if not isinstance(table, dict):
        return {}
    return {
        length: row
        for length, row in table.items()
        if re.fullmatch("[0-9]{1,12}", length) and isinstance(row, dict) and _is_valid_row(row)
    }


def _is_valid_row(row: Mapping[str, Any]) -> bool:
    """Whether depths have fractions, and the number of trials is a count; files may be edited."""
    fractions = [value for key, value in row.items() if _is_depth(key)]
    trials = row.get("trials", 1)
    return (
        bool(fractions)
        and all(isinstance(value, (int, float)) and 0 <= value <= 1 for value in fractions)
        and isinstance(trials, int)
        and 0 < trials < 10**9
    )
