"""Hooks of the documentation site: raw rows of the benchmarks become files of the site.

Pages link to the CSV files of the repository by a path, `../../benchmarks/data/x.csv`, which
works in a checkout. mkdocs knows only files below docs/, so these hooks add the CSV files to the
site as `benchmarks/data/x.csv` and point the links there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

DATA = Path(__file__).resolve().parents[1] / "benchmarks" / "data"
LINK = "](../../benchmarks/data/"


def on_files(files: Any, config: Any) -> Any:
    """Adds the CSV files to the files of the site."""
    from mkdocs.structure.files import File

    for path in sorted(DATA.glob("*.csv")):
        name = f"benchmarks/data/{path.name}"
        files.append(File.generated(config, name, abs_src_path=str(path)))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Points the links of benchmark pages to these files."""
    if not page.file.src_uri.startswith("benchmarks/"):
        return markdown
    return markdown.replace(LINK, "](data/")
