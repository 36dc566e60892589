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

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "scripts"))


@cache
def package_hash(package: Path = ROOT / "src" / "ranvier") -> str:
    """Returns the git hash of a package, 40 hex digits."""
    from source_hashes import tree_hash

    return tree_hash(package)


def append_rows(path: Path, columns: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Appends rows to a file; a new one begins with the names of the columns."""
    is_new = not path.exists()
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, columns, lineterminator="\n", restval="")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)
