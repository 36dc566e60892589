"""The task needle: what it asks, what it counts, and what it refuses before anything starts."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from commands import call
from infer.tiny_model import write_tiny_model
from ranvier.config.arguments import EvalOptions
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import PlanError
from ranvier.eval import needle
from ranvier.eval.run import check_options
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.html.heat_map import heat_map
from ranvier.infer.load import load_config_from_dir
from ranvier.train.import_export import import_model
from ranvier.train.report.needle import render_needle_section


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("needle")
    import_model(str(write_tiny_model(folder / "model", positions=256)), folder / "run")
    (folder / "text.txt").write_text("A line of text, and nothing else.\n" * 30)
    return folder / "run"


class Reader:
    """Answers from the first part of a prompt, as a model with a short memory would."""

    def __init__(self, folder: Path, memory: int) -> None:
        self.tokenizer = EvalTokenizer.from_run(folder)
        self.memory = memory

    def generate(self, prompts: Sequence[Sequence[int]], wish: Any) -> list[str]:
        return [self.answer(ByteTokenizer().decode(prompt)) for prompt in prompts]

    def answer(self, text: str) -> str:
        question = text.rpartition("\n")[2]
        found = re.search(rf"{re.escape(question)} (\d+)", text[: self.memory])
        return f" {found[1]}. And" if found else " 00000."


def make_options(run: Path, **changes: Any) -> EvalOptions:
    settings = load_config_from_dir(run)
    given = {"tasks": "needle", "haystack": (str(run.parent / "text.txt"),), **changes}
    return EvalOptions(model=settings.model, data=settings.data, **given)


def test_accuracy_is_by_length_and_depth(run: Path) -> None:
    wanted = make_options(run, lengths=(150, 256), depths=(0.0, 0.5, 1.0), trials=3, distractors=1)
    served: Any = Reader(run, memory=90)
    trials = needle.evaluate_needles(served, wanted.settings, run, wanted)
    assert [len(t.prompt.tokens) for t in trials] == [139] * 9 + [245] * 9
    table = needle.tabulate_accuracy(trials)
    assert table["256"] == {"0": 1.0, "0.5": 0.0, "1": 0.0, "mean": pytest.approx(1 / 3)} | {
        "trials": 3
    }
    assert table["150"]["0"] == 1.0 and table["150"]["1"] == 0.0
    # A trial is the same whatever else is evaluated, and different with another seed.
    alone = make_options(run, lengths=(256,), depths=(0.5,), trials=1, distractors=1)
    (again,) = needle.evaluate_needles(served, wanted.settings, run, alone)
    assert again.prompt.tokens.tolist() == trials[12].prompt.tokens.tolist()
    other = make_options(run, lengths=(256,), depths=(0.5,), trials=1, distractors=1, seed=1)
    (changed,) = needle.evaluate_needles(served, wanted.settings, run, other)
    assert changed.prompt.needle != again.prompt.needle


@pytest.mark.full
def test_the_command_writes_table_json_and_heat_map_after_an_extension(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = str(run.parent / "text.txt")
    longer = run.parent / "longer"
    words = ("--tasks", "needle", "--depths", "0", "1", "--trials", "2", "--haystack", text)
    assert call("eval", str(run), *words, "--lengths", "256", "512") != 0
    message = capsys.readouterr().err
    assert "lengths=512 is beyond the 256 positions" in message
    assert f"ranvier extend-context {run} --max-position 512" in message
    command = ("extend-context", str(run), "--max-position", "512", "--output", str(longer))
    assert call(*command) == 0
    for length in ("256", "512"):
        assert call("eval", str(longer), *words, "--lengths", length) == 0
    out = capsys.readouterr().out
    assert re.search(r"length +0 +1 +mean +trials\n512 +0.0000 +0.0000 +0.0000 +2\n", out)
    found = json.loads((longer / "eval-0.json").read_text())
    assert found["needle"]["256"] == found["needle"]["512"]
    assert found["needle"]["512"] == {"0": 0.0, "1": 0.0, "mean": 0.0, "trials": 2}
    rows = [json.loads(line) for line in (longer / "needle-0.jsonl").read_text().splitlines()]
    assert [row["depth"] for row in rows] == [0.0, 0.0, 1.0, 1.0]
    page = (longer / "eval-0.html").read_text()
    assert page.count("<rect") == 4 and "length in tokens 512, depth 1: 0 %" in page
    assert render_needle_section(longer) in page
    bad = '{"needle": {"x": [], "7": {"0": "a"}, "8": {"0": NaN}, "9": {"0": 1, "trials": 1e999}}}'
    (longer / "eval-1.json").write_text(bad)
    assert render_needle_section(longer) in page, "a file without valid numbers is skipped"


def test_wrong_options_are_refused_with_value_rule_and_remedy(run: Path) -> None:
    for changes, message in (
        ({"lengths": (64,)}, r"lengths=64 is too short: a needle .* Use --lengths \d+ or more"),
        ({"lengths": (0,)}, r"lengths=0 is too short"),
        ({"lengths": (300,)}, r"lengths=300 is beyond the 256 positions"),
        ({"depths": (0.5, 1.5)}, r"depths=1.5 is out of range.* from 0 to 1. Use 1\."),
        ({"depths": (-0.1,)}, r"depths=-0.1 is out of range.* Use 0\."),
        ({"depths": ()}, r"depths=\[\]"),
        ({"trials": 0}, r"trials=0 is out of range.* Use 1\."),
        ({"distractors": 50}, r"lengths=256 is too short: 51 needles"),
        ({"needle": "no value"}, r"needle='no value' has {key} 0 times"),
        ({"needle": "{key} " + "x" * 300 + " {value}."}, r"lengths=256 is too short"),
        ({"tasks": "needle,hellaswag"}, r"Use --tasks needle alone"),
        ({"tasks": "needel", "trials": 3}, r"--trials is given with .* Use --tasks needle\."),
    ):
        with pytest.raises(PlanError, match=message):
            check_options(make_options(run, **changes), str(run))


def test_cells_of_a_heat_map_have_their_values() -> None:
    columns = {"1,024": {"0": 1.0, "0.5": 0.25}, "<8>": {"0": 0.0}}
    svg = heat_map(columns, ["0", "0.5"], title="t", column_label="c", row_label="r")
    tree = ElementTree.fromstring(svg)
    cells = {rect[0].text: float(rect.attrib["fill-opacity"]) for rect in tree.iter("rect")}
    assert list(cells) == ["c 1,024, r 0: 100 %", "c 1,024, r 0.5: 25 %", "c <8>, r 0: 0 %"]
    full, quarter, none = cells.values()
    assert full > quarter > none
