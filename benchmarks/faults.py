"""Injects faults into real training processes: kills, signals, full disks, damaged files.

Usage: python benchmarks/faults.py [--only A5,C1] [--list] [--seed 0] [--keep] [--patience 1]

Each case starts `ranvier train` (two ranks by default), injects a fault, and compares the outcome
with the requirements: exit code, message, time, no process left behind, and losses and weights that
are bit-identical to an undisturbed run. Prints a table of all cases; the exit code is 1 if any of
them fails.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path

import fault_crashes
import fault_disks
import fault_files
import fault_inputs
import fault_signals
import torch
from fault_runs import CASES, PATIENCE, Case, Stage, UnableError, WrongError
from script_parser import ScriptParser

GROUPS = (fault_crashes, fault_signals, fault_disks, fault_files, fault_inputs)
"""Modules that add cases when they are imported."""


def wanted(names: str) -> list[Case]:
    """Returns the cases with these names or groups; all if none is named."""
    if not names:
        return CASES
    words = [word.strip() for word in names.split(",")]
    unknown = [w for w in words if not any(_named(case, w) for case in CASES)]
    if unknown:
        sys.exit(f"--only={names}: unknown case {', '.join(unknown)}. See --list.")
    return [case for case in CASES if any(_named(case, word) for word in words)]


def _named(case: Case, word: str) -> bool:
    return word in (case.name, case.name.split()[0], case.name[0])


def played(case: Case, root: Path, seed: int) -> tuple[str, str]:
    """Returns the verdict of a case, and what happened."""
    stage = Stage(root / case.name.replace(" ", "-"), root, seed)
    try:
        return "pass", case.play(stage)
    except UnableError as error:
        return "unable", str(error)
    except WrongError as error:
        return "FAIL", str(error)
    except Exception:
        return "FAIL", traceback.format_exc()


def table(results: list[tuple[Case, str, str]]) -> str:
    """Returns all results, one line each."""
    lines = ["| case | fault | expected | result | |", "|---|---|---|---|---|"]
    for case, verdict, words in results:
        short = " ".join(words.split())[:160].replace("|", "/")
        lines.append(f"| {case.name} | {case.done} | {case.expected} | {short} | {verdict} |")
    return "\n".join(lines)


def main() -> int:
    parser = ScriptParser(__doc__, smoke="--only D16")
    parser.add_argument("--only", default="", help="names or groups of cases, e.g. A5,C")
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", action="store_true", help="keep the directories of the runs")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on time limits")
    options = parser.parse_args()
    PATIENCE[0] = options.patience
    cases = wanted(options.only)
    if options.list:
        print("\n".join(f"{case.name:16} {case.done}: {case.expected}" for case in cases))
        return 0
    torch.set_num_threads(1)  # the cores are for the ranks
    root, began = Path(tempfile.mkdtemp(prefix="faults-")), time.monotonic()
    results: list[tuple[Case, str, str]] = []
    try:
        for case in cases:
            start = time.monotonic()
            verdict, words = played(case, root, options.seed)
            results.append((case, verdict, words))
            seconds = time.monotonic() - start
            print(
                f"{case.name:16} {verdict:6} {seconds:5.1f} s  {case.done}: {words[:1200]}",
                flush=True,
            )
    finally:
        if options.keep:
            print(f"The runs are in {root}")
        else:
            shutil.rmtree(root, ignore_errors=True)
    print(f"\n{table(results)}\n")
    counts = Counter(verdict for _, verdict, _ in results)
    minutes = (time.monotonic() - began) / 60.0
    print(f"{dict(counts)} in {minutes:.1f} minutes, seed {options.seed}")
    return int(counts["FAIL"] > 0)


if __name__ == "__main__":
    sys.exit(main())
