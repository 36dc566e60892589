#!/usr/bin/env python3
"""Checks on one GPU, in five minutes, that what Ranvier computes there is right.

    python scripts/gpu_check.py                # all parts; appends a row to gpu_checks.csv
    python scripts/gpu_check.py --only serve   # one part or several (a,b), at most 45 s each
    python scripts/gpu_check.py --list         # the parts
    python scripts/gpu_check.py --differing    # what changed in src/ranvier since the last row
    python scripts/gpu_check.py --device cpu   # the parts that make sense there, for debugging

The parts are functions of `gpu_check_parts.py`. Each runs a feature in a tiny shape and compares
losses, every gradient, weights or tokens with formulas in float64 on the CPU. Worker processes take
parts from a queue; compilers start with empty caches, and a failure to compile is a failure of the
part. A part that takes longer than its limit is killed. The exit status is 1 if any part fails.

A complete run appends a row with the versions, the results and the git hash of each folder of, and
each file directly in, `src/ranvier`. Hashes are computed from the files, so a copy without `.git`
has the same. Only the standard library is imported here: `--differing` takes no time.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import datetime
import importlib.util
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from source_hashes import SOURCE, source_hashes

ROOT = Path(__file__).resolve().parents[1]
ROWS = ROOT / "benchmarks" / "data" / "gpu_checks.csv"
WORKER_PROGRAM = ROOT / "scripts" / "gpu_check_parts.py"
PAGE = ROOT / "docs" / "contributing" / "gpu-check.md"
COLUMNS = (
    *("date", "device", "torch", "triton", "cuda", "python", "transformers"),
    *("seconds", "passed", "failed", "results", "hashes"),
)
"""`results` has `part=worst error:seconds`, `hashes` has `name=hash`, both separated by spaces."""
NUM_WORKERS = 5
START_LIMIT = 120.0
"""Seconds in which a worker has imported everything."""
NEEDED_PACKAGES = ("tyro", "rich", "uvicorn", "starlette", "prometheus_client")
"""Packages of the commands that parts start, which fail one by one without them."""
LOG_LINES = 25
"""Lines of a worker's output that are printed after a failure."""


# ---- rows ----------------------------------------------------------------------------------------


def read_last_row(path: Path) -> dict[str, str]:
    """Returns the last row of the table; empty if there is none."""
    if not path.is_file():
        return {}
    with path.open(encoding="utf-8", newline="") as file:
        rows = [*csv.DictReader(file)]
    return rows[-1] if rows else {}


def append_row(path: Path, row: dict[str, str]) -> None:
    """Appends a row, after the header if the file is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    is_new = not path.is_file() or path.stat().st_size == 0
    with path.open("a", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerow(row)


def parse_pairs(text: str) -> dict[str, str]:
    """Returns the pairs of a packed column, `name=value name=value`."""
    return dict(pair.split("=", 1) for pair in text.split())


def find_differing(path: Path = ROWS, package: Path = SOURCE) -> list[str]:
    """Returns the folders and files of the package that differ from those of the last row."""
    checked = parse_pairs(read_last_row(path).get("hashes", ""))
    present = source_hashes(package)
    return sorted(
        name for name in checked.keys() | present.keys() if checked.get(name) != present.get(name)
    )


def describe_differing(path: Path = ROWS, package: Path = SOURCE) -> str:
    """Returns which folders have changed since the last check, as a line."""
    row = read_last_row(path)
    if not row:
        return f"No GPU check is recorded in {path.name}. Run: python scripts/gpu_check.py"
    last = f"the GPU check of {row['date']} ({row['passed']} passed, {row['failed']} failed)"
    names = find_differing(path, package)
    if not names:
        return f"src/ranvier is what {last} has run."
    return f"Changed since {last}: {', '.join(names)}"


def page_block(row: dict[str, str]) -> str:
    """Returns the last row as the Markdown table of the page."""
    if not row:
        return "No check is recorded yet."
    head = (
        f"{row['date']}, {row['device']}, torch {row['torch']}, Triton {row['triton']}, "
        f"CUDA {row['cuda']}, Python {row['python']}, transformers {row['transformers']}: "
        f"{row['passed']} parts passed and {row['failed']} failed, in {row['seconds']} s "
        "([all rows](../../benchmarks/data/gpu_checks.csv))."
    )
    lines = [head, "", "| Part | Worst error, as a share of its bound | Seconds |", "|---|---|---|"]
    for part, result in parse_pairs(row["results"]).items():
        error, _, seconds = result.rpartition(":")
        lines.append(f"| {part} | {error} | {seconds} |")
    return "\n".join(lines)


BEGIN, END = "<!-- gpu check -->", "<!-- end of gpu check -->"


def page_with_row(text: str, row: dict[str, str]) -> str:
    """Returns the text of the page with the table of a row."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{page_block(row)}\n\n{END}{after}"


