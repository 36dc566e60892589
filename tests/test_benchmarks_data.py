"""Raw rows of the benchmark pages: the CSV files that pages link are there, whole and described."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

import picture

ROOT = Path(__file__).parent.parent
DATA = ROOT / "benchmarks" / "data"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
LINK = re.compile(r"\]\(([^)\s]*benchmarks/data/[^)\s]+)\)")


def linked_files(page: Path) -> list[Path]:
    return [(page.parent / link).resolve() for link in LINK.findall(page.read_text("utf-8"))]


def find_problems(path: Path) -> list[str]:
    """What is wrong with a CSV file: no rows, a column without a name or twice, a ragged row."""
    with path.open(encoding="utf-8", newline="") as file:
        header, *rows = [*csv.reader(file)] or [[]]
    problems = []
    if not rows:
        problems.append("no rows")
    if not all(header) or len(set(header)) < len(header):
        problems.append(f"columns {header}")
    for number, row in enumerate(rows, 2):
        if len(row) != len(header):
            problems.append(f"line {number} has {len(row)} cells instead of {len(header)}")
    return problems


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_linked_files_exist(page: Path) -> None:
    assert [str(path) for path in linked_files(page) if not path.is_file()] == []


@pytest.mark.parametrize("path", sorted(DATA.glob("*.csv")), ids=lambda path: path.stem)
def test_a_file_is_whole_linked_and_described(path: Path) -> None:
    assert find_problems(path) == []
    assert f"`{path.name}`" in (DATA / "README.md").read_text("utf-8")
    assert path.name == "hardware.csv" or any(path in linked_files(page) for page in PAGES)


def test_problems_are_found(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("a,b,a\n1,2\n")
    assert find_problems(path) == ["columns ['a', 'b', 'a']", "line 2 has 2 cells instead of 3"]
    path.write_text("")
    assert find_problems(path) == ["no rows"]


def test_the_picture_has_the_ratios_of_the_data() -> None:
    assert picture.main(["--check"]) == 0, "Run: python scripts/picture.py"
