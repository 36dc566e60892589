"""Programs of tasks: read, written by a model, run, counted; and the verb around it all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from commands import call
from evaluation import trained
from pool import Pool
from ranvier.config.arguments import EvalOptions
from ranvier.errors import DataError, PlanError
from ranvier.eval import lm_eval_harness
from ranvier.eval import run as verb
from ranvier.eval.code import generate
from ranvier.eval.code.generate import attempt_tasks, read_tasks
from ranvier.eval.code.sandbox import SandboxResult, run_program
from ranvier.eval.model_server import GenerationConfig, ModelServer
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import Grid
from ranvier.infer.load import load_model

EXAMPLE = Path(__file__).parents[3] / "examples" / "code_tasks.jsonl"


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, tmp_path_factory.mktemp("run"))


@pytest.mark.full
def test_the_baselines_of_the_example_pass_and_their_like_do_not() -> None:
    tasks = read_tasks(EXAMPLE)
    assert [task.language for task in tasks].count("c") == 2 and len(tasks) == 5
    for task in tasks:
        found = run_program(task.language, task.build_program(task.baseline))
        assert found.passed, (task.task, found)
    wrong = run_program("python", tasks[0].build_program("    return a - b"))
    assert wrong.built and not wrong.passed


def written(grid: Grid, folder: str, path: str) -> list[tuple[str, bool, float | None, str]] | None:
    served = ModelServer(
        load_model(Path(folder), grid, "cpu"), EvalTokenizer.from_run(Path(folder)), 2
    )
    wish = GenerationConfig(max_new_tokens=6, temperature=1.0)

    def judged(language: str, program: str, limits: object) -> SandboxResult:
        return SandboxResult(
            True, "good" in program or "return" in program, 2.0, "", "", ("a lack",)
        )

    def work(served: ModelServer) -> list[tuple[str, bool, float | None, str]]:
        some, lacks = attempt_tasks(
            served, read_tasks(Path(path)), count=3, wish=wish, length=99, run=judged
        )
        assert lacks == ("a lack",)
        return [(t.sample.task, t.sample.passed, t.sample.baseline, t.completion) for t in some]

    return served.run_on_first_rank(work)


def test_a_model_writes_the_same_programs_on_every_grid(
    pool: Pool, folder: Path, tmp_path: Path
) -> None:
    lines = [
        {"task": "a", "language": "python", "prompt": "2 times", "tests": "", "baseline": "good"},
        {"task": "b", "language": "c", "prompt": "3 times 3", "tests": "good", "stop": [" "]},
    ]
    path = tmp_path / "tasks.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = []
    for degrees in ({"row": 1}, {"data": 2, "row": 2}):
        first, *others = pool.on_grid(degrees, written, str(folder), str(path))
        assert all(other is None for other in others)
        found.append(first)
    assert found[0] == found[1]
    assert [one[:3] for one in found[0]] == [("a", False, 2.0)] * 3 + [("b", True, None)] * 3
    assert len({one[3] for one in found[0]}) > 2, "samples differ"
    assert all(" " not in said for task, _, _, said in found[0] if task == "b")


def test_bad_tasks_are_named_by_their_line(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    good = {"task": "a", "language": "c", "prompt": "", "tests": ""}
    for change, said in (
        ({"tests": 3}, "tests is missing"),
        ({"language": "rust"}, "python and c"),
        ({"stop": "x"}, "a list"),
        ({"prompt": "\ud800"}, "lone surrogate"),
    ):
        path.write_text(json.dumps(good) + "\n" + json.dumps({**good, "task": "b", **change}))
        with pytest.raises(DataError, match=r"tasks.jsonl:2: ") as error:
            read_tasks(path)
        assert said in str(error.value)
    path.write_text(json.dumps({**good, "prompt": "a\u2028\u0085b"}, ensure_ascii=False))
    assert read_tasks(path)[0].prompt == "a\u2028\u0085b"
    path.write_text(f"{json.dumps(good)}\n{json.dumps(good)}\n")
    with pytest.raises(DataError, match="twice"):
        read_tasks(path)


def test_a_baseline_that_fails_is_refused(tmp_path: Path) -> None:
    task = generate.CodeTask(
        task="a", language="python", prompt="x = 1", tests="assert x == 2", baseline="0"
    )
    with pytest.raises(DataError, match="baseline of task 'a' fails: exit code 1"):
        generate._time_baseline(task, None, run_program)


def test_the_verb_says_keeps_and_refuses(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.txt").write_text("3 times 3 is 9, " * 5)
    words = ["--corpus", str(tmp_path / "a.txt"), "--data.seq-len", "8"]
    assert call("eval", str(folder), *words) == 0
    assert "perplexity" in capsys.readouterr().out
    known = json.loads((folder / "eval-3.json").read_text())
    (row,) = known["corpora"].values()
    assert row["tokens"] == 80 and row["bytes"] == 79 and row["perplexity"] > 1.0

    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text(
        json.dumps({"task": "t", "language": "python", "prompt": "x = (", "tests": ""})
    )
    words = [
        "--code",
        str(tasks),
        "--samples-per-task",
        "2",
        "--max-new-tokens",
        "3",
        "--pass-at-k",
        "1,2",
    ]
    assert call("eval", str(folder), *words) == 0
    known = json.loads((folder / "eval-3.json").read_text())
    assert known["corpora"] and known["code"]["pass"].keys() == {"1", "2"}
    assert (
        call("eval", "--samples-file", str(folder / "samples-3.jsonl"), "--pass-at-k", "1,2") == 0
    )
    assert "build" in capsys.readouterr().out

    for words, said in (
        ([str(folder)], "no evaluation"),
        ([str(folder), "--tasks", "a", "--code", "b"], "one evaluation at a time"),
        (["--code", str(tasks)], "Pass its RUN"),
        ([str(folder), "--samples-file", "x"], "does not use a model"),
        ([str(folder), "--code", str(tasks), "--pass-at-k", "9"], "--samples-per-task 9"),
        ([str(folder), "--corpus", str(tmp_path / "a.txt"), "--batch", "0"], "batch=0"),
        ([str(folder), "--corpus", str(tmp_path / "a.txt"), "--step", "7"], "of step 7"),
        ([str(folder), "--corpus", str(tmp_path / "a.txt"), "--stride", "99"], "stride=99"),
        ([str(tmp_path), "--tasks", "a"], "is not a run"),
        (
            [str(folder), "--tasks", "a", "--include", str(tmp_path / "no")],
            "no' is not a directory",
        ),
    ):
        assert call("eval", *words) in (64, 65), words
        assert said in capsys.readouterr().err, words


def test_lengths_and_names_are_refused_before_weights_are_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unknown(wanted: EvalOptions) -> None:
        raise PlanError(f"{lm_eval_harness.task_names(wanted)} are not known.")

    monkeypatch.setattr(lm_eval_harness, "build_task_manager", unknown)
    monkeypatch.setattr(verb, "load_model", lambda *_, **__: pytest.fail("weights were read"))
    learned = [
        "--model.position-embedding",
        "learned",
        "--model.max-seq",
        "32",
        "--data.seq-len",
        "32",
    ]
    for words, said in (
        ([*learned, "--max-length", "33"], "max_length=33, but the model has 32 learned positions"),
        ([*learned, "--max-length", "32"], "('a', 'b') are not known"),
        (["--max-length", "9999"], "('a', 'b') are not known"),
        (["--temperature", "2.1"], "temperature=2.1 is out of range. It must be in [0, 2]"),
        (["--top-p", "0"], "top_p=0.0 is out of range"),
    ):
        assert call("eval", str(folder), "--tasks", "a, b", *words) == 64, words
        assert said in capsys.readouterr().err, words


@pytest.mark.parametrize(
    ("guards", "lacks", "said", "warned"),
    [
        (("bubblewrap", "seccomp"), (), "isolated by bubblewrap, seccomp and limits", ""),
        (("seccomp",), ("no Landlock: files",), "bubblewrap (bwrap) is not installed", "Landlock"),
    ],
)
def test_protection_is_told_before_programs_run(
    guards: tuple[str, ...],
    lacks: tuple[str, ...],
    said: str,
    warned: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = SandboxResult(True, True, 0.1, "", "", lacks, guards)
    monkeypatch.setattr(verb.sandbox, "run_program", lambda language, program: found)
    assert verb._print_protection() == lacks
    out, err = capsys.readouterr()
    assert said in out and ("not installed" in out) == ("bubblewrap" not in guards)
    assert warned in err and bool(err) == bool(lacks)
