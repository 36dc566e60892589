"""Offline batches: what is written, what is skipped, and what survives an interruption."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from infer.fake_engine import FakeEngine
from infer.fake_server import write_model
from ranvier.errors import DataError, PlanError, WriteError
from ranvier.infer import batch
from ranvier.infer.batch import AnswerFile, BatchRunner, check_batch, read_batch
from ranvier.infer.detokenizer import IncrementalDetokenizer
from ranvier.infer.server.served_model import ServedModel, read_model_directory

DEFAULTS: dict[str, Any] = {"max_tokens": 6, "temperature": 1.0, "seed": 3}
LINES: list[Any] = [
    {"prompt": "abc"},
    {"messages": [{"role": "user", "content": "SAY:Good.|"}], "id": "chat", "max_tokens": 50},
    {"tokens": [65, 66], "max_tokens": 3, "id": 7},
    {"prompt": "abc"},
    {"prompt": "SAY:one two|", "stop": "two", "max_tokens": 50},
]
BROKEN: list[Any] = [
    {"prompt": "a", "tokens": [1]},
    {},
    {"prompt": "a", "temprature": 1},
    {"prompt": "a", "temperature": "hot"},
    {"prompt": "a", "n": 2},
    {"prompt": "a", "prompt_logprobs": 1},
    {"tokens": []},
    {"tokens": [10**6]},
    {"prompt": "x" * 9000},
    [],
]
PARTS = [
    *("prompt and tokens", "no prompt", "'temprature'", "temperature=", "n=2", "prompt_logprobs"),
    *("no token", "1000000", "9000 tokens", "JSON object", "not valid JSON", "UTF-8"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ServedModel:
    folder = write_model(tmp_path_factory.mktemp("model"))
    return read_model_directory(folder, IncrementalDetokenizer)


@pytest.fixture
def given(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f"{json.dumps(one)}\n" for one in LINES))
    return path


def answer(
    model: ServedModel, given: Path, out: Path, *, stop_after: int = 10**9, **changes: Any
) -> list[dict[str, Any]]:
    """Answers a file with a fake engine, at most so many lines, and returns the output."""
    defaults = {**DEFAULTS, **changes}
    answers = AnswerFile(out)
    try:
        progress = check_batch(read_batch(given, defaults), answers)
        runner = BatchRunner(FakeEngine(), model, answers, max_num_seqs=2, progress=progress)
        first = progress.num_done
        runner.run(
            read_batch(given, defaults),
            is_stopped=lambda: progress.num_done - first >= stop_after,
        )
    finally:
        answers.close()
    return [json.loads(line) for line in out.read_text().splitlines()]


def by_index(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    assert sorted(one["index"] for one in records) == list(range(len(records)))
    return sorted(records, key=lambda one: one["index"])


def test_lines_of_all_forms_are_answered(model: ServedModel, given: Path, tmp_path: Path) -> None:
    found = by_index(answer(model, given, tmp_path / "out.jsonl"))
    assert [one.get("id") for one in found] == [None, "chat", 7, None, None]
    assert found[1]["text"] == "Good." and found[1]["finish_reason"] == "stop"
    assert found[0]["finish_reason"] == "length" and len(found[0]["tokens"]) == 6
    assert found[2]["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "cached_tokens": 0}
    assert found[4]["text"] == "one " and found[4]["finish_reason"] == "stop"
    # The index selects the random numbers.
    assert found[0]["tokens"] != found[3]["tokens"]


def test_an_invalid_line_does_not_end_the_others(model: ServedModel, tmp_path: Path) -> None:
    lines = [json.dumps(one) for one in BROKEN] + ["{", "\udcff", json.dumps(LINES[0])]
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b"\n\n".join(line.encode(errors="surrogateescape") for line in lines))
    found = by_index(answer(model, path, tmp_path / "out.jsonl"))
    assert "error" not in found[-1] and found[-1]["text"]
    errors = [one["error"] for one in found[:-1]]
    for error, part in zip(errors, PARTS, strict=True):
        assert part in error, error
    assert [len(one) for one in found[:-1]] == [3] * len(errors), "index, error and digest"


@pytest.mark.parametrize("stop_after", [1, 2, 4])
def test_a_batch_continues_as_if_it_was_not_interrupted(
    model: ServedModel, given: Path, tmp_path: Path, stop_after: int
) -> None:
    whole = by_index(answer(model, given, tmp_path / "whole.jsonl"))
    out = tmp_path / "out.jsonl"
    first = answer(model, given, out, stop_after=stop_after)
    assert stop_after <= len(first) < len(LINES)
    # A crash in the middle of a line.
    for cut in (1, 9, 40):
        text = out.read_text()
        out.write_text(text + json.dumps(whole[0])[:cut])
        assert answer(model, given, out, stop_after=0) == first
    assert by_index(answer(model, given, out)) == whole
    before = out.read_bytes()
    answer(model, given, out)
    assert out.read_bytes() == before


def test_a_full_disk_loses_nothing(
    model: ServedModel, given: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = by_index(answer(model, given, tmp_path / "whole.jsonl"))
    out = tmp_path / "out.jsonl"
    written = []
    write = os.write

    def fill(file: int, data: bytes) -> int:
        written.append(data)
        if len(written) == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        # Only half of it fits at first.
        return write(file, data[: len(data) // 2 if len(written) == 3 else len(data)])

    with monkeypatch.context() as patch:
        patch.setattr(batch.os, "write", fill)
        with pytest.raises(WriteError, match="No space left on device"):
            answer(model, given, out)
    assert len([json.loads(line) for line in out.read_text().splitlines()]) == 2
    assert by_index(answer(model, given, out)) == whole


FOREIGN = ["some notes", '{"index": 0}\n', '{"text": "x"}\n{"index']


@pytest.mark.parametrize("text", FOREIGN)
def test_a_file_of_something_else_is_not_touched(
    model: ServedModel, given: Path, tmp_path: Path, text: str
) -> None:
    out = tmp_path / "out.jsonl"
    out.write_text(text)
    with pytest.raises(DataError, match="is not an answer of"):
        answer(model, given, out)
    assert out.read_text() == text


def test_other_parameters_or_lines_need_another_output(
    model: ServedModel, given: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    answer(model, given, out)
    with pytest.raises(DataError, match="with other parameters"):
        answer(model, given, out, seed=4)
    # Further lines are answered.
    given.write_text(given.read_text() + '{"prompt": "more"}\n')
    assert len(answer(model, given, out)) == len(LINES) + 1


def test_only_one_process_writes(tmp_path: Path) -> None:
    first = AnswerFile(tmp_path / "out.jsonl")
    with pytest.raises(PlanError, match="another process"):
        AnswerFile(tmp_path / "out.jsonl")
    first.close()
    AnswerFile(tmp_path / "out.jsonl").close()
    with pytest.raises(WriteError, match="cannot be written"):
        AnswerFile(tmp_path / "nowhere" / "out.jsonl")
