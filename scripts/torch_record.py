"""Appends a row to `benchmarks/data/torch_versions.csv`: versions, results, and what was tested.

`scripts/other_torch.sh --record VERSION` calls it with the interpreter that ran the tests:

    python scripts/torch_record.py RESULTS.xml SECONDS [PYTEST OPTION ...]
"""

from __future__ import annotations

import argparse
import csv
import platform
import shlex
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from xml.etree import ElementTree

from source_hashes import SOURCE, source_hashes

RECORD = SOURCE.parents[1] / "benchmarks" / "data" / "torch_versions.csv"
COLUMNS = (
    "date",
    "torch",
    "transformers",
    "python",
    "passed",
    "failed",
    "skipped",
    "seconds",
    "selection",
    "sources",
)


def count_results(report: Path) -> dict[str, int]:
    """Returns the numbers of passed, failed and skipped tests of a JUnit report."""
    root = ElementTree.parse(report).getroot()
    suites = list(root.iter("testsuite"))
    tests, failures, errors, skipped = (
        sum(int(suite.get(name, 0)) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    )
    failed = failures + errors
    return {"passed": tests - failed - skipped, "failed": failed, "skipped": skipped}


def append_row(record: Path, results: dict[str, int], seconds: int, selection: str) -> None:
    """Appends a row; `sources` has the git hashes of the folders and files of src/ranvier.

    selection: options of pytest that chose the tests; empty for all tests of compiled code.
    """
    row = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": metadata.version("torch"),
        "transformers": metadata.version("transformers"),
        "python": platform.python_version(),
        **results,
        "seconds": seconds,
        "selection": selection,
        "sources": " ".join(f"{name}:{digest}" for name, digest in source_hashes(SOURCE).items()),
    }
    is_new = not record.exists()
    with record.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("results", type=Path, help="JUnit report of the tests")
    parser.add_argument("seconds", type=int, help="time of the tests")
    arguments, options = parser.parse_known_args()
    selection = shlex.join(options)
    append_row(RECORD, count_results(arguments.results), arguments.seconds, selection)


if __name__ == "__main__":
    main()
