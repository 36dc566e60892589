"""Fine-tuning on conversations: the same on every grid, told at the start, asked at the end."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from commands import SMALL_OPTIONS, call, losses
from data.chats import CHATML, folder_of
from data.test_chats import corpus_of, talks
from pool import Pool
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.load import load_full_tensors
from ranvier.infer.generate import TextGenerator
from training import losses_of

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "sft.py"
FAST = [*SMALL_OPTIONS, "--nproc", "1", "--data.seq-len", "64"]
CHATS: dict[str, Any] = {
    "data__seq_len": 48,
    "data__truncate": "split",
    "data__validation_fraction": 0.0,
    "train__seed": 5,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", [{"data": 2, "row": 2}, {"depth": 2, "col": 2}], ids=str)
def test_a_grid_trains_on_answers_as_one_process_does(
    degrees: dict[str, int], pool: Pool, tmp_path: Path
) -> None:
    answers = [f"{n} " * (1 + 5 * (n % 7)) for n in range(24)]
    corpus = str(corpus_of(tmp_path, answers).folder)

    def trained(degrees: dict[str, int], name: str) -> tuple[list[float], dict[str, torch.Tensor]]:
        out = str(tmp_path / name)
        rows = pool.on_grid(degrees, losses_of, corpus, out, 4, "", CHATS)
        return rows[0], dict(
            load_full_tensors(find_checkpoints(tmp_path / name / "checkpoints")[-1])
        )

    one, weights = trained({}, "one")
    many, spread = trained(degrees, "many")
    assert torch.allclose(torch.tensor(one), torch.tensor(many), rtol=1e-12, atol=0.0)
    assert weights.keys() == spread.keys()
    for name, x in weights.items():
        assert (x - spread[name]).abs().max() <= 1e-9 * x.abs().max(), name


def test_a_run_tells_of_its_conversations_and_answers(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks(folder / "talks.jsonl")
    corpus = ["--data.sources", "talks.jsonl", "--data.validation-fraction", "0"]
    words = [*FAST, *corpus, "--train.steps", "3", "--train.output-dir", "run"]
    assert call("train", *words, "--data.truncate", "drop") == 0
    out = capsys.readouterr().out
    assert "24 conversations packed into" in out and "0 longer ones dropped" in out, out
    assert "ranvier generate run --chat 'YOUR QUESTION'" in out
    assert (
        call("generate", "run", "--chat", "q1", "--max-new-tokens", "3", "--temperature", "0") == 0
    )
    assert call("generate", "run", "--chat", "q1", "--prompt", "x") == 64
    # it goes on, but not with other targets
    assert call("train", "run", "--train.steps", "5", "--nproc", "1") == 0
    assert len(losses(folder / "run")) == 5
    assert call("train", "run", "--train.steps", "6", "--data.loss-on", "all", "--nproc", "1") == 66
    shutil.copytree("run", "bare")
    (folder / "bare" / "tokenizer_config.json").unlink()
    capsys.readouterr()
    assert call("generate", "bare", "--chat", "q1") == 65
    assert "no chat template" in capsys.readouterr().err


def test_a_run_knows_the_end_that_its_tokenizer_came_with(folder: Path) -> None:
    words = folder_of(folder / "words", CHATML)
    (words / "tokenizer_config.json").write_text('{"eos_token": "<|eot|>"}')
    (folder / "text.txt").write_text("some words " * 200)
    corpus = [
        "--data.sources",
        "text.txt",
        "--data.tokenizer",
        "words",
        "--data.validation-fraction",
        "0",
    ]
    rest = ["--model.vocab", "366", "--train.steps", "1", "--train.output-dir", "run"]
    assert call("train", *FAST, *corpus, *rest) == 0
    speaker = TextGenerator.from_run(folder / "run", "cpu")
    assert (
        speaker.tokenizer.token_names[speaker.tokenizer.eos_token_id] == "<|eot|>"
        and speaker.chat is None
    )


def test_prepare_and_show_know_conversations(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talks(folder / "talks.jsonl")
    folder_of(folder / "words", CHATML)
    words = ["talks.jsonl", "--tokenizer", "words", "--output"]
    assert call("data", "prepare", *words, "corpus") == 0
    assert call("data", "show", "corpus") == 0
    out = capsys.readouterr().out
    assert "    <|im_start|>assistant\n    «ab<|im_end|>»\n" in out, out
    assert call("data", "prepare", *words, "all", "--loss-on", "all") == 0
    assert "«<|im_start|>user" in capsys.readouterr().out
    (folder / "own.jinja").write_text("{{ messages[0].role.__class__.__mro__ }}")
    assert call("data", "prepare", *words, "own", "--chat-template", "own.jinja") == 77
    assert "own.jinja was stopped" in capsys.readouterr().err
    (folder / "text.txt").write_text("text")
    assert call("data", "prepare", "text.txt", *words, "both") == 64
    assert "talks.jsonl: chat" in capsys.readouterr().err


def example() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("sft_example", EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
def test_the_example_runs(folder: Path) -> None:
    right = example().main(["--out", "out", "--questions", "6", "--steps", "30"])
    assert right > 0.9
    speaker = TextGenerator.from_run(Path("out/run"), "cpu")
    with open("out/chats.jsonl", encoding="utf-8") as file:
        question, answer = (one["content"] for one in json.loads(file.readline())["messages"])
    said = "".join(speaker.answer_question(question, tokens=32, temperature=0.0, top_k=0, seed=0))
    assert said == answer
    assert (
        "".join(speaker.complete_prompt("", tokens=4, temperature=0.0, top_k=0, seed=0)) != answer
    )


@pytest.mark.full
def test_the_example_learns_most_of_its_questions(folder: Path) -> None:
    assert example().main([]) > 0.9
