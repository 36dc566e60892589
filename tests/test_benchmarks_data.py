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


RATIO = re.compile(r"\*\*(\d+\.\d+)x\*\*")


def checked_ratios(path: Path) -> set[float] | None:
    """Ratios of rows whose contestants were checked; None if the file compares none."""
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    if "checked" not in rows[0]:
        return None
    cells = (row[key] for row in rows if row["checked"] == "yes" for key in row if "speedup" in key)
    return {float(cell) for cell in cells if cell}


def find_unchecked_ratios(text: str, folder: Path) -> list[str]:
    """Ratios of a table that are not those of checked rows of the CSV file that their row links."""
    problems = []
    for line in text.splitlines():
        for link in LINK.findall(line):
            known = checked_ratios((folder / link).resolve())
            quoted = [cell for cell in RATIO.findall(line) if known is not None]
            # As many digits as are quoted.
            problems += [
                f"{cell}x ({link})"
                for cell in quoted
                if not any(
                    f"{ratio:.{len(cell.partition('.')[2])}f}" == cell for ratio in known or ()
                )
            ]
    return problems


def test_the_readme_quotes_only_checked_ratios() -> None:
    assert find_unchecked_ratios((ROOT / "README.md").read_text("utf-8"), ROOT) == []


def test_unchecked_ratios_are_found(tmp_path: Path) -> None:
    folder = tmp_path / "benchmarks" / "data"
    folder.mkdir(parents=True)
    (folder / "rows.csv").write_text("peer,speedup,checked\na,1.062,yes\nb,1.31,\n")
    text = "| **{}x** the peer | [CSV](benchmarks/data/rows.csv) |"
    assert find_unchecked_ratios(text.format("1.06"), tmp_path) == []
    assert find_unchecked_ratios(text.format("1.31"), tmp_path) == [
        "1.31x (benchmarks/data/rows.csv)"
    ]


def test_the_picture_has_the_ratios_of_the_data() -> None:
    assert picture.main(["--check"]) == 0, "Run: python scripts/picture.py"
