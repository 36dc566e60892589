"""lm-evaluation-harness gives a model on a grid the scores that it gives `transformers`."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from evaluation import serial, trained
from infer.fake_server import ServerProcess
from pool import Pool
from ranvier.config.arguments import EvalOptions
from ranvier.errors import DataError, OtherRankError, PlanError
from ranvier.eval import lm_eval_harness
from ranvier.eval.model_server import ModelServer
from ranvier.eval.tokenization import EvalTokenizer
from ranvier.grid import Grid
from ranvier.infer.load import load_model
from ranvier.models import Decoder

GRIDS = [{"row": 1}, {"row": 2, "depth": 2}, {"col": 2, "data": 2}, {"pipe": 2, "row": 2}]
LENGTH = 24
"""So few tokens that some contexts are cut off at their left."""
DRAWS = 50
"""Resamples, of which f1 takes milliseconds each."""
FP32 = 1e-6
"""`transformers` computes norms and rotary angles in fp32, whatever the type of the model."""
CHOICE = """
task: choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
num_fewshot: 0
metric_list:
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
  - {{metric: acc_norm, aggregation: mean, higher_is_better: true}}
"""
SAY = """
task: say
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["1", "qq"], max_gen_toks: 6}}
num_fewshot: 0
metric_list:
  - {{metric: exact_match, aggregation: mean, higher_is_better: true}}
"""
SURE = """
task: sure
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[0]}}}}"
num_fewshot: 0
metric_list:
  - {{metric: perplexity, aggregation: perplexity, higher_is_better: false}}
  - {{metric: acc, aggregation: mean, higher_is_better: true}}
"""
TWO = """
task: two
dataset_path: json
dataset_kwargs: {{data_files: {{test: "{data}"}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices[:2]}}}}"
doc_to_target: odd
num_fewshot: 0
metric_list:
  - {{metric: f1, aggregation: f1, higher_is_better: true}}
