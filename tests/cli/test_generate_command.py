"""`ranvier generate` as a command: a conversation through a pipe, and batches that are killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from commands import call
from infer.tiny_model import POSITIONS, write_tiny_model
from ranvier.errors import DataError

NUM_LINES = 12
BATCH = ("--max-new-tokens", "16", "--ignore-eos", "--engine.max-num-seqs", "2", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


def command(*words: object) -> list[str]:
    return [sys.executable, "-m", "ranvier", "generate", *map(str, words)]


def test_a_conversation_is_read_from_a_pipe(folder: Path) -> None:
    options = ("--temperature", 0, "--max-new-tokens", 6, "--device", "cpu")
    lines = ["Good morning.", "And now?", "/reset", "", "Good morning.", "/wrong", "/exit", "more"]
    found = subprocess.run(
        command(folder, "--chat", *options),
        input="\n".join(lines),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert found.returncode == 0, found.stderr
    start, first, second, reset, _, again, wrong = found.stdout.split("> ")[:7]
    assert start.startswith("Conversation with tiny") and "starts again" in reset
    # The same question has the same answer after a reset, and another one later in a conversation.
    assert first == again != second
    assert "'/wrong' is not a command" in wrong and "more" not in found.stdout
    assert "The answer ends after 6 tokens; see --max-new-tokens" in found.stderr


def read_answers(path: Path) -> list[dict[str, Any]]:
    """Complete answers in the order of their lines."""
    lines = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
    return sorted(map(json.loads, lines), key=lambda one: one["index"])


@pytest.mark.full
@pytest.mark.parametrize("axis", ["row", "context"])
def test_a_batch_on_a_grid_continues_after_it_was_killed(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], axis: str
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"prompt": "text {i}"}}\n' for i in range(NUM_LINES)))
    out, whole = tmp_path / "out.jsonl", tmp_path / "whole.jsonl"
    grid = ("--nproc", 2, f"--plan.{axis}", 2)
    words = (folder, "--input", prompts, "--output", out, *BATCH, *grid)
    process = subprocess.Popen(
        command(*words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    while process.poll() is None and not (out.exists() and out.read_bytes().count(b"\n") >= 2):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    text, _ = process.communicate(timeout=60)
    done = read_answers(out)
    assert 2 <= len(done) < NUM_LINES, text
    # On one rank: answers depend neither on the grid nor on the interruption.
    one_rank = map(str, words[:-4])
    assert call("generate", *one_rank) == 0
    assert f"of which {len(done)} were answered before" in capsys.readouterr().err
    assert call("generate", *(str(whole) if word == out else str(word) for word in words[:-4])) == 0
    assert read_answers(out) == read_answers(whole)
    assert all(one in read_answers(out) for one in done)
    assert {one["finish_reason"] for one in read_answers(out)} == {"length"}


def test_lines_that_do_not_fit_are_errors(folder: Path, tmp_path: Path) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out.jsonl"
    lines: list[dict[str, Any]] = [
        {"tokens": [5] * (POSITIONS - 4), "max_tokens": 5},
        {"tokens": [5] * (POSITIONS - 4), "max_tokens": 4, "ignore_eos": True},
    ]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    words = ("--input", str(prompts), "--output", str(out), "--device", "cpu")
    assert call("generate", str(folder), *words) == DataError.exit_code
    refused, answered = read_answers(out)
    assert "together 513. A sequence may have 512" in refused["error"]
    assert len(answered["tokens"]) == 4
