"""Several adapters of one base: a request gets the tokens that its adapter gives alone."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Served, serve, watch_steps

import training
from infer.fake_server import ServerProcess
from pool import Pool, device_of
from ranvier.checkpoint.directory import find_checkpoints
from ranvier.checkpoint.hf import peft_write
from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan, RowSplitChoice
from ranvier.config.run import to_toml
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.adapters import AdapterSource, check_adapters
from ranvier.infer.engine import open_engine
from ranvier.infer.model_source import ModelSource
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models.hf.registry import FAMILIES
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.train.resume import checkpointing

ADAPTERS: dict[str, dict[str, Any]] = {
    "first": {"rank": 3, "shared": True, "target_modules": ("q", "k", "v", "up")},
    "second": {"rank": 2, "layers": (1,), "rslora": True},
}
"""Different ranks, scales, layers and blocks."""
LENGTHS = (1, 5, 17, 30)
GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True, logprobs=0)
GRIDS: list[tuple[dict[str, int], str, RowSplitChoice]] = [
    ({}, "samples", "auto"),
    ({"row": 2}, "samples", "tokens"),
    ({"row": 2, "col": 2}, "samples", "none"),
    ({"row": 2, "col": 2}, "features", "tokens"),
    ({"pipe": 2, "col": 2}, "samples", "auto"),
    ({"depth": 2, "row": 2}, "samples", "auto"),
    ({"data": 2, "row": 2}, "features", "none"),
    ({"context": 2, "row": 2}, "samples", "tokens"),
    ({"context": 2, "col": 2}, "samples", "none"),
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A base, and runs with adapters of it, by name; `other` has another base."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = training.stored(folder)
    write_run(folder / "base", corpus, {}, seed=0)
    base = find_checkpoints(folder / "base" / "checkpoints")[-1]
    for seed, (name, lora) in enumerate(ADAPTERS.items(), 1):
        write_run(folder / name, corpus, lora, base, seed=seed)
    write_run(folder / "dora", corpus, {"rank": 2, "dora": True}, base, seed=3)
    write_run(folder / "other", corpus, {"rank": 2}, seed=4)
    return {name: folder / name for name in ("base", *ADAPTERS, "dora", "other")}


def write_run(
    folder: Path, corpus: str, lora: dict[str, Any], base: Path | None = None, *, seed: int
) -> None:
    """Writes a run with random weights, or with those of a base and random adapters."""
    changes = {f"lora__{name}": value for name, value in lora.items()}
    run = training.run_of(str(folder), {}, 1, train__seed=seed, model__size="imported", **changes)
    trainer = training.trainer_of(Grid({}), corpus, run)
    if base is not None:
        checkpointing.load_initial_weights(trainer.run, trainer.state, base)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, (weight, _) in get_parallel_model(trainer.state.model).sharded_state().items():
            if base is None or ADAPTER_INFIX in name:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.5)
    trainer.state.optimizer.reload_master_weights()
    trainer.save_checkpoint()
    (folder / "config.toml").write_text(to_toml(trainer.run))


def make_requests(adapters: tuple[str, ...]) -> list[Request]:
    """The same prompts for each adapter, one after the other; the same prefixes for all."""
    return [
        Request(
            request_id=f"{adapter}-{length}",
            prompt_token_ids=tuple((7 * i * i + length) % 257 for i in range(length)),
            params=GREEDY,
            adapter=adapter,
        )
        for length in LENGTHS
        for adapter in adapters
    ]


def serve_adapters(
    grid: Grid,
    folder: Path,
    adapters: dict[str, Path],
    inner: Any = "samples",
    layout: RowSplitChoice = "auto",
    steps: int = 2,
) -> tuple[list[Served], list[str]]:
    """What requests for a base and its adapters get, cold and warm, and unexpected events."""
    sources = [AdapterSource(name, path) for name, path in adapters.items()]
    source = ModelSource.find(folder).with_adapters(sources)
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)
    model = source.load(grid, torch.device(device_of(grid)), plan, torch.float64)
    config = EngineConfig(block_size=8, max_num_batched_tokens=24)
    differences: list[str] = []
    served = []
    with open_engine(
        model, config, num_blocks=80, row_splits=layout, adapters=[*adapters]
    ) as engine:
        watch_steps(engine.runner, differences)
        if grid.rank != 0:
            engine.runner.follow()
            return [], differences
        engine.runner.context_splits = layout
        for _ in range(steps):
            served.append(serve(engine, make_requests(("", *adapters))))
    return served, differences


def answers(served: Served, adapter: str) -> list[Any]:
    """Tokens and log-probabilities of the requests of an adapter."""
    return [
        (
            served.tokens(f"{adapter}-{n}"),
            [o.logprobs[0].logprob for o in served.outputs[f"{adapter}-{n}"]],
        )
        for n in LENGTHS
    ]


@pytest.fixture(scope="module")
def alone(runs: dict[str, Path]) -> dict[str, list[Any]]:
    """Answers of each run, served by itself."""
    found = {}
    for name in ("base", *ADAPTERS):
        (served,), _ = serve_adapters(Grid({}), runs[name], {}, steps=1)
        found[name] = answers(served, "")
    assert found["base"] != found["first"] != found["second"] != found["base"]
    return found


@pytest.mark.nccl
@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "inner", "layout"), GRIDS)
def test_a_mixed_batch_gives_each_request_what_its_adapter_gives_alone(
    pool: Pool,
    runs: dict[str, Path],
    alone: dict[str, list[Any]],
    degrees: dict[str, int],
    inner: str,
    layout: str,
) -> None:
    adapters = {name: runs[name] for name in ADAPTERS}
    results = pool.on_grid(degrees, serve_adapters, runs["base"], adapters, inner, layout)
    assert [differences for _, differences in results] == [[]] * len(results)
    for served in results[0][0]:
        for name in ("base", *ADAPTERS):
            found = answers(served, "" if name == "base" else name)
            for (tokens, scores), (want, want_scores) in zip(found, alone[name], strict=True):
                assert tokens == want
                assert scores == pytest.approx(want_scores, abs=1e-9)


def test_an_adapter_in_the_format_of_peft_is_that_of_its_run(
    runs: dict[str, Path], alone: dict[str, list[Any]], tmp_path: Path
) -> None:
    run = training.run_of(str(tmp_path), {}, 1, lora__rank=2, lora__layers=(1,), lora__rslora=True)
    saved = find_checkpoints(runs["second"] / "checkpoints")[-1]
    out = tmp_path / "adapter"
    peft_write.write_adapter(saved, run.model, run.lora, FAMILIES["llama"], out, "base")
    served, _ = serve_adapters(Grid({}), runs["base"], {"peft": out}, steps=1)
    for (tokens, _), (want, _) in zip(answers(served[0], "peft"), alone["second"], strict=True):
        assert tokens == want


@pytest.mark.full
def test_the_server_answers_with_the_adapter_that_a_request_names(
    runs: dict[str, Path], alone: dict[str, list[Any]]
) -> None:
    ByteTokenizer().save(runs["base"] / "tokenizer.json")
    words = [sys.executable, "-m", "ranvier", "serve", str(runs["base"]), "--serve.port", "0"]
    for name in ADAPTERS:
        words += ["--adapter", f"{name}={runs[name]}"]
    with ServerProcess([*words, "--device", "cpu", "--plan.row", "2"]) as server:
        names = [one["id"] for one in server.http.get("/v1/models").json()["data"]]
        assert names == ["base", *ADAPTERS]
        for name in names:
            prompts = [request.prompt_token_ids for request in make_requests(("",))]
            body = {"model": name, "prompt": prompts, "max_tokens": 8, "temperature": 0}
            more = {"ignore_eos": True, "return_token_ids": True}
            answer = server.http.post("/v1/completions", json=body | more).json()
            found = [choice["token_ids"] for choice in answer["choices"]]
            assert found == [tokens for tokens, _ in alone[name]]


def test_prefixes_are_shared_only_within_an_adapter(runs: dict[str, Path]) -> None:
    adapters = {name: runs[name] for name in ADAPTERS}
    (cold, warm), _ = serve_adapters(Grid({}), runs["base"], adapters)
    # Prompts of the first pass differ by their adapter or their tokens.
    assert cold.stats.prefix_cache_hits == 0
    full = sum((length - 1) // 8 * 8 for length in LENGTHS)
    assert warm.stats.prefix_cache_hits == 3 * full


@pytest.mark.parametrize(
    ("base", "text", "message"),
    [
        ("base", "runs/mine", "'runs/mine' is not valid"),
        ("base", "a b={first}", "is not valid"),
        ("base", "x={base}", "is a run without adapters"),
        ("base", "x={dora}", "has DoRA magnitudes"),
        ("base", "x=/nowhere", "is not an adapter"),
        ("first", "x={second}", "is a run with adapters of rank 3"),
    ],
)
def test_what_does_not_fit_is_refused(
    runs: dict[str, Path], base: str, text: str, message: str
) -> None:
    with pytest.raises(PlanError, match=message):
        ModelSource.find(runs[base]).with_adapters([AdapterSource.parse(text.format(**runs))])


def test_an_adapter_of_another_base_is_refused_when_it_is_loaded(runs: dict[str, Path]) -> None:
    with pytest.raises(PlanError, match="was trained on other weights"):
        serve_adapters(Grid({}), runs["base"], {"other": runs["other"]})


def test_names_are_unique_and_known(runs: dict[str, Path]) -> None:
    adapter = AdapterSource("tiny", runs["first"])
    with pytest.raises(PlanError, match="'tiny' is used twice"):
        check_adapters([adapter], "tiny")
    model = ModelSource.find(runs["base"]).load(Grid({}), torch.device("cpu"), Plan())
    with open_engine(model, EngineConfig(), num_blocks=9) as engine:
        request = dataclasses.replace(make_requests(("",))[0], adapter="first")
        with pytest.raises(PlanError, match="The adapter 'first' does not exist"):
            engine.add(request)