"""
TASKS = {"choice": CHOICE, "say": SAY, "sure": SURE, "two": TWO}
PAIRS = [("", " 4"), ("2 times 2 is", " 4"), ("a" * 40, " long"), ("end ", "x"), ("k", "e" * 20)]
TEXTS = ["short", "longer than the model looks at: " * 3, "x"]
PROMPTS = ["3 times 3 is", "a" * 60, "no"]


@pytest.fixture(scope="module")
def folder(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return trained(pool, tmp_path_factory.mktemp("run"), steps=12)


@pytest.fixture(scope="module")
def theirs(pool: Pool, folder: Path, tasks: Path) -> dict[str, Any]:
    """What `transformers` is given."""
    (found,) = pool.run(by_transformers, 1, str(folder), str(tasks))
    return dict(found)


@pytest.fixture(scope="module")
def tasks(pool: Pool, folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tasks of choices, and one whose answers are what the model says to half of the questions."""
    place = tmp_path_factory.mktemp("tasks")
    (said,) = pool.run(answers, 1, str(folder), [f"{n} times {n} is" for n in range(9)])
    rows = [
        {
            "question": f"{n} times {n} is",
            "choices": [f" {n * n},", f" {n}", " a lot"],
            "answer": 0,
            "odd": n % 2,
        }
        for n in range(9)
    ]
    (place / "choice.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    rows = [
        {"question": row["question"], "answer": said[n] if n % 2 else "never"}
        for n, row in enumerate(rows)
    ]
    (place / "say.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in TASKS.items():
        data = place / ("say.jsonl" if name == "say" else "choice.jsonl")
        (place / f"{name}.yaml").write_text(text.format(data=data))
    return place


def offline(place: str) -> None:
    """Keep the packages from the network and from the user's own cache."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        os.environ[name] = "1"
    os.environ["HF_HOME"] = f"{place}/cache"


def answers(_: int, folder: str, prompts: list[str]) -> list[str]:
    """What the model says, by its own serial code."""
    model, words, said = serial(Path(folder)), EvalTokenizer.from_run(Path(folder)), []
    for prompt in prompts:
        ids = words.encode(prompt)
        for _ in range(6):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids]))[0, -1].argmax()))
        said.append(words.decode_until_stop(ids[len(words.encode(prompt)) :], ["1", "qq"]))
    return said


def requests_of() -> dict[str, list[Any]]:
    from lm_eval.api.instance import Instance

    wish = {"until": ["1", "qq"], "max_gen_toks": 6}
    arguments = {
        "loglikelihood": PAIRS,
        "loglikelihood_rolling": [(text,) for text in TEXTS],
        "generate_until": [(text, wish) for text in PROMPTS],
    }
    return {
        kind: [Instance(kind, {}, one, i) for i, one in enumerate(some)]  # type: ignore[arg-type]
        for kind, some in arguments.items()
    }


def asked(model: Any) -> dict[str, Any]:
    """Answers of a model of the harness to requests at the edges."""
    return {kind: getattr(model, kind)(some) for kind, some in requests_of().items()}


def twin(folder: Path) -> Any:
    """The model of a run in `transformers`."""
    from transformers import LlamaConfig, LlamaForCausalLM

    model: Decoder = serial(folder)
    config = model.config
    made = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab,
            hidden_size=config.embed,
            intermediate_size=config.mlp,
            num_hidden_layers=config.layers,
            num_attention_heads=config.heads,
            num_key_value_heads=config.kv_heads,
            head_dim=config.head_dim,
            max_position_embeddings=config.max_seq,
            rms_norm_eps=config.norm_eps,
            rope_theta=config.rope_theta,
            bos_token_id=None,
            eos_token_id=256,
            pad_token_id=256,
        )
    ).double()
    parts = {
        "norm1": "input_layernorm",
        "norm2": "post_attention_layernorm",
        "attention.o": "self_attn.o_proj",
        "mlp.down": "mlp.down_proj",
        **{f"attention.qkv.{x}": f"self_attn.{x}_proj" for x in "qkv"},
        **{f"mlp.enter.{x}": f"mlp.{x}_proj" for x in ("gate", "up")},
    }
    names = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    for i in range(config.layers):
        names |= {f"blocks.{i}.{a}": f"model.layers.{i}.{b}" for a, b in parts.items()}
    weights = model.state_dict()
    made.load_state_dict({f"{b}.weight": weights[f"{a}.weight"] for a, b in names.items()})
    return made.eval()


def by_transformers(_: int, folder: str, tasks: str) -> dict[str, Any]:
    offline(tasks)
    from lm_eval import evaluator
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=f"{folder}/tokenizer.json", eos_token="<|end|>", pad_token="<|end|>"
    )
    model = HFLM(
        pretrained=twin(Path(folder)), tokenizer=tokenizer, batch_size=4, max_length=LENGTH
    )
    ask = EvalOptions(tasks=",".join(TASKS), include=tasks)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("DISABLE_MULTIPROC", "1")  # a worker of the tests may start no process
        found = evaluator.simple_evaluate(
            model=model,
            tasks=list(TASKS),
            task_manager=lm_eval_harness.build_task_manager(ask),
            bootstrap_iters=DRAWS,
        )
    results = {
        f"{name} {key.removesuffix(',none')}": value
        for name, table in found["results"].items()
        for key, value in table.items()
    }
    return {"results": results, **asked(model)}


def by_ranvier(grid: Grid, folder: str, tasks: str) -> dict[str, Any] | None:
    offline(tasks)
    served = ModelServer(
        load_model(Path(folder), grid, "cpu"), EvalTokenizer.from_run(Path(folder)), 3
    )

    def work(served: ModelServer) -> dict[str, Any]:
        with pytest.MonkeyPatch.context() as here:
            here.setattr(lm_eval_harness, "BOOTSTRAP_ITERS", DRAWS)
            found = lm_eval_harness.evaluate_tasks(
                served, EvalOptions(tasks=",".join(TASKS), include=tasks), LENGTH
            )
        results = {
            f"{n} {key}": value for n, table in found.items() for key, value in table.items()
        }
        return {"results": results, **asked(lm_eval_harness.build_harness_model(served, LENGTH))}

    return served.run_on_first_rank(work)


@pytest.mark.full
@pytest.mark.parametrize(
    "degrees", [GRIDS[0], *(pytest.param(g, marks=pytest.mark.full) for g in GRIDS[1:3]), GRIDS[3]]
)
def test_scores_are_those_of_transformers(
    pool: Pool, folder: Path, tasks: Path, theirs: dict[str, Any], degrees: dict[str, int]
) -> None:
    first, *others = pool.on_grid(degrees, by_ranvier, str(folder), str(tasks))
    assert others == [None] * len(others) and first is not None
    numbers = {key for key, value in theirs["results"].items() if isinstance(value, (int, float))}
    assert first["results"].keys() == {key for key in numbers if not key.endswith(" sample_len")}
    for name, value in first["results"].items():
        wanted = pytest.approx(theirs["results"][name], abs=1e-12, rel=FP32 * ("sure p" in name))
        assert value == wanted, name
    spreads = ("sure perplexity_stderr", "say exact_match_stderr", "two f1_stderr")
    assert all(first["results"][name] > 0.0 for name in spreads)
    assert 0.0 < first["results"]["two f1"] < 1.0 < first["results"]["sure perplexity"]
    assert 0.0 < first["results"]["say exact_match"] < 1.0, "it can be told apart"
    assert first["generate_until"] == theirs["generate_until"]
    for (mine, greedy), (wanted, likeliest) in zip(
        first["loglikelihood"], theirs["loglikelihood"], strict=True
    ):
        assert mine == pytest.approx(wanted, rel=FP32) and greedy == likeliest
    assert first["loglikelihood_rolling"] == pytest.approx(
        theirs["loglikelihood_rolling"], rel=FP32
    )


def by_client(_: int, url: str, name: str, folder: str, tasks: str) -> dict[str, Any]:
    """Scores of the harness's own client of a server."""
    offline(tasks)
    from lm_eval import evaluator

    place = Path(tasks) / "tokenizer"
    place.mkdir()
    (place / "tokenizer.json").write_bytes((Path(folder) / "tokenizer.json").read_bytes())
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>"}
    (place / "tokenizer_config.json").write_text(json.dumps(kind))
    ask = EvalOptions(tasks=",".join(TASKS), include=tasks)
    with pytest.MonkeyPatch.context() as here:
        here.setenv("DISABLE_MULTIPROC", "1")
        found = evaluator.simple_evaluate(
            model="local-completions",
            model_args={
                "model": name,
                "base_url": f"{url}/v1/completions",
                "tokenizer_backend": "huggingface",
                "tokenizer": str(place),
                "max_length": LENGTH,
                "batch_size": 3,
                "max_retries": 1,
            },
            tasks=list(TASKS),
            task_manager=lm_eval_harness.build_task_manager(ask),
            bootstrap_iters=0,
        )
    return {
        f"{task} {key.removesuffix(',none')}": value
        for task, table in found["results"].items()
        for key, value in table.items()
        if isinstance(value, (int, float)) and key != "sample_len"
    }


@pytest.mark.full
def test_a_server_has_the_scores_of_its_model(pool: Pool, folder: Path, tasks: Path) -> None:
    (first,) = pool.on_grid({"row": 1}, by_ranvier, str(folder), str(tasks))
    words = ["serve", str(folder), "--device", "cpu", "--serve.port", "0"]
    with ServerProcess([sys.executable, "-m", "ranvier", *words]) as server:
        (found,) = pool.run(by_client, 1, server.url, folder.name, str(folder), str(tasks))
    assert first is not None
    numbers = {key for key in first["results"] if "_stderr" not in key}
    assert {key for key in found if "_stderr" not in key} == numbers
    for name in numbers:
        assert found[name] == pytest.approx(first["results"][name], rel=1e-4), name


def mistaken(grid: Grid, folder: str, tasks: str) -> list[str]:
    """What errors of rank 0 are on all ranks."""
    offline(tasks)
    served, found = (
        ModelServer(load_model(Path(folder), grid, "cpu"), EvalTokenizer.from_run(Path(folder))),
        [],
    )
    for ask, length in (
        (EvalOptions(tasks="say", include=tasks), 4),
        (EvalOptions(tasks="lost", include=tasks), 9),
    ):
        try:
            served.run_on_first_rank(
                lambda served, a=ask, n=length: lm_eval_harness.evaluate_tasks(served, a, n)
            )
        except (PlanError, DataError, OtherRankError) as error:
            found.append(f"{type(error).__name__} {error}")
    return found


@pytest.mark.full
def test_an_error_of_the_first_rank_ends_all(pool: Pool, folder: Path, tasks: Path) -> None:
    (tasks / "lost.yaml").write_text(
        CHOICE.replace("task: choice", "task: lost").format(data=tasks / "nowhere.jsonl")
    )
    first, second = pool.on_grid({"row": 2}, mistaken, str(folder), str(tasks))
    assert "generates 6 tokens" in first[0] and "nowhere.jsonl" in first[1]
    assert [one.split()[0] for one in second] == ["OtherRankError"] * 2


def test_wishes_of_tasks_are_read_or_refused(folder: Path) -> None:
    model = lm_eval_harness.HarnessModel(
        ModelServer(torch.nn.Module(), EvalTokenizer.from_run(folder)), 99
    )
    wish = model.parse_generation_kwargs({"until": "a", "max_new_tokens": 7, "temperature": 0.5})
    assert (wish.stops, wish.max_new_tokens, wish.temperature) == (("a", "<|end|>"), 7, 0.0)
    assert (
        model.parse_generation_kwargs(
            {"do_sample": True, "temperature": 0.5, "top_p": 0.9}
        ).temperature
        == 0.5
    )
    with pytest.raises(PlanError, match="num_beams"):
        model.parse_generation_kwargs({"num_beams": 4})


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_eval_harness.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PlanError, match="extra eval"):
        lm_eval_harness.check_installed()
