"""Words of a command line: plain ones are read without a parser, and mean the same to both."""

from __future__ import annotations

import subprocess
import sys

import pytest

from ranvier.cli import parsing
from ranvier.cli.plan import Planned
from ranvier.config.arguments import Eval, Export

PLAIN = (
    "",
    "--data.verify=true",
    "--nodes 4 --cluster dgx-h100",
    "--nodes=4 --cluster=dgx-h100 --json -",
    "--plan.micro-batch 2",
    "--plan.micro_batch 2 --plan.data -1",
    "--optim.lr 3e-4 --optim.beta1 1 --data.held-out 0.5",
    "--data.packed false --plan.graph=True --data.verify=true",
    "--plan.recompute full --precision fp8",
    "--html= --model.rope-theta 1e6",
    "--goal=-x",
)
ODD = (
    "--nodes",
    "--nodes 4 --nodes 5",
    "--nodes 4.5",
    "--nodes four",
    "--nodes " + 5000 * "9",
    "--optim.lr nan",
    "--optim.lr none",
    "--optim.lr None",
    "--optim.beta1 1e999",
    "--precision fp9",
    "--data.packed yes",
    "--data.packed --nodes 4",
    "--goal -x",
    "--html --nodes",
    "--node 4",
    "--plan.rowe 4",
    "--plan 4",
    "--plan.row.x 4",
    "--data.corpus a b",
    "--plan.order row col",
    "nodes 4",
    "-nodes 4",
    "4",
    "--help",
    "--",
    "--=3",
    "--.row 3",
)


@pytest.mark.parametrize("line", PLAIN)
def test_the_parser_reads_the_same(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = parsing._plain(Planned(), line.split())
    monkeypatch.setattr(parsing, "_plain", lambda *_: None)
    assert found == parsing.asked(Planned, Planned(), "plan", line.split())
    assert (found == Planned()) == (line in ("", "--data.verify=true"))


@pytest.mark.parametrize("line", ODD, ids=lambda line: line[:20])
def test_other_words_are_for_the_parser(line: str) -> None:
    assert parsing._plain(Planned(), line.split()) is None


FLAGS = [
    ("--train.trace", True),
    ("--train.trace --nodes 4", True),
    ("--nodes 4 --train.trace", True),
    ("--train.trace true", True),
    ("--train.trace=TRUE", True),
    ("--train.trace True --nodes=4", True),
    ("--train.trace --train.trace false", False),
    ("--train.trace=false", False),
]


@pytest.mark.parametrize(("line", "value"), FLAGS)
def test_booleans_stand_alone_or_have_a_value(line: str, value: bool) -> None:
    found = parsing.asked(Planned, Planned(), "plan", line.split())
    assert found.train.trace is value and found.nodes == (4 if "4" in line else Planned().nodes)


def test_every_verb_reads_booleans_alike() -> None:
    for kind, name in ((Export, "adapter"), (Eval, "held_out")):
        for spelt in (name, name.replace("_", "-")):
            for line in ([f"--{spelt}"], [f"--{spelt}", "true"], [f"--{spelt}=True"]):
                assert getattr(parsing.asked(kind, kind(), "verb", line), name) is True
            for line in ([f"--{spelt}", "false"], [f"--{spelt}=False"]):
                assert getattr(parsing.asked(kind, kind(), "verb", line), name) is False


def test_a_boolean_is_true_or_false(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parsing.asked(Export, Export(), "export RUN", ["--adapter", "yes"])
    assert end.value.code == 64 and "adapter" in capsys.readouterr().err


def test_plain_words_need_no_parser() -> None:
    code = (
        "import sys\nfrom ranvier.cli.main import parse\n"
        "run = parse('train', sys.argv[1:])\nassert run.plan.row == 2 and run.nproc == 3\n"
        "assert not {'tyro', 'typeguard', 'torch', 'multiprocessing', 'asyncio'} & {*sys.modules}"
    )
    line = ["--plan.row", "2", "--nproc=3", "--data.packed", "false"]
    subprocess.run([sys.executable, "-c", code, *line], check=True, timeout=60)
