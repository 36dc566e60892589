"""Runs: TOML in and out, unknown keys, wrong types."""

from __future__ import annotations

import dataclasses
import math
import shutil
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ranvier.config import run as runs
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError
from ranvier.setting import SettingInfo, setting, setting_info
from ranvier.tools.verify import shrink_run
from ranvier.train.resolve import ResolveContext, resolve_run

ON_CPU = ResolveContext(world_size=1, device=torch.device("cpu"))


def test_a_saved_run_is_the_run() -> None:
    run = RunConfig(model=named_model("gpt2"), plan=Plan(row=2, overlap=("dx",)))
    assert runs.run_from_tables(tomllib.loads(runs.to_toml(run))) == run


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[plan]\nrow = 'two'", "plan.row='two' is invalid. It must be an integer"),
        ("[plan]\nrow = true", "plan.row=True is invalid"),
        ("[plan]\ncol_splits = 'both'", "one of 'samples', 'features'"),
        ("[plan]\noverlap = 'dx'", "is not a list"),
        ("[optim]\nmuon_coefficients = [1.0, 2.0]", "has 2 values. It must have 3"),
        ("[optim]\nlr = 'high'", "must be a number"),
        ("[modle]\nsize = 'tiny'", "modle is not a section. Did you mean 'model'?"),
        ("plan = 3", "plan=3 is not a table"),
        ("[plan\nrow=2", "is not valid TOML"),
    ],
)
def test_mistakes_in_a_file_are_named(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(PlanError) as error:
        runs.load_run_config(file)
    assert says in str(error.value)


def test_problems_of_the_model_come_with_those_of_the_plan() -> None:
    run = RunConfig(model=replace(named_model("tiny"), kv_heads=3, head_dim=7), plan=Plan(row=5))
    with pytest.raises(PlanError) as error:
        run.check_and_resolve(5)
    text = str(error.value)
    assert "kv_heads=3 does not divide heads=8" in text and "head_dim=7 is odd" in text
    assert "row=5 does not divide heads=8" in text


@pytest.mark.parametrize("size", ["llama3-8b", "llama3-405b", "gpt2", "qwen3-0.6b"])
@pytest.mark.parametrize(
    "plan", [Plan(row=4, col=2, depth=2), Plan(row=2, col=2, col_splits="features"), Plan(row=16)]
)
def test_a_shrunk_model_keeps_what_matters(size: str, plan: Plan) -> None:
    run = RunConfig(model=named_model(size), plan=replace(plan, global_batch=64, data=1))
    if run.model.heads % plan.row:
        pytest.skip("this grid does not fit this model")
    run = resolve_run(run, ResolveContext(world_size=run.plan.world_size))
    small = shrink_run(run)
    inside = plan.row * (plan.col if plan.col_splits == "features" else 1)
    assert small.model.heads * run.model.kv_heads == small.model.kv_heads * run.model.heads
    assert max(inside // small.model.kv_heads, 1) == max(inside // run.model.kv_heads, 1)
    period = plan.row * plan.col * plan.depth
    assert small.model.vocab % period == run.model.vocab % period
    assert (small.model.tie_embeddings, small.model.bias) == (
        run.model.tie_embeddings,
        run.model.bias,
    )
    assert small.check_and_resolve(run.plan.world_size) == small


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"cuda_graph": True},
            r"plan.cuda_graph=True with data.document_mask=True.*data.document_mask=False",
        ),
        ({"compile": "yes"}, r"compile='yes' is unknown"),
    ],
    ids=str,
)
def test_plans_that_contradict_themselves(change: dict[str, Any], words: str) -> None:
    run = dataclasses.replace(RunConfig(), plan=dataclasses.replace(RunConfig().plan, **change))
    with pytest.raises(PlanError, match=words):
        run.check_and_resolve(1)


def test_a_graph_is_recorded_on_one_rank() -> None:
    data = dataclasses.replace(RunConfig().data, document_mask=False)
    run = dataclasses.replace(RunConfig(), data=data, plan=Plan(cuda_graph=True, data=2))
    with pytest.raises(
        PlanError, match=r"cuda_graph=True on 2 ranks.*Use cuda_graph=False or one rank"
    ):
        run.check_and_resolve(2)
    with pytest.raises(PlanError, match=r"plan\.cuda_graph=True on cpu"):
        resolve_run(dataclasses.replace(run, plan=Plan(cuda_graph=True, data=1)), ON_CPU)


def test_compiling_needs_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    run = RunConfig(plan=Plan(compile="on", data=1))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(
        PlanError, match=r"plan.compile='on', but a compiler for cpu is missing.*'off'"
    ):
        resolve_run(run, ON_CPU)
    assert resolve_run(RunConfig(plan=Plan(data=1)), ON_CPU).plan.compile == "off"


def test_bounds_of_a_setting_stand_at_its_field() -> None:
    """A new setting is one field: it is validated and explained from there."""

    @dataclasses.dataclass(frozen=True)
    class Extra:
        room: float = setting(1.0, minimum=0.5, maximum=2.0, unit="GiB")
        share: float = setting(0.1, fraction=True, usual=0.2)
        plain: int = 3

    infos = {field.name: setting_info(field) for field in dataclasses.fields(Extra)}
    assert infos["room"].describe_bounds() == "0.5 to 2, GiB"
    assert infos["share"].describe_bounds() == "in [0, 1)" and infos["plain"] == SettingInfo()
    for name, value, words in (
        ("room", 0.1, "room=0.1 is too small. It must be at least 0.5."),
        ("room", 3.0, "room=3.0 is too large. It must be at most 2.0."),
        ("room", math.nan, "room=nan is not finite. It must be a finite number. Use 0.5."),
        ("share", 1.0, "share=1.0 is not a fraction. It must be in [0, 1). Use 0.2."),
        ("plain", 2**50, "plain=1125899906842624 is too large. It must be at most 1099511627776."),
    ):
        problem = infos[name].find_problem(name, value)
        assert problem is not None and problem.startswith(words), problem
        assert infos[name].find_problem(name, getattr(Extra(), name)) is None


def test_every_default_is_within_its_bounds() -> None:
    assert not [*RunConfig()._number_problems()]


def test_every_fraction_suggests_a_value() -> None:
    """An error message says "Use ..." with it."""
    run = RunConfig()
    sections = [getattr(run, field.name) for field in dataclasses.fields(run)]
    missing = [
        f"{type(section).__name__}.{field.name}"
        for section in sections
        for field in dataclasses.fields(section)
        if setting_info(field).is_fraction and setting_info(field).usual is None
    ]
    assert missing == []
