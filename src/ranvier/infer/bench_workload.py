"""The requests of a serving benchmark: when they are sent, their prompts and their lengths.

Everything follows from the options and the seed, so two runs send the same requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ranvier.config.arguments import BenchOptions
from ranvier.errors import DataError, PlanError

COMMON_WORDS = (
    "the of and to in a is that for it was on are as with his they at be this from have or by one "
    "had not but what all were when we there can an your which their if do will each about "
    "how up out them then she many some so these would other into has more her two like him see "
    "time could no make than first been its who now people my made over did down only way find use "
    "may water long little very after words called just where most know"
)
"""Words that are one token with most tokenizers."""
WORDS = tuple(COMMON_WORDS.split())
MAX_TOKENS = 10_000_000


@dataclass(frozen=True)
class BenchRequest:
    """One request of a benchmark."""

    start_seconds: float
    """When it is sent, after the first one."""
    body: Mapping[str, Any]
    """The JSON object that is sent, without the name of the model."""


def parse_length(name: str, text: str) -> tuple[str, tuple[float, ...]]:
    """Returns the distribution of lengths that a text describes: its kind and its numbers."""
    kind, *rest = text.split(":")
    if not rest:
        kind, rest = "fixed", [kind]
    counts = {"fixed": (1,), "uniform": (2,), "gamma": (1, 2), "exponential": (1,)}
    try:
        numbers = tuple(float(word) for word in rest)
    except ValueError:
        numbers = ()
    valid = kind in counts and len(numbers) in counts[kind]
    valid = valid and all(0 < number <= MAX_TOKENS for number in numbers)
    if not valid or (kind == "uniform" and numbers[0] > numbers[1]):
        raise PlanError(
            f"{name}={text!r} is not a length. It must be N, uniform:LOW:HIGH, gamma:MEAN:SHAPE or "
            f"exponential:MEAN, in tokens from 1 to {MAX_TOKENS}. Use gamma:512:2."
        )
    return kind, numbers


def draw_lengths(name: str, text: str, count: int, draw: np.random.Generator) -> np.ndarray:
    """Returns lengths of at least 1 token: int64 (count,)."""
    kind, numbers = parse_length(name, text)
    if kind == "fixed":
        values = np.full(count, numbers[0])
    elif kind == "uniform":
        values = draw.integers(int(numbers[0]), int(numbers[1]) + 1, count).astype(float)
    elif kind == "gamma":
        shape = numbers[1] if len(numbers) > 1 else 2.0
        values = draw.gamma(shape, numbers[0] / shape, count)
    else:
        values = draw.exponential(numbers[0], count)
    lengths: np.ndarray = np.clip(np.rint(values), 1, MAX_TOKENS).astype(np.int64)
    return lengths


def draw_starts(options: BenchOptions, count: int, draw: np.random.Generator) -> np.ndarray:
    """Returns the seconds at which requests are sent, from 0: float64 (count,)."""
    if options.rate == 0.0 or count == 0:
        return np.zeros(count)
    scale = 1.0 / (options.rate * options.burstiness)
    gaps = draw.gamma(options.burstiness, scale, count - 1)
    return np.concatenate([[0.0], np.cumsum(gaps)])


def build_workload(options: BenchOptions) -> list[BenchRequest]:
    """Returns the requests of a benchmark in the order in which they are sent."""
    draw = np.random.default_rng(options.seed)
    rows: list[Mapping[str, Any]] = []
    if options.dataset:
        rows = read_dataset(Path(options.dataset))
    count = options.requests
    starts = draw_starts(options, count, draw)
    inputs = draw_lengths("input_length", options.input_length, count, draw)
    outputs = draw_lengths("output_length", options.output_length, count, draw)
    prefixes = [
        _draw_tokens(options, options.prefix_length, draw) for _ in range(options.num_prefixes)
    ]
    requests = []
    for i in range(count):
        row = rows[i % len(rows)] if rows else {}
        prompt = row.get("prompt", row.get("messages"))
        if prompt is None:
            size = int(row.get("input_length", inputs[i]))
            tokens = [*prefixes[i % len(prefixes)], *_draw_tokens(options, size, draw)]
            prompt = tokens if options.prompts == "token_ids" else " ".join(map(str, tokens))
        length = int(row.get("max_tokens", row.get("output_length", outputs[i])))
        requests.append(BenchRequest(float(starts[i]), _request_body(options, prompt, length, i)))
    return requests


def _draw_tokens(options: BenchOptions, count: int, draw: np.random.Generator) -> Sequence[Any]:
    """Returns random token ids or words."""
    if options.prompts == "token_ids":
        found: list[int] = draw.integers(0, options.vocab, count).tolist()
        return found
    return [WORDS[i] for i in draw.integers(0, len(WORDS), count)]


def _request_body(options: BenchOptions, prompt: Any, length: int, index: int) -> dict[str, Any]:
    body: dict[str, Any] = {
        "max_tokens": length,
        "temperature": options.temperature,
        "seed": options.seed + index,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if options.ignore_eos:
        body["ignore_eos"] = True
    if options.endpoint == "completions":
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], dict):
            prompt = "\n".join(str(message.get("content", "")) for message in prompt)
        body["prompt"] = prompt
    elif isinstance(prompt, str):
        body["messages"] = [{"role": "user", "content": prompt}]
    else:
        body["messages"] = prompt
    return body


def read_dataset(path: Path) -> list[Mapping[str, Any]]:
    """Returns the objects of a JSONL file."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(
            f"{path} cannot be read: {reason}. --dataset is a JSONL file of requests. Check the "
            "path."
        ) from None
    rows: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            row = None
        if not isinstance(row, dict) or not _is_request(row):
            raise DataError(
                f"Line {number} of {path} is not a request. It must be a JSON object with prompt, "
                "messages or input_length, and lengths must be numbers of at least 1. Correct it."
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path} is empty. It must have at least one request. Add one.")
    return rows


def _is_request(row: Mapping[str, Any]) -> bool:
    lengths = [row[key] for key in ("max_tokens", "output_length", "input_length") if key in row]
    return any(key in row for key in ("prompt", "messages", "input_length")) and all(
        isinstance(value, int) and 1 <= value <= MAX_TOKENS for value in lengths
    )


def option_problems(options: BenchOptions) -> list[str]:
    """Returns what is wrong with the options, with rules and remedies."""
    problems = []
    for name, least in (
        ("requests", 1),
        ("concurrency", 0),
        ("prefix_length", 0),
        ("num_prefixes", 1),
        ("vocab", 1),
        ("warmup", 0),
    ):
        value = getattr(options, name)
        if not least <= value <= MAX_TOKENS:
            problems.append(
                f"{name}={value} is out of range. It must be from {least} to {MAX_TOKENS}. Use "
                f"{max(least, 1)}."
            )
    for name in ("rate", "burstiness", "timeout", "temperature"):
        value = getattr(options, name)
        zero = name in ("rate", "temperature")
        if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
            rule = "at least 0" if zero else "above 0"
            problems.append(f"{name}={value} is out of range. It must be {rule}. Use 1.")
    if options.prompts == "token_ids" and options.endpoint == "chat":
        problems.append(
            "prompts=token_ids cannot be sent to the endpoint chat. Messages are text. Use "
            "--endpoint completions."
        )
    for name in ("input_length", "output_length"):
        try:
            parse_length(name, getattr(options, name))
        except PlanError as error:
            problems += error.problems
    return problems
