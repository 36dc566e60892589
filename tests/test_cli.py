"""The command line as a user types it: results, errors without traceback, ends of broken runs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ranvier.cli import main, parse
from ranvier.errors import PlanError
from ranvier.run import ModelConfig, Run, TrainConfig, load
from ranvier.train.trainer import claim

FAULT = """
import os
from ranvier.train import trainer
take = trainer.Trainer.step
def step(self, number):
    if self.grid.rank == 1 and number == 1:
        {action}
    return take(self, number)
trainer.Trainer.step = step
"""
BROKEN = """
from ranvier.comm import pairs, verbs
verbs.reduce_scatter = lambda x, axis, dim=0: verbs.Pending(pairs.take(x, axis, dim).clone())
"""


def ranvier(
    folder: Path, *words: str, patch: str = "", environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run the command in a folder; `patch` is code that every process runs first."""
    (folder / "sitecustomize.py").write_text(patch)
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-m", "ranvier", *words],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, **(environment or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def metrics(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


SMALL = ["--data.max-bytes", "50000", "--data.seq", "32", "--model.layers", "2"]


def test_any_grid_trains_to_the_same_losses(tmp_path: Path) -> None:
    words = ["train", *SMALL, "--train.steps", "5"]
    one = ranvier(tmp_path, *words, "--train.out", "one")
    assert one.returncode == 0, one.stderr
    grid = ["--nproc", "4", "--plan.col", "2", "--plan.depth", "2"]
    many = ranvier(tmp_path, *words, *grid, "--train.out", "many", "--train.trace", "True")
    assert many.returncode == 0, many.stderr
    a, b = metrics(tmp_path / "one"), metrics(tmp_path / "many")
    assert [row["loss"] for row in a] == pytest.approx([row["loss"] for row in b], abs=1e-4)
    assert [row["tokens"] for row in a] == [row["tokens"] for row in b]
    assert a[0]["loss"] > a[-1]["loss"]
    assert set(a[0]) >= {
        "step",
        "tokens",
        "loss",
        "lr",
        "grad_norm",
        "seconds",
        "tokens_per_second",
    }
    assert "hidden" in many.stdout and "reduce_scatter" in many.stdout
    trace = json.loads((tmp_path / "many" / "trace-rank3.json").read_text())
    assert len(trace["traceEvents"]) > 50
    assert load(tmp_path / "many" / "config.toml").plan.col == 2


def test_torchrun_environment_is_understood(tmp_path: Path) -> None:
    from ranvier.launch import free_port

    port = str(free_port())
    ranks = []
    for rank in ("0", "1"):
        environment = {
            "RANK": rank,
            "WORLD_SIZE": "2",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": port,
        }
        words = ["train", *SMALL, "--train.steps", "2", "--train.out", "run", "--plan.row", "2"]
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "ranvier", *words],
                cwd=tmp_path,
                env={**os.environ, **environment},
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    texts = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert "row 2" in texts[0] and texts[1] == ""
    assert len(metrics(tmp_path / "run")) == 2


def test_a_rank_that_raises_ends_all_with_its_message(tmp_path: Path) -> None:
    start = time.monotonic()
    patch = FAULT.format(action="raise RuntimeError('disk on fire')")
    words = ["train", *SMALL, "--nproc", "2", "--plan.row", "2", "--train.out", "run"]
    end = ranvier(tmp_path, *words, patch=patch)
    assert end.returncode == 70
    assert "rank 1: " in end.stderr and "disk on fire" in end.stderr
    assert "CommunicationError" not in end.stderr, (
        "the broken connection of rank 0 is not the cause"
    )
    assert time.monotonic() - start < 30
    assert len(metrics(tmp_path / "run")) == 1


def test_a_rank_that_is_killed_ends_all(tmp_path: Path) -> None:
    patch = FAULT.format(action="os.kill(os.getpid(), 9)")
    words = ["train", *SMALL, "--nproc", "2", "--plan.depth", "2", "--train.out", "run"]
    end = ranvier(tmp_path, *words, patch=patch)
    assert end.returncode not in (0, 1, 2), end.stderr
    assert "Traceback" not in end.stderr and end.stderr.strip()


