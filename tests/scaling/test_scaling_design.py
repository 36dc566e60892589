"""Designs of runs: their budget, their files, and how well their losses determine a law."""

from __future__ import annotations

from pathlib import Path

import pytest

from commands import call
from ranvier.config.run import load_run_config
from ranvier.errors import PlanError
from ranvier.planner.cluster import load_cluster
from ranvier.scaling.cluster_time import ClusterTimeCost, fitting_micro_batch, predict_shape
from ranvier.scaling.design import (
    CHINCHILLA,
    PRIOR_LAWS,
    DesignedRun,
    design_runs,
    equally_spaced_runs,
    exponent_variance,
)
from ranvier.scaling.design_files import plan_design
from ranvier.scaling.flops import FlopShape

BUDGET = 1e17


@pytest.fixture(scope="module")
def designed() -> list[DesignedRun]:
    return design_runs(6, BUDGET)


def test_a_design_spends_the_budget_on_different_shapes(designed: list[DesignedRun]) -> None:
    assert sum(run.flops for run in designed) == pytest.approx(BUDGET)
    assert len({run.size for run in designed}) == 6
    assert len({run.width for run in designed}) > 2 and len({run.depth for run in designed}) > 2
    assert all(run.tokens > run.parameters for run in designed)


def test_a_design_determines_the_exponent_better(designed: list[DesignedRun]) -> None:
    spaced = equally_spaced_runs(designed, BUDGET)
    assert sum(run.flops for run in spaced) == pytest.approx(BUDGET)
    for law in PRIOR_LAWS:
        assert exponent_variance(law, designed) < 0.8 * exponent_variance(law, spaced)
    # Runs of one size say nothing about it.
    assert exponent_variance(CHINCHILLA, designed[:1] * 6) == float("inf")


def test_the_files_of_a_design_load_and_add_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text('[model]\nvocab = 4096\n\n[data]\nsources = ["my.jsonl"]\n')
    words = ("--design", "6", "--budget", "1e17", "--cluster", "dgx-h100", "--base", "base.toml")
    assert call("scaling-laws", *words, "--output", "runs-to-train") == 0
    out = capsys.readouterr().out
    assert "Hours are predicted for one device of dgx-h100" in out and "total" in out
    files = sorted((tmp_path / "runs-to-train").glob("*.toml"))
    assert len(files) == 6
    total = 0.0
    machine = load_cluster("dgx-h100")
    for file in files:
        run = load_run_config(file).check_and_resolve(1)
        model = run.decoder
        assert model.size == f"gemstone-{file.stem}" and model.vocab == 4096
        assert run.data.sources == ("my.jsonl",)
        assert (run.optim.lr_rule, run.optim.schedule) == ("gemstone", "wsd")
        tokens = run.train.steps * run.plan.global_batch * run.data.seq_len
        shape = FlopShape.gemstone(
            model.embed, model.layers, vocab=model.vocab, seq=run.data.seq_len
        )
        total += shape.flops_per_token * tokens
        prediction = predict_shape(
            model.embed,
            model.layers,
            machine,
            vocab=model.vocab,
            seq=run.data.seq_len,
            batch=run.plan.global_batch,
            micro_batch=run.plan.micro_batch,
        )
        assert prediction.fits_memory
    assert total == pytest.approx(1e17, rel=0.02)


@pytest.mark.parametrize(
    ("base", "words"),
    [
        ("[model]\nlayers = 4\n", "sets model.layers. The design chooses the shapes"),
        ("[train]\nsteps = 9\n[plan]\nrow = 2\n", "sets plan.row, train.steps. The design"),
        ('plan = "auto"\n', "sets plan.auto. The design"),
        ('[optim]\nschedule = "cosine"\n', "sets optim.schedule='cosine'. A design counts on"),
        ("[data]\nvalidation_fraction = 0.0\n", "sets data.validation_fraction=0."),
    ],
)
def test_a_base_does_not_choose_what_the_design_does(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    base: str,
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "base.toml").write_text(base)
    options = ("--design", "6", "--cluster", "dgx-h100", "--base", "base.toml")
    assert call("scaling-laws", *options) != 0
    assert f"base.toml {words}" in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "design").exists()


def test_shapes_that_do_not_fit_are_not_designed() -> None:
    machine = load_cluster("dgx-h100")
    large = {"vocab": 50304, "seq": 2048}
    assert fitting_micro_batch(256, 4, machine, batch=8, **large) is not None
    assert fitting_micro_batch(16384, 64, machine, batch=8, **large) is None
    runs = design_runs(4, 1e18, fits=lambda width, depth: width <= 256)
    assert {run.width for run in runs} <= {128, 256} and len(runs) == 4
    assert len(plan_design(3, 1e18, machine, vocab=4096, seq=512)) == 3


def test_designed_shapes_fit_with_the_batch_of_the_design() -> None:
    # Steps of several micro-batches also accumulate gradients.
    machine = load_cluster("dgx-h100")
    planned = plan_design(6, 1e22, machine, vocab=50304, seq=2048)
    assert len(planned) == 6 and max(run.run.width for run in planned) >= 1024
    with pytest.raises(PlanError, match=r"--budget 1e\+30 is too large for 3 runs"):
        plan_design(3, 1e30, machine, vocab=50304, seq=2048)


def test_predicted_times_grow_with_the_shape() -> None:
    import numpy as np

    cost = ClusterTimeCost(load_cluster("dgx-h100"))
    width = np.array([256.0, 512.0, 2048.0, 2048.0])
    depth = np.array([8.0, 8.0, 8.0, 32.0])
    seconds = cost.per_token(width, depth)
    assert (np.diff(seconds) > 0).all() and cost.unit == "device seconds on dgx-h100"
    # Between the anchors as the planner predicts it.
    exact = predict_shape(2048, 16, cost.machine, vocab=50304, seq=2048, batch=64, micro_batch=1)
    (found,) = cost.per_token(np.array([2048.0]), np.array([16.0]))
    assert found == pytest.approx(exact.step_seconds / (64 * 2048), rel=0.02)
