"""Models of the Gemstones suite by width and depth, and the learning rate that goes with them."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch

from commands import SMALL_OPTIONS, call, metrics
from ranvier.config.kinds import named_model
from ranvier.config.run import RunConfig, run_from_tables
from ranvier.errors import PlanError
from ranvier.models import Decoder
from ranvier.models.config import find_model_size, gemstone_size

PUBLISHED_PARAMETERS = {
    "256x23": 48_377_600,
    "256x80": 104_440_064,
    # Three heads share one key/value head.
    "384x13": 66_758_784,
    "768x3": 103_814_400,
    "2560x8": 1_044_032_000,
    "3072x12": 2_007_837_696,
}


@pytest.mark.parametrize("shape", PUBLISHED_PARAMETERS)
def test_sizes_have_the_published_number_of_parameters(shape: str) -> None:
    with torch.device("meta"):
        model = Decoder(gemstone_size(f"gemstone-{shape}"))
    assert sum(x.numel() for x in model.parameters()) == PUBLISHED_PARAMETERS[shape]


def test_a_size_is_a_setting_of_a_run() -> None:
    run = run_from_tables({"model": {"size": "gemstone-640x5", "vocab": 256}})
    model = run.decoder
    assert (model.kind, model.size) == ("decoder", "gemstone-640x5")
    assert (model.embed, model.layers, model.mlp, model.vocab) == (640, 5, 2560, 256)
    assert (model.heads, model.kv_heads, model.head_dim, model.max_seq) == (5, 1, 128, 2048)
    assert model.init_std == 1 / math.sqrt(640) and not model.tie_embeddings
    assert named_model("gemstone-1024x28").dim_units["kv_heads"] == 4
    assert find_model_size("tiny") == find_model_size("tiny") is not None
    assert find_model_size("huge") is None


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("gemstone-300x8", "has the width 300. A width must be a multiple of 128"),
        ("gemstone-300x8", "Use gemstone-256x8."),
        ("gemstone-60x8", "Use gemstone-128x8."),
        ("gemstone-256", "named gemstone-WxD"),
        ("gemstone-256x0", "Use e.g. gemstone-256x23."),
        ("gemstone-256x99999", "at most 10,000 layers"),
        ("gemston-256x23", "gemstone-*"),
    ],
)
def test_other_shapes_are_refused(size: str, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        run_from_tables({"model": {"size": size}})
    assert words in str(caught.value)


def gemstone_run(**optim: object) -> RunConfig:
    return run_from_tables(
        {"model": {"size": "gemstone-256x16"}, "optim": {"lr_rule": "gemstone", **optim}}
    )


def test_the_rule_divides_by_width_and_root_of_depth() -> None:
    run = gemstone_run(lr=2.0)
    assert run.peak_lr == run.adamw_peak_lr == 2.0 / (256 * 4)
    # Resolving again must not divide again.
    again = run.check_and_resolve(1).check_and_resolve(1)
    assert (again.optim.lr, again.peak_lr) == (2.0, run.peak_lr)
    assert gemstone_run().peak_lr == 5.0 / (256 * 4)
    plain = run_from_tables({"model": {"size": "gemstone-256x16"}, "optim": {"lr": 2.0}})
    assert plain.peak_lr == 2.0


def test_the_rule_divides_the_rates_of_both_parts_of_matrix_optimizers() -> None:
    run = gemstone_run(name="muon", lr=3.0, adamw_lr=6.0)
    assert (run.peak_lr, run.adamw_peak_lr) == (3.0 / 1024, 6.0 / 1024)
    run = gemstone_run(name="jorge", lr=100.0)
    assert (run.peak_lr, run.adamw_peak_lr) == (100.0 / 1024, 5.0 / 1024)
    assert not [*run.find_problems()]


@pytest.mark.parametrize("name", ["sgd", "jorge"])
def test_an_optimizer_without_a_known_rate_needs_one(name: str) -> None:
    (problem,) = gemstone_run(name=name).find_problems()
    assert f"optim.name='{name}' and without optim.lr" in problem and "times 1024" in problem


def test_a_run_shows_stores_and_resumes_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    rule = ("--optim.lr-rule", "gemstone", "--optim.lr", "0.32", "--optim.warmup-steps", "1")
    words = ("train", *SMALL_OPTIONS, *rule, "--nproc", "1", "--train.output-dir", "run")
    assert call(*words, "--train.steps", "2") == 0
    rate = 0.32 / (32 * math.sqrt(2))
    out = capsys.readouterr().out
    assert f"learning rate: lr_eff 0.32 / (32 · sqrt(2)) = {rate:.4g}" in out
    assert f"lr {rate:g}, weight decay" in out
    config = (tmp_path / "run" / "config.toml").read_text()
    assert "lr = 0.32\n" in config and 'lr_rule = "gemstone"' in config
    assert metrics(tmp_path / "run")[0]["lr"] == pytest.approx(rate)
    assert call("train", "run", "--train.steps", "3") == 0
    assert "lr_eff 0.32" in capsys.readouterr().out
    rows = metrics(tmp_path / "run")
    # After one step of warm-up, the last of two steps is half way along the cosine.
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert rows[-1]["lr"] == pytest.approx(rate * (0.1 + 0.9 * 0.5))
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "finished"