def test_verify_passes_on_grids_and_fails_on_a_broken_collective(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(
        '[model]\nsize = "llama3-8b"\nkv_heads = 1\nvocab = 128259\nbias = true\n'
        "[plan]\nrow = 2\nbatch = 8\n"
    )
    good = ranvier(tmp_path, "verify", "run.toml")
    assert good.returncode == 0, good.stdout + good.stderr
    assert "verified: the grid equals one process" in good.stdout
    assert "32 heads, 1 kv heads" in good.stdout and "all as predicted" in good.stdout
    assert "vocab 25," in good.stdout  # 128259 and 25 are odd
    bad = ranvier(tmp_path, "verify", "run.toml", patch=BROKEN)
    assert bad.returncode == 1
    assert "DIFFERS" in bad.stdout and "FAILED" in bad.stdout


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fly"], "'fly' is no verb. Verbs are train, verify"),
        (["train", "--plan.row", "4"], "needs a multiple of 4 ranks, but 1 is there"),
        (["train", "--plan.pipe", "2", "--nproc", "2"], "pipe=2: the pipe axis has no runtime yet"),
        (["train", "--model.size", "llama9"], "model.size='llama9' is not known"),
        (["train", "--model.vocab", "100"], "smaller than the 257 tokens"),
        (["train", "missing.toml"], "missing.toml cannot be read"),
        (["train", "bad.toml"], "plan.rwo is not a setting. Did you mean 'row'?"),
        (["train", "--plan.rwo", "2"], "plan.row"),
        (["train", "--data.seq", "0"], "data.seq=0 is too small"),
        (["train", "--nproc", "-1"], "nproc=-1, but none are started yet"),
        (["verify", "--nproc", "-1"], "nproc=-1, but none are started yet"),
        (["train", "--model.kv-heads", "0"], "model.kv_heads=0 is too small"),
        (["train", "--optim.beta1", "1.0"], "optim.beta1=1.0 is no share"),
        (["train", "--optim.warmup", "-5"], "optim.warmup=-5 is too small"),
        (["train", "--train.backend", "nccl"], "nccl needs CUDA devices"),
    ],
)
def test_mistakes_end_with_one_message(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    says: str,
) -> None:
    (tmp_path / "bad.toml").write_text("[plan]\nrwo = 2\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        main(words)
    text = "".join(capsys.readouterr())
    assert end.value.code in (64, 65), text
    assert says in text and "Traceback" not in text
    assert list(tmp_path.iterdir()) == [tmp_path / "bad.toml"], "nothing was begun"


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    words = ["--plan.row", "3", "--plan.col", "5", "--plan.context", "2", "--data.seq", "32"]
    end = ranvier(tmp_path, "train", "--nproc", "30", *words)
    assert end.returncode == 64
    for part in ("context=2", "heads=8", "embed=192", "seq=32", "micro_batch=8"):
        assert part in end.stderr, end.stderr


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--help"], ["train", "--help"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 0
    text = capsys.readouterr().out
    assert "usage: ranvier VERB" in text and "--plan.row" in text and "Megatron" in text


def test_the_last_size_counts_and_a_file_keeps_its_other_settings(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('[model]\nsize = "gpt2"\nlayers = 3\n')
    run = parse("train", ["--model.size", "gpt2", "--model.size", "tiny"])
    assert run.model == ModelConfig.of("tiny")
    run = parse("train", [str(tmp_path / "run.toml"), "--model.size", "tiny"])
    assert (run.model.embed, run.model.layers) == (ModelConfig.of("tiny").embed, 3)


def test_runs_claim_directories_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [claim(Run()) for _ in range(3)] == ["runs/tiny", "runs/tiny-2", "runs/tiny-3"]
    (tmp_path / "runs/tiny/metrics.jsonl").touch()
    with pytest.raises(PlanError, match="holds a run already"):
        claim(Run(train=TrainConfig(out="runs/tiny")))


def test_a_run_that_cannot_write_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    end = ranvier(tmp_path, "train", *SMALL, "--train.out", "file")
    assert end.returncode == 73 and "Traceback" not in end.stderr
    assert "File exists" in end.stderr and "choose another train.out" in end.stderr
