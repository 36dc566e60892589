"""Runs: TOML in and out, unknown keys, wrong types."""

from __future__ import annotations

import dataclasses
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ranvier.config import run as runs
from ranvier.config.plan import Plan
from ranvier.config.run import Run
from ranvier.config.sections import ModelConfig
from ranvier.errors import PlanError
from ranvier.tools.verify import shrink
from ranvier.train.train import settled


def test_a_saved_run_is_the_run() -> None:
    run = Run(model=ModelConfig.of("gpt2"), plan=Plan(row=2, overlap=("dx",)))
    assert runs.from_tables(tomllib.loads(runs.to_toml(run))) == run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[plan]\nrow = 'two'", "plan.row='two' is not valid. It must be a whole number"),
        ("[plan]\nrow = true", "plan.row=True is not valid"),
        ("[plan]\ninner = 'both'", "one of 'samples', 'features'"),
        ("[plan]\noverlap = 'dx'", "is no list"),
        ("[optim]\nlr = 'high'", "must be a number"),
        ("[modle]\nsize = 'tiny'", "modle is not a setting. Did you mean 'model'?"),
        ("plan = 3", "plan=3 is no table"),
        ("[plan\nrow=2", "is no TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        runs.load(file)
    assert says in str(error.value)


def test_problems_of_the_model_come_with_those_of_the_plan() -> None:
    run = Run(model=replace(ModelConfig.of("tiny"), kv_heads=3, head_dim=7), plan=Plan(row=5))
    with pytest.raises(PlanError) as error:
        run.check(5)
    text = str(error.value)
    assert "kv_heads=3 does not divide heads=8" in text and "head_dim=7 is odd" in text
    assert "row=5 does not divide heads=8" in text


@pytest.mark.parametrize("size", ["llama3-8b", "llama3-405b", "gpt2", "qwen3-0.6b"])
@pytest.mark.parametrize(
    "plan", [Plan(row=4, col=2, depth=2), Plan(row=2, col=2, inner="features"), Plan(row=16)]
)
def test_a_shrunk_model_keeps_what_matters(size: str, plan: Plan) -> None:
    run = Run(model=ModelConfig.of(size), plan=replace(plan, batch=64, data=1))
    if run.model.heads % plan.row:
        pytest.skip("this grid does not fit this model")
    run = run.check(run.plan.world)
    small = shrink(run)
    inside = plan.row * (plan.col if plan.inner == "features" else 1)
    assert small.model.heads * run.model.kv_heads == small.model.kv_heads * run.model.heads
    assert max(inside // small.model.kv_heads, 1) == max(inside // run.model.kv_heads, 1)
    period = plan.row * plan.col * plan.depth
    assert small.model.vocab % period == run.model.vocab % period
    assert (small.model.tied, small.model.bias) == (run.model.tied, run.model.bias)
    assert small.check(run.plan.world) == small


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"graph": True}, r"plan.graph=True with data.packed=True.*data.packed=False"),
        ({"compile": "yes"}, r"compile='yes' is not known"),
    ],
    ids=str,
)
def test_plans_that_contradict_themselves(change: dict[str, Any], words: str) -> None:
    run = dataclasses.replace(Run(), plan=dataclasses.replace(Run().plan, **change))
    with pytest.raises(PlanError, match=words):
        run.check(1)


def test_a_graph_is_recorded_on_one_rank() -> None:
    data = dataclasses.replace(Run().data, packed=False)
    run = dataclasses.replace(Run(), data=data, plan=Plan(graph=True, data=2))
    with pytest.raises(PlanError, match=r"graph=True on 2 ranks.*Use graph=False or one rank"):
        run.check(2)
    with pytest.raises(PlanError, match=r"plan\.graph=True on cpu"):
        alone = dataclasses.replace(run, plan=Plan(graph=True, data=1)).check(1)
        settled(alone, torch.device("cpu"))


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = dataclasses.replace(Run(), plan=Plan(compile="on", data=1)).check(1)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(PlanError, match=r"plan.compile='on', but nothing compiles.*'off'"):
        settled(run, torch.device("cpu"))
    auto = dataclasses.replace(run, plan=Plan(data=1)).check(1)
    assert settled(auto, torch.device("cpu")).plan.compile == "off"