def write_page() -> None:
    """Writes the last row into the page of the documentation."""
    PAGE.write_text(page_with_row(PAGE.read_text("utf-8"), read_last_row(ROWS)), "utf-8")


# ---- workers -------------------------------------------------------------------------------------


@dataclass
class PartResult:
    """What a part has found."""

    part: str
    seconds: float
    worst: float = 0.0
    """The largest error as a share of its bound; more than 1 is a failure."""
    where: str = ""
    """The comparison with that error, its error and its bound."""
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    """Why the part does not run on this device."""
    log: str = ""

    def describe(self) -> str:
        """Returns the line of the part."""
        if self.skipped:
            return f"{self.part:<20} skipped: {self.skipped}"
        verdict = "FAILED" if self.failures else "ok"
        return f"{self.part:<20} {verdict:<7} {self.seconds:6.1f} s   worst: {self.where or '-'}"


class Worker:
    """A process that runs one part after another."""

    def __init__(self, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=file,
                env=environment,
                text=True,
                start_new_session=True,
            )
        self.answers: queue.Queue[str] = queue.Queue()
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.answers.put(line)
        self.answers.put("")

    def receive(self, timeout: float) -> dict[str, Any] | None:
        """Returns the next answer; None if the process has ended, raises `queue.Empty` if it
        takes too long."""
        line = self.answers.get(timeout=timeout)
        return json.loads(line) if line else None

    def ask(self, part: str, timeout: float) -> dict[str, Any] | None:
        """Runs a part, and returns its answer as `receive` does."""
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(part + "\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            return None
        return self.receive(timeout)

    def read_log(self, start: int) -> str:
        """Returns the end of what was printed after byte `start`."""
        with self.log.open("rb") as file:
            file.seek(start)
            lines = file.read().decode(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES:])

    def kill(self) -> None:
        """Ends the process and all that it has started."""
        # Servers and ranks may have sessions of their own; they end with their parent.
        for pid in [*descendants(self.process.pid), self.process.pid]:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        # A process that was forked meanwhile may keep the pipe open.
        self.reader.join(5.0)
        if self.reader.is_alive():
            return
        for file in (self.process.stdin, self.process.stdout):
            # What was written to an ended process cannot be flushed.
            with contextlib.suppress(OSError):
                if file is not None:
                    file.close()


def python_path() -> str:
    """Returns where workers look for `ranvier`: first in the PYTHONPATH of the user.

    Parts start commands in other directories, where relative entries would be lost.
    """
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return os.pathsep.join([*map(os.path.abspath, entries), str(ROOT / "src")])


def missing_packages() -> list[str]:
    """Returns the packages that the check needs and this environment lacks."""
    return [name for name in NEEDED_PACKAGES if importlib.util.find_spec(name) is None]


def descendants(pid: int) -> list[int]:
    """Returns the processes that a process has started, directly or not."""
    children: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found = []
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), []):
            found.append(child)
            waiting.append(child)
    return found


