"""Code: programs that a model writes, built and run against their tests.

A task is a line of JSON: task (its name), language, prompt (the beginning of the program), tests
(what follows it; in C a main that returns 0), and may have baseline (what a good model would say,
to be compared with) and stop (texts that end what the model says).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from ranvier.errors import DataError
from ranvier.eval.code import sandbox
from ranvier.eval.code.metrics import Sample
from ranvier.eval.code.sandbox import Language, Limits, Result
from ranvier.eval.jsonl import objects
from ranvier.eval.model_server import Served, Wish

STOPS: dict[str, tuple[str, ...]] = {
    "python": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint", "\nimport ", "\nfrom "),
    "c": ("\n}",),
}
"""What ends the function that a prompt has begun."""
CLOSES = {"python": "\n", "c": "\n}\n"}
"""What closes it."""
BASELINES = 3
"""Runs of a baseline, of which the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """A program to be written."""

    task: str
    language: str
    prompt: str
    tests: str
    baseline: str = ""
    stop: tuple[str, ...] = ()

    @property
    def stops(self) -> tuple[str, ...]:
        """What ends the model's part."""
        return self.stop or STOPS[self.language]

    def program(self, said: str) -> str:
        """The whole program."""
        closes = "\n" if self.stop else CLOSES[self.language]
        return f"{self.prompt}{said}{closes}\n{self.tests}\n"


@dataclass(frozen=True)
class Tried:
    """A program that a model wrote, and what became of it."""

    sample: Sample
    said: str
    why: str


def read(path: Path) -> list[Task]:
    """The tasks of a JSONL file."""
    tasks = list(_tasks(path))
    names = [task.task for task in tasks]
    twice = [name for name in names if names.count(name) > 1]
    if twice or not tasks:
        what = f"has task {twice[0]!r} twice" if twice else "holds no task"
        raise DataError(f"{path} {what}. Each line is a task with a name of its own. Mend it.")
    return tasks


def _tasks(path: Path) -> Iterator[Task]:
    needed = ("task", "language", "prompt", "tests")
    for number, line, value in objects(path, "Tasks"):
        row = value if isinstance(value, dict) else {}
        missing = [name for name in needed if not isinstance(row.get(name), str)]
        stop = row.get("stop", [])
        good = isinstance(stop, list) and all(isinstance(one, str) for one in stop)
        if missing or not good or not isinstance(row.get("baseline", ""), str):
            raise DataError(
                f"{path}:{number}: no task{f': {missing[0]} is missing' if missing else ''}. It "
                "has the texts task, language, prompt and tests, and may have baseline and a list "
                "stop. Mend the line."
            )
        if any("\ud800" <= char <= "\udfff" for char in json.dumps(row, ensure_ascii=False)):
            raise DataError(
                f"{path}:{number}: {line[:80]!r} has a lone surrogate (\\ud800 to \\udfff), which "
                "no text in UTF-8 has. Write the whole character. Mend the line."
            )
        if row["language"] not in get_args(Language):
            raise DataError(
                f"{path}:{number}: language={row['language']!r} cannot be run. Programs are in "
                f"{' or '.join(get_args(Language))}. Use one of these."
            )
        texts = {name: row[name] for name in needed}
        yield Task(**texts, baseline=row.get("baseline", ""), stop=tuple(stop))


def tried(
    served: Served,
    tasks: Sequence[Task],
    *,
    count: int,
    wish: Wish,
    length: int,
    limits: Limits | None = None,
    run: Callable[..., Result] = sandbox.run,
) -> tuple[list[Tried], tuple[str, ...]]:
    """`count` programs of each task, and the protection that was lacking.

    length: most tokens that the model looks at. Communicates: as `Served.generate`.
    """
    found, lacks = list[Tried](), dict[str, None]()
    for number, task in enumerate(tasks):
        prompt = served.words.encode(task.prompt) or [served.words.prefix]
        if len(prompt) + wish.count > length:
            raise DataError(
                f"Task {task.task!r} has a prompt of {len(prompt)} tokens and {wish.count} to "
                f"come, but the model looks at {length}. Both must fit. Use fewer --tokens."
            )
        base = _baseline(task, limits, run) if task.baseline else None
        mine = Wish(**{**asdict(wish), "stops": task.stops, "seed": wish.seed + number})
        texts = served.generate([prompt] * count, mine, f"writing {task.task}")
        for index, said in enumerate(texts):
            if served.progress is not None:
                served.progress(f"running {task.task}", index, count)
            result = run(task.language, task.program(said), limits)
            lacks |= dict.fromkeys(result.lacks)
            sample = Sample(
                task=task.task,
                built=result.built,
                passed=result.passed,
                seconds=result.seconds,
                baseline=base,
                sample=index,
            )
            found.append(Tried(sample, said, result.why))
    return found, tuple(lacks)


def _baseline(task: Task, limits: Limits | None, run: Callable[..., Result]) -> float:
    """Seconds of a task's own solution, which must pass."""
    program = task.program(task.baseline)
    results = [run(task.language, program, limits) for _ in range(BASELINES)]
    failed = [result for result in results if not result.passed]
    if failed:
        raise DataError(
            f"The baseline of task {task.task!r} fails: {failed[0].why}. Programs are compared "
            f"with it, so it must pass its tests. Mend it. It said: {failed[0].output[-300:]!r}"
        )
    return min(result.seconds for result in results)
