"""Scores of a model with recurrent depth against the number of iterations."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ranvier.cli.inference import with_engine_prefix
from ranvier.cli.parsing import parse_options
from ranvier.config.arguments import EvalOptions, GenerateOptions
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.eval import recurrence
from ranvier.eval.model_server import ModelServer
from ranvier.grid import Grid
from ranvier.models import MODEL_SIZES, RecurrentDecoder
from ranvier.parallel.parallelize import parallelize

SEQUENCES = [[1, 2, 3, 4, 5, 6], [7, 8, 9]]


def served_model() -> ModelServer:
    torch.manual_seed(0)
    model = parallelize(RecurrentDecoder(MODEL_SIZES["recurrent-tiny"]).double(), Grid({}), Plan())
    tokenizer: Any = None
    return ModelServer(model, tokenizer)


def evaluate(options: EvalOptions) -> dict[int, recurrence.Results]:
    served = served_model()
    mean = MODEL_SIZES["recurrent-tiny"].mean_recurrence

    def score() -> recurrence.Results:
        scores = served.score_sequences(SEQUENCES)
        return {"tasks": {"sum": {"logprob": sum(float(one.logprobs.sum()) for one in scores)}}}

    return recurrence.evaluate_recurrences(served, options, mean, score)


def test_each_number_of_iterations_is_evaluated() -> None:
    found = evaluate(EvalOptions(recurrence="3,1", tasks="x"))
    assert [*found] == [1, 3]
    model: Any = served_model().model
    for count, results in found.items():
        model.eval_recurrence = count
        expected = sum(
            float(one.logprobs.sum()) for one in ModelServer(model, None).score_sequences(SEQUENCES)
        )
        assert results["tasks"]["sum"]["logprob"] == pytest.approx(expected, rel=1e-12)
    tables = recurrence.tabulate_recurrences(found)
    assert tables == {"sum": {str(n): found[n]["tasks"]["sum"] for n in (1, 3)}}
    assert found[1] != found[3]
    page = recurrence.render_page("title", tables)
    assert page.count("<svg") == 1 and "iterations" in page


def test_exits_report_their_mean_iterations() -> None:
    mean = MODEL_SIZES["recurrent-tiny"].mean_recurrence
    ((count, never),) = evaluate(EvalOptions(exit="kl:0")).items()
    assert count == mean
    ((_, at_once),) = evaluate(EvalOptions(exit="kl:1e9")).items()
    assert never["tasks"]["sum"][recurrence.MEAN_ITERATIONS] == mean
    assert at_once["tasks"]["sum"][recurrence.MEAN_ITERATIONS] == 1.0
    ((_, one),) = evaluate(EvalOptions(recurrence="1")).items()
    assert at_once["tasks"]["sum"]["logprob"] == pytest.approx(one["tasks"]["sum"]["logprob"])


@pytest.mark.parametrize(
    ("options", "mean", "message"),
    [
        ({"recurrence": "1,0", "tasks": "x"}, 4, "recurrence='1,0' is invalid"),
        ({"recurrence": "a", "tasks": "x"}, 4, "recurrence='a' is invalid"),
        ({"recurrence": "1,2", "code": "x"}, 4, "Only --tasks and --corpus compare them"),
        ({"recurrence": "2", "tasks": "x"}, 0, "the model has no recurrent depth"),
        ({"exit": "kl:-1", "tasks": "x"}, 4, "exit='kl:-1' is invalid"),
    ],
)
def test_bad_options_have_a_remedy(options: dict[str, Any], mean: int, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        recurrence.check_options(EvalOptions(**options), mean)
    recurrence.check_options(EvalOptions(tasks="x"), mean)


def test_options_of_the_engine_have_short_names() -> None:
    words = with_engine_prefix(["--recurrence", "32", "--exit=kl:5e-4", "--kv_share", "4"])
    found = parse_options(GenerateOptions, GenerateOptions(), "generate PATH", words)
    assert (found.engine.recurrence, found.engine.exit, found.engine.kv_share) == (32, "kl:5e-4", 4)