class Run:
    """Parts that run on several workers, and what they have found."""

    def __init__(
        self,
        device: str,
        only: Sequence[str],
        workers: int,
        folder: Path,
        program: Path,
    ) -> None:
        """only: names of parts; all if empty. program: what a worker runs."""
        self.device, self.only, self.folder, self.program = device, only, folder, program
        self.num_workers = workers
        self.lock = threading.Lock()
        self.results: list[PartResult] = []
        self.workers: set[Worker] = set()
        self.parts: queue.Queue[dict[str, Any]] | None = None
        self.num_parts = 0
        self.versions: dict[str, str] = {}
        self.problem = ""
        """Why the run cannot begin."""
        self.is_stopped = False

    def environment(self) -> dict[str, str]:
        """Returns the environment of workers: empty caches, and compile errors are errors."""
        caches = self.folder / "caches"
        paths = {
            "TORCHINDUCTOR_CACHE_DIR": caches / "inductor",
            "TRITON_CACHE_DIR": caches / "triton",
            "RANVIER_CACHE": caches / "ranvier",
            "XDG_CACHE_HOME": caches / "other",
            # Removed with the folder of the run, also if a worker is killed.
            "TMPDIR": self.folder / "tmp",
        }
        for path in paths.values():
            path.mkdir(parents=True, exist_ok=True)
        threads = max((os.cpu_count() or 1) // self.num_workers, 1)
        return {
            **os.environ,
            **{name: str(path) for name, path in paths.items()},
            "PYTHONPATH": python_path(),
            "RANVIER_COMPILE_ERRORS": "raise",
            "TORCHINDUCTOR_COMPILE_THREADS": str(threads),
            "OMP_NUM_THREADS": str(min(threads, 4)),
        }

    def start(self, number: int) -> Worker | None:
        """Returns a worker that has imported everything; None if it cannot start."""
        command = [sys.executable, str(self.program), self.device]
        log = self.folder / f"worker-{number}.log"
        worker = Worker(command, self.environment(), log)
        with self.lock:
            self.workers.add(worker)
        try:
            hello = worker.receive(START_LIMIT)
        except queue.Empty:
            hello = None
        if hello is None:
            self.problem = f"A worker did not start.\n{worker.read_log(0)}"
            self.discard(worker)
            return None
        self.fill_queue(hello)
        return worker

    def discard(self, worker: Worker) -> None:
        """Ends a worker."""
        worker.kill()
        with self.lock:
            self.workers.discard(worker)

    def fill_queue(self, hello: dict[str, Any]) -> None:
        """Queues the parts that the first worker names, those that take longest first."""
        with self.lock:
            if self.parts is not None:
                return
            self.versions = hello["versions"]
            known = {part["name"]: part for part in hello["parts"]}
            unknown = [name for name in self.only if name not in known]
            if unknown:
                self.problem = (
                    f"--only {','.join(unknown)} is unknown. Known parts are {', '.join(known)}."
                )
            self.parts = queue.Queue()
            chosen = [known[name] for name in self.only if name in known] or [*known.values()]
            if not unknown:
                for part in sorted(chosen, key=lambda part: -part["seconds"]):
                    self.parts.put(part)
                self.num_parts = len(chosen)

    def serve_queue(self, number: int) -> None:
        """Runs parts on one worker until there is none left."""
        worker = self.start(number)
        while worker is not None and not self.is_stopped:
            assert self.parts is not None
            try:
                part = self.parts.get_nowait()
            except queue.Empty:
                break
            if part["skipped"]:
                self.report(PartResult(part["name"], 0.0, skipped=part["skipped"]))
                continue
            begin, logged = time.monotonic(), worker.log.stat().st_size
            reason = ""
            try:
                answer = worker.ask(part["name"], part["limit"])
            except queue.Empty:
                answer, reason = None, f"not finished after {part['limit']:.0f} s"
            seconds = time.monotonic() - begin
            if self.is_stopped:
                return
            if answer is None:
                worker.kill()
                code = worker.process.returncode
                failure = reason or f"the process ended with exit status {code}"
                log = worker.read_log(logged)
                self.report(PartResult(part["name"], seconds, failures=[failure], log=log))
                self.discard(worker)
                worker = self.start(number) if not self.parts.empty() else None
                continue
            result = PartResult(part["name"], seconds, **answer)
            if result.failures:
                result.log = worker.read_log(logged)
            self.report(result)
        if worker is not None:
            self.discard(worker)

    def report(self, result: PartResult) -> None:
        """Prints the line of a part, and remembers it."""
        with self.lock:
            self.results.append(result)
            print(f"[{len(self.results):>2}/{self.num_parts}] {result.describe()}", flush=True)
            for failure in result.failures:
                print(f"        {failure}", flush=True)
            if result.log:
                lines = result.log.splitlines()
                print("\n".join(f"      | {line}" for line in lines), flush=True)

    def run(self) -> list[PartResult]:
        """Runs all parts."""
        threads = [
            threading.Thread(target=self.serve_queue, args=(i,), daemon=True)
            for i in range(self.num_workers)
        ]
        for thread in threads:
            thread.start()
        try:
            while any(thread.is_alive() for thread in threads):
                time.sleep(0.1)
        finally:
            self.is_stopped = True
            for worker in [*self.workers]:
                self.discard(worker)
        return self.results

    def row(self, seconds: float) -> dict[str, str]:
        """Returns the row of the run."""
        ran = [result for result in self.results if not result.skipped]
        failed = [result for result in ran if result.failures]
        now = datetime.datetime.now(datetime.UTC)
        results = [
            f"{one.part}={'failed' if one.failures else f'{one.worst:.2g}'}:{one.seconds:.1f}"
            for one in sorted(ran, key=lambda result: result.part)
        ]
        hashes = [f"{name}={value}" for name, value in source_hashes().items()]
        return {
            "date": now.strftime("%Y-%m-%dT%H:%M:%SZ"),
            **self.versions,
            "seconds": f"{seconds:.0f}",
            "passed": str(len(ran) - len(failed)),
            "failed": str(len(failed)),
            "results": " ".join(results),
            "hashes": " ".join(hashes),
        }


@contextlib.contextmanager
def temporary_folder() -> Iterator[Path]:
    """A folder that is removed at the end, whatever processes may still write into it."""
    folder = Path(tempfile.mkdtemp(prefix="gpu-check-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def check(options: argparse.Namespace, out: IO[str]) -> int:
    """Runs the parts; returns the exit status."""
    only = [name for name in options.only.split(",") if name]
    begin = time.monotonic()
    num_workers = min(options.workers, len(only)) if only else options.workers
    with temporary_folder() as folder:
        run = Run(options.device, only, num_workers, folder, WORKER_PROGRAM)
        results = run.run()
        seconds = time.monotonic() - begin
        failed = [result.part for result in results if result.failures]
        skipped = [result.part for result in results if result.skipped]
        missing = run.num_parts - len(results)
        if run.problem:
            print(run.problem, file=out)
        print(
            f"{len(results) - len(failed) - len(skipped)} passed, {len(failed)} failed, "
            f"{len(skipped)} skipped, {missing} not run, in {seconds:.0f} s on "
            f"{run.versions.get('device', options.device)}"
            f"{': ' if failed else ''}{', '.join(failed)}",
            file=out,
        )
        if not results or missing or run.problem:
            return 1
        if only:
            print("A row is written only if all parts run.", file=out)
        elif options.device == "cpu" and options.output == ROWS:
            print("A row of a CPU is written only with --output.", file=out)
        else:
            append_row(options.output, run.row(seconds))
            print(f"Wrote a row to {options.output}", file=out)
            if options.output == ROWS:
                write_page()
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Returns the options."""
    found = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    found.add_argument("--only", default="", metavar="PART,...", help="run these parts, no row")
    found.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    found.add_argument("--workers", type=int, default=NUM_WORKERS, help="processes (default: 5)")
    found.add_argument("--output", type=Path, default=ROWS, help="table to append the row to")
    found.add_argument("--list", action="store_true", help="print the parts")
    found.add_argument(
        "--differing", action="store_true", help="print what has changed since the last row"
    )
    found.add_argument(
        "--page", action="store_true", help="write the last row into the page of the documentation"
    )
    return found


def main(words: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = parser().parse_args(words)
    if options.differing:
        print(describe_differing(options.output))
        return 0
    if options.page:
        write_page()
        return 0
    if options.list:
        command = [sys.executable, str(WORKER_PROGRAM), "--list"]
        return subprocess.call(command, env={**os.environ, "PYTHONPATH": python_path()})
    # A part that needs none of them runs without them.
    if not options.only and (missing := missing_packages()):
        print(
            f"{', '.join(missing)}: not installed. The check starts `ranvier train` and "
            "`ranvier serve`, which need them; nothing was run. Install: pip install -e '.[serve]'"
        )
        return 64
    # As Ctrl-C: `timeout` and job schedulers end a command with this signal.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return check(options, sys.stdout)
    except KeyboardInterrupt:
        print("Interrupted: no row is written.")
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
