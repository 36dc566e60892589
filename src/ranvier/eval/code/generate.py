"""Code generation: programs written by a model, built and run against their tests.

A task is a line of JSON with task (its name), language, prompt (the beginning of the program) and
tests (the code after it; in C a main that returns 0). Optional are baseline (a good completion, for
comparison) and stop (strings that end the completion).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import get_args

from ranvier.errors import DataError
from ranvier.eval.code import sandbox
from ranvier.eval.code.metrics import CodeSample
from ranvier.eval.code.sandbox import Language, SandboxLimits, SandboxResult
from ranvier.eval.jsonl import read_json_lines
from ranvier.eval.model_server import GenerationConfig, ModelServer

STOP_STRINGS: dict[str, tuple[str, ...]] = {
    "python": ("\nclass ", "\ndef ", "\n#", "\n@", "\nif ", "\nprint", "\nimport ", "\nfrom "),
    "c": ("\n}",),
}
"""Strings that end the function that a prompt begins, by language."""
CLOSING_TEXT = {"python": "\n", "c": "\n}\n"}
"""Text that closes that function."""
BASELINE_RUNS = 3
"""Number of runs of a baseline; the fastest counts."""


@dataclass(frozen=True, kw_only=True)
class CodeTask:
    """A programming task."""

    task: str
    language: str
    prompt: str
    tests: str
    baseline: str = ""
    stop: tuple[str, ...] = ()

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """Strings that end the completion."""
        return self.stop or STOP_STRINGS[self.language]

    def build_program(self, completion: str) -> str:
        """Returns the whole program: prompt, completion and tests."""
        # A task with its own stop strings is expected to close the function itself.
        if self.stop:
            closes = "\n"
        else:
            closes = CLOSING_TEXT[self.language]
        return f"{self.prompt}{completion}{closes}\n{self.tests}\n"


@dataclass(frozen=True)
class Attempt:
    """A program that a model wrote, and its outcome."""

    sample: CodeSample
    completion: str
    failure: str


def read_tasks(path: Path) -> list[CodeTask]:
    """Returns the tasks of a JSONL file."""
    tasks = list(_parse_tasks(path))
    names = [task.task for task in tasks]
    twice = [name for name in names if names.count(name) > 1]
    if twice or not tasks:
        if twice:
            what = f"has task {twice[0]!r} twice"
        else:
            what = "has no tasks"
        raise DataError(
            f"{path} {what}. Each line must be a task with a unique name. Fix the file."
        )
    return tasks


def _parse_tasks(path: Path) -> Iterator[CodeTask]:
    needed = ("task", "language", "prompt", "tests")
    for number, line, value in read_json_lines(path, "Tasks"):
        if isinstance(value, dict):
            row = value
        else:
            row = {}
        missing = [name for name in needed if not isinstance(row.get(name), str)]
        stop = row.get("stop", [])
        good = isinstance(stop, list) and all(isinstance(one, str) for one in stop)
        if missing or not good or not isinstance(row.get("baseline", ""), str):
            raise DataError(
                f"{path}:{number}: {line[:80]!r} is not a valid task"
                f"{f': {missing[0]} is missing' if missing else ''}. A task has the strings task, "
                "language, prompt and tests, and optionally baseline and a list stop. Fix the line."
            )
        # JSON can escape lone surrogates, which would later fail to encode as UTF-8.
        if any("\ud800" <= char <= "\udfff" for char in json.dumps(row, ensure_ascii=False)):
            raise DataError(
                f"{path}:{number}: {line[:80]!r} has a lone surrogate (\\ud800 to \\udfff), which "
                "is not valid UTF-8. Write the whole character. Fix the line."
            )
        if row["language"] not in get_args(Language):
            raise DataError(
                f"{path}:{number}: language={row['language']!r} is not supported. Supported "
                f"languages are {' and '.join(get_args(Language))}. Use one of them."
            )
        texts = {name: row[name] for name in needed}
        yield CodeTask(**texts, baseline=row.get("baseline", ""), stop=tuple(stop))


def attempt_tasks(
    served: ModelServer,
    tasks: Sequence[CodeTask],
    *,
    count: int,
    wish: GenerationConfig,
    length: int,
    limits: SandboxLimits | None = None,
    run: Callable[..., SandboxResult] = sandbox.run_program,
) -> tuple[list[Attempt], tuple[str, ...]]:
    """Generates and runs `count` programs per task; also returns the missing guards.

    length: maximum context of the model. Communicates: as `ModelServer.generate`.
    """
    found = list[Attempt]()
    # A dict as an ordered set: each missing guard is reported once.
    lacks = dict[str, None]()
    for number, task in enumerate(tasks):
        prompt = served.tokenizer.encode(task.prompt) or [served.tokenizer.prefix_token_id]
        if len(prompt) + wish.max_new_tokens > length:
            raise DataError(
                f"Task {task.task!r} has a prompt of {len(prompt)} tokens and generates "
                f"{wish.max_new_tokens}, but the maximum length is {length}. Both must fit. "
                "Use a smaller --max-new-tokens."
            )
        if task.baseline:
            base = _time_baseline(task, limits, run)
        else:
            base = None
        # Samples are numbered from 0 in each task; with one seed, all tasks would use the same
        # random numbers.
        mine = GenerationConfig(
            **{**asdict(wish), "stops": task.stop_strings, "seed": wish.seed + number}
        )
        texts = served.generate([prompt] * count, mine, f"writing {task.task}")
        for index, said in enumerate(texts):
            if served.progress is not None:
                served.progress(f"running {task.task}", index, count)
            result = run(task.language, task.build_program(said), limits)
            lacks |= dict.fromkeys(result.missing_guards)
            sample = CodeSample(
                task=task.task,
                built=result.built,
                passed=result.passed,
                seconds=result.seconds,
                baseline=base,
                sample=index,
            )
            found.append(Attempt(sample, said, result.failure))
    return found, tuple(lacks)


def _time_baseline(
    task: CodeTask, limits: SandboxLimits | None, run: Callable[..., SandboxResult]
) -> float:
    """Returns the seconds of a task's own solution, which must pass."""
    program = task.build_program(task.baseline)
    results = [run(task.language, program, limits) for _ in range(BASELINE_RUNS)]
    failed = [result for result in results if not result.passed]
    if failed:
        raise DataError(
            f"The baseline of task {task.task!r} fails: {failed[0].failure}. Programs are compared "
            "with it, so it must pass its tests. Fix it. Its output ends with: "
            f"{failed[0].output[-300:]!r}"
        )
    return min(result.seconds for result in results)
