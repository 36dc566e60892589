"""Rows that scripts append to CSV files such as those in `benchmarks/data`.

A row says on which files of the package it was measured: `source` is the git hash of the folder
`src/ranvier`, computed from the files. `git rev-parse COMMIT:src/ranvier` prints that of a commit.
"""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from right_step import Check

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))


@cache
def package_hash(package: Path = ROOT / "src" / "ranvier") -> str:
    """Returns the git hash of a package, 40 hex digits."""
    from source_hashes import tree_hash

    return tree_hash(package)


def data_columns(name: str) -> list[str]:
    """Returns the columns of a file in `benchmarks/data`."""
    path = ROOT / "benchmarks" / "data" / name
    with path.open(encoding="utf-8", newline="") as file:
        return next(csv.reader(file))


def checked_cell(*checks: Check | None) -> str:
    """Returns the value of the column `checked`: yes if all contestants of a row have passed."""
    return "yes" if all(check is not None and check.passed for check in checks) else ""


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a file; a new one begins with the names of the columns."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
