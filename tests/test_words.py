"""Words of a command line: what they mean, and what they need."""

from __future__ import annotations

import operator
import subprocess
import sys

import pytest

from ranvier.cli import parsing
from ranvier.cli.plan import PlanOptions
from ranvier.config.arguments import EvalOptions, ExportOptions

READ: list[tuple[str, dict[str, object]]] = [
    ("--nodes 4 --cluster dgx-h100", {"nodes": 4, "cluster": "dgx-h100"}),
    ("--nodes=4 --cluster=dgx-h100 --json -", {"nodes": 4, "json": "-"}),
    ("--nodes 4 --nodes 5", {"nodes": 5}),
    ("--plan.micro-batch 2", {"plan.micro_batch": 2}),
    ("--plan.micro_batch 2 --plan.data -1", {"plan.micro_batch": 2, "plan.data": -1}),
    ("--optim.lr 3e-4 --optim.beta1 1", {"optim.lr": 3e-4, "optim.beta1": 1.0}),
    ("--plan.recompute full --precision fp8", {"plan.recompute": "full", "precision": "fp8"}),
    ("--html= --model.rope-theta 1e6", {"html": "", "model.rope_theta": 1e6}),
    ("--goal=-x", {"goal": "-x"}),
    ("--data.sources a b", {"data.sources": ("a", "b")}),
    ("--plan.overlap", {"plan.overlap": ()}),
]


@pytest.mark.parametrize(("line", "values"), READ, ids=lambda word: str(word)[:40])
def test_options_are_read(line: str, values: dict[str, object]) -> None:
    found = parsing.parse_options(PlanOptions, PlanOptions(), "plan", line.split())
    assert {name: operator.attrgetter(name)(found) for name in values} == values


FLAGS = [
    ("--train.trace-comm", True),
    ("--train.trace-comm --nodes 4", True),
    ("--nodes 4 --train.trace-comm", True),
    ("--train.trace-comm true", True),
    ("--train.trace-comm=TRUE", True),
    ("--train.trace-comm True --nodes=4", True),
    ("--train.trace-comm --train.trace-comm false", False),
    ("--train.trace-comm=false", False),
]


@pytest.mark.parametrize(("line", "value"), FLAGS)
def test_booleans_stand_alone_or_have_a_value(line: str, value: bool) -> None:
    found = parsing.parse_options(PlanOptions, PlanOptions(), "plan", line.split())
    assert found.train.trace_comm is value and found.nodes == (
        4 if "4" in line else PlanOptions().nodes
    )


def test_every_verb_reads_booleans_alike() -> None:
    for kind, name in ((ExportOptions, "adapter"), (EvalOptions, "held_out")):
        for spelt in (name, name.replace("_", "-")):
            for line in ([f"--{spelt}"], [f"--{spelt}", "true"], [f"--{spelt}=True"]):
                assert getattr(parsing.parse_options(kind, kind(), "verb", line), name) is True
            for line in ([f"--{spelt}", "false"], [f"--{spelt}=False"]):
                assert getattr(parsing.parse_options(kind, kind(), "verb", line), name) is False


def test_a_boolean_is_true_or_false(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        parsing.parse_options(ExportOptions, ExportOptions(), "export RUN", ["--adapter", "yes"])
    assert end.value.code == 64 and "adapter" in capsys.readouterr().err


def test_no_words_need_no_parser_and_others_no_torch() -> None:
    code = (
        "import sys\nfrom ranvier.cli.main import parse_train_options\n"
        "from ranvier.config.arguments import TrainOptions\n"
        "assert parse_train_options([]) == TrainOptions() and 'tyro' not in sys.modules\n"
        "run = parse_train_options(sys.argv[1:])\nassert run.plan.row == 2 and "
        "run.nproc == 3\n"
        "assert not {'torch', 'numpy', 'multiprocessing'} & {*sys.modules}"
    )
    line = ["--plan.row", "2", "--nproc=3", "--data.document-mask", "false"]
    subprocess.run([sys.executable, "-c", code, *line], check=True, timeout=60)
