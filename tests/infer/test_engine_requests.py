"""Requests of one engine: errors, ends, log-probabilities, shared prompts, grammars."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_cases import Served, serve

from ranvier.config.engine import EngineConfig
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.engine import Engine, block_bytes, count_cache_blocks, open_engine
from ranvier.infer.model_runner import ModelRunner
from ranvier.infer.request import Request, TokenOutput
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.step_table import load_step_table
from ranvier.infer.structured_output import GrammarCompiler
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.decoder import AttentionCore
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.time.serving_step import StepLoad

CONFIG = DecoderConfig(
    layers=2, embed=32, heads=4, kv_heads=2, head_dim=8, mlp=48, vocab=257, max_seq=128
)
END = 256


@pytest.fixture(scope="module")
def serial() -> Decoder:
    torch.manual_seed(1)
    model = Decoder(CONFIG).double().eval()
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    return model


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    found = GrammarCompiler(ByteTokenizer(), CONFIG.vocab, [END])
    yield found
    found.close()


@pytest.fixture
def engine(serial: Decoder, compiler: GrammarCompiler) -> Iterator[Engine]:
    model = Decoder(CONFIG).double()
    model.load_state_dict(serial.state_dict())
    parallelize(model, Grid({}), dtype=torch.float64).eval()
    with open_engine(
        model,
        EngineConfig(block_size=8),
        num_blocks=60,
        end_token_ids=[END],
        compile_grammar=compiler.compile,
    ) as found:
        yield found


def request(name: str = "a", prompt: tuple[int, ...] = (5, 6, 7), **params: Any) -> Request:
    own = {name: params.pop(name) for name in ("stream", "parent_id") if name in params}
    return Request(request_id=name, prompt_token_ids=prompt, params=SamplingParams(**params), **own)


@pytest.mark.parametrize(
    ("prompt", "params", "words"),
    [
        ((), {}, "The prompt has 0 tokens"),
        ((257,), {}, "The prompt has the token 257"),
        (tuple(range(128)), {}, "The prompt has 128 tokens, but a sequence may have 128"),
        ((1,), {"temperature": 2.5}, "temperature=2.5 is out of range"),
        ((1,), {"logit_bias": {400: 1.0}}, "logit_bias has the token 400"),
        ((1,), {"logprobs": 21}, "logprobs=21 is out of range"),
    ],
)
def test_what_can_never_run_is_refused(
    engine: Engine, prompt: tuple[int, ...], params: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as error:
        engine.add(request(prompt=prompt, **params))
    assert words in str(error.value)
    assert not engine.has_unfinished and engine.stats().num_free_blocks == 59


def test_why_requests_end(engine: Engine, serial: Decoder) -> None:
    free = serve(engine, [request(temperature=0.0, max_tokens=6, ignore_eos=True)]).tokens("a")
    requests = [
        request("stop", temperature=0.0, max_tokens=6, stop_token_ids=frozenset([free[2]])),
        request("length", temperature=0.0, max_tokens=3, ignore_eos=True),
        request("positions", tuple(range(120)), temperature=0.0, max_tokens=None, ignore_eos=True),
        request("end", temperature=0.0, max_tokens=6, logit_bias={END: 100.0}),
        request("late", temperature=0.0, max_tokens=6, min_tokens=4, logit_bias={END: 100.0}),
        request("forbidden", allowed_token_ids=(3,), bad_words=((3,),)),
    ]
    served = serve(engine, requests)
    ends = {name: outputs[-1] for name, outputs in served.outputs.items()}
    place = free.index(free[2])
    assert served.tokens("stop") == free[: place + 1] and ends["stop"].stop_token == free[2]
    assert ends["stop"].finish_reason == "stop"
    assert len(served.tokens("length")) == 3 and ends["length"].finish_reason == "length"
    assert len(served.tokens("positions")) == 8 and ends["positions"].finish_reason == "length"
    assert served.tokens("end") == [END] and ends["end"].finish_reason == "stop"
    assert len(served.tokens("late")) == 5 and served.tokens("late")[-1] == END
    assert ends["forbidden"].finish_reason == "error"
    assert "forbid all tokens" in ends["forbidden"].error
    assert engine.stats().num_free_blocks == 59


def test_log_probabilities_are_those_of_the_model(engine: Engine, serial: Decoder) -> None:
    prompt = tuple(range(40, 70))
    one = request(prompt=prompt, max_tokens=5, logprobs=3, prompt_logprobs=2, ignore_eos=True)
    outputs = serve(engine, [one]).outputs["a"]
    tokens = [token for output in outputs for token in output.token_ids]
    with torch.no_grad():
        logits = serial(torch.tensor([[*prompt, *tokens]]))[0].log_softmax(-1)
    scores = [score for output in outputs for score in output.logprobs]
    assert outputs[0].prompt_logprobs is not None
    for place, score in enumerate([*outputs[0].prompt_logprobs, *scores]):
        row = logits[place]
        token = [*prompt, *tokens][place + 1]
        assert score.logprob == pytest.approx(float(row[token]), abs=1e-9)
        assert score.rank == int((row > row[token]).sum()) + 1
        count = 2 if place < len(prompt) - 1 else 3
        best = row.topk(count)
        assert [token for token, _ in score.top] == best.indices.tolist()
        # The most likely tokens are found in fp32.
        assert [x for _, x in score.top] == pytest.approx(best.values.tolist(), abs=1e-6)


def test_choices_share_the_blocks_of_their_prompt(engine: Engine) -> None:
    prompt = tuple(range(40))
    requests = [request("0", prompt, seed=3, max_tokens=4, ignore_eos=True)]
    requests += [
        request(str(i), prompt, seed=3, stream=i, parent_id="0", max_tokens=4, ignore_eos=True)
        for i in (1, 2, 3)
    ]
    served = serve(engine, requests)
    alone = [serve(engine, [one]).tokens(one.request_id) for one in requests]
    assert [served.tokens(one.request_id) for one in requests] == alone
    assert len({tuple(one) for one in alone}) > 1, "streams differ"
    # Four full blocks of 8 tokens each; the last token of a prompt is always computed.
    assert [served.outputs[str(i)][0].num_cached_tokens for i in range(4)] == [0, 32, 32, 32]
    waits = [served.outputs[str(i)][0].queue_seconds or 0.0 for i in range(4)]
    assert all(0.0 < waits[0] < one for one in waits[1:]), "the others wait for the first"


def test_a_cache_of_one_longest_request_serves_a_hundred(serial: Decoder) -> None:
    # The last token of a sequence is never stored: 128 positions need 16 blocks of 8.
    lengths = [(60, 69), (1, 60), (120, 9)]
    lengths += [(1 + 7 * i % 20, 1 + 3 * i % 4) for i in range(97)]
    requests = [
        request(f"{i}", (i, *range(size - 1)), temperature=0.0, max_tokens=count, ignore_eos=True)
        for i, (size, count) in enumerate(lengths)
    ]
    model = parallelize(copy.deepcopy(serial), Grid({}), dtype=torch.float64).eval()
    with open_engine(model, EngineConfig(block_size=8), num_blocks=17) as engine:
        served = serve(engine, requests)
    found = [len(served.tokens(one.request_id)) for one in requests]
    assert found == [min(count, CONFIG.max_seq - size) for size, count in lengths]
    assert served.stats.num_preemptions > 0
    assert served.stats.num_free_blocks == 16


def test_aborted_requests_give_their_blocks_back(engine: Engine) -> None:
    alone = serve(engine, [request("x", temperature=0.0, max_tokens=8)]).tokens("x")
    for name in ("a", "b", "c"):
        engine.add(request(name, temperature=0.0, max_tokens=8))
    tokens: list[int] = []
    engine.abort("a")
    engine.abort("unknown")
    while engine.has_unfinished:
        for output in engine.step():
            assert output.request_id != "a"
            if output.request_id == "b":
                tokens += output.token_ids
        engine.abort("c")
    assert tokens == alone
    assert engine.stats().num_free_blocks == 59


MIXED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True},
    "drawn": {"seed": 3, "top_p": 0.9, "max_tokens": 40, "ignore_eos": True},
    "scored": {"seed": 4, "max_tokens": 30, "logprobs": 2, "prompt_logprobs": 1},
    "penalties": {"temperature": 0.0, "max_tokens": 20, "frequency_penalty": 1.0},
    "words": {"temperature": 0.0, "max_tokens": 20, "bad_words": ((3,), (5, 6))},
    "late": {"seed": 5, "max_tokens": 9, "min_tokens": 4, "logit_bias": {END: 100.0}},
    "regex": {
        "structured_output": StructuredOutput("regex", "(abc|abx)[ab]{3}c"),
        "logit_bias": {END: 100.0},
        "max_tokens": 20,
    },
    "stop": {"seed": 6, "max_tokens": 20, "stop_token_ids": frozenset(range(0, 257, 9))},
    "forbidden": {"allowed_token_ids": (3,), "bad_words": ((3,),)},
}


def test_a_step_ahead_of_the_host_gives_the_same_outputs(
    serial: Decoder, compiler: GrammarCompiler
) -> None:
    model = parallelize(copy.deepcopy(serial), Grid({}), dtype=torch.float64).eval()
    requests = [
        request(name, tuple(range(i, 4 * i + 9)), stream=i, **params)
        for i, (name, params) in enumerate(MIXED.items())
    ]
    # A large cache, and one that preempts.
    want, found = (
        serve_mixed(model, compiler, requests, "off", num_blocks=100, budget=512),
        serve_mixed(model, compiler, requests, "on", num_blocks=17, budget=16),
    )
    assert want.stats.num_preemptions == 0 < found.stats.num_preemptions
    assert found.stats.num_free_blocks == 16
    for name in MIXED:
        assert found.tokens(name) == want.tokens(name), name
        (*_, last), (*_, wanted) = found.outputs[name], want.outputs[name]
        assert last.finish_reason == wanted.finish_reason, name
        assert (last.stop_token, last.error) == (wanted.stop_token, wanted.error), name
        scores, others = (scores_of(one.outputs[name]) for one in (found, want))
        assert scores == pytest.approx(others, abs=1e-9), name
    num_scores = len(requests[2].prompt_token_ids) - 1 + len(found.tokens("scored"))
    assert len(scores_of(found.outputs["scored"])) == num_scores


def serve_mixed(
    model: Decoder,
    compiler: GrammarCompiler,
    requests: list[Request],
    ahead: Any,
    *,
    num_blocks: int,
    budget: int,
) -> Served:
    """Serves requests with or without a step ahead of the host."""
    config = EngineConfig(block_size=8, max_num_batched_tokens=budget, async_scheduling=ahead)
    with open_engine(
        model,
        config,
        num_blocks=num_blocks,
        end_token_ids=[END],
        compile_grammar=compiler.compile,
    ) as engine:
        return serve(engine, requests)


def scores_of(outputs: list[TokenOutput]) -> list[float]:
    """All log-probabilities of a request: of its prompt, then of its tokens."""
    return [
        score.logprob
        for output in outputs
        for score in (*(output.prompt_logprobs or ()), *output.logprobs)
    ]


@pytest.mark.parametrize("is_aborted", [False, True])
def test_the_id_of_an_ended_request_is_free_while_a_step_computes_it(
    serial: Decoder, is_aborted: bool
) -> None:
    model = parallelize(copy.deepcopy(serial), Grid({}), dtype=torch.float64).eval()
    config = EngineConfig(block_size=8, async_scheduling="on")
    options: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
    with open_engine(model, config, num_blocks=60) as engine:
        again = request("a", (9, 8), max_tokens=6, **options)
        alone = serve(engine, [again]).tokens("a")
        free = serve(engine, [request("a", max_tokens=6, **options)]).tokens("a")
        stop = frozenset([free[2]])
        engine.add(request("a", stop_token_ids=stop, max_tokens=6, **options))
        outputs: list[TokenOutput] = []
        # The step after that of the last token has been launched.
        while not outputs or (outputs[-1].finish_reason is None and not is_aborted):
            outputs += engine.step()
        engine.abort("a")
        assert engine.has_unfinished and engine.stats().num_running == 0
        assert serve(engine, [again]).tokens("a") == alone
        assert engine.stats().num_free_blocks == 59


@pytest.mark.parametrize("logprobs", [None, 0])
def test_structured_output_is_what_was_asked_for(engine: Engine, logprobs: int | None) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["node", "axon"]}, "size": {"type": "boolean"}},
        "required": ["name", "size"],
        "additionalProperties": False,
    }
    structures = {
        "schema": StructuredOutput("json_schema", json.dumps(schema)),
        "regex": StructuredOutput("regex", "[ab]{3}c"),
        "choice": StructuredOutput("choice", '["yes", "no"]'),
    }
    requests = [
        request(
            name, structured_output=one, max_tokens=100, logprobs=logprobs, logit_bias={END: 100.0}
        )
        for name, one in structures.items()
    ]
    served = serve(engine, [*requests, request("free", max_tokens=30, ignore_eos=True)])
    texts = {name: ByteTokenizer().decode(served.tokens(name)) for name in structures}
    assert json.loads(texts["schema"])["name"] in ("node", "axon")
    assert len(texts["regex"]) == 4 and texts["regex"][3] == "c"
    assert texts["choice"] in ("yes", "no")
    ends = {name: served.outputs[name][-1].finish_reason for name in structures}
    assert ends == dict.fromkeys(structures, "stop")
    # Tokens without an alternative are appended without a step.
    steps = len(served.outputs["schema"])
    assert (steps < len(served.tokens("schema"))) == (logprobs is None)


def test_a_grammar_that_fails_ends_its_request_only(engine: Engine) -> None:
    alone = serve(engine, [request("x", temperature=0.0, max_tokens=8)]).tokens("x")
    hopeless = request(
        "bad",
        structured_output=StructuredOutput("regex", "a+"),
        allowed_token_ids=(ord("b"),),
        max_tokens=8,
    )
    served = serve(engine, [hopeless, request("x", temperature=0.0, max_tokens=8)])
    last = served.outputs["bad"][-1]
    assert last.finish_reason == "error" and last.is_invalid
    assert served.tokens("x") == alone


def test_a_request_that_raises_when_added_is_not_scheduled(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("ranvier.infer.engine.SamplingState", fail)
        with pytest.raises(MemoryError):
            engine.add(request("bad"))
    assert not engine.has_unfinished
    assert len(serve(engine, [request("bad", max_tokens=3, ignore_eos=True)]).tokens("bad")) == 3


def test_logits_that_are_not_finite_are_not_the_fault_of_a_request(engine: Engine) -> None:
    with torch.no_grad():
        for parameter in engine.runner.model.parameters():
            parameter.fill_(torch.nan)
    for params, is_invalid in (({}, False), ({"allowed_token_ids": (3,)}, True)):
        served = serve(engine, [request("a", max_tokens=3, **params)])
        last = served.outputs["a"][-1]
        assert last.finish_reason == "error" and last.is_invalid is is_invalid


def test_other_ranks_are_not_told_to_stop_within_a_step(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait in another collective, so that the leader would wait for them."""
    told: list[int] = []
    runner = engine.runner
    monkeypatch.setattr(runner, "orders_axis", types.SimpleNamespace(size=2))
    monkeypatch.setattr(
        "ranvier.infer.model_runner.max_over_ranks", lambda value, *_, **__: told.append(value)
    )
    runner.stop()
    assert told == [0]
    monkeypatch.setattr(runner, "orders_axis", types.SimpleNamespace(size=1))
    monkeypatch.setattr(runner, "_run", lambda _: 1 / 0)
    engine.add(request("a"))
    with pytest.raises(ZeroDivisionError):
        engine.step()
    monkeypatch.setattr(runner, "orders_axis", types.SimpleNamespace(size=2))
    runner.stop()
    assert told == [0]


def test_memory_that_training_has_left_in_the_allocator_is_for_the_cache(
    serial: Decoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = parallelize(copy.deepcopy(serial), Grid({}), dtype=torch.float64).eval()
    # The allocator holds all memory of the device, but tensors use a tenth of it.
    total = 1000 * block_bytes(model, EngineConfig(block_size=8))
    executor = get_parallel_model(model).pipeline.executor
    monkeypatch.setattr(executor, "device", torch.device("cuda"))
    monkeypatch.setattr("ranvier.infer.engine.max_over_ranks", lambda value, *_: value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (0, total))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _: total)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: total // 10)
    config = EngineConfig(block_size=8, gpu_memory_utilization=0.5)
    assert count_cache_blocks(model, config) == 400


@pytest.mark.parametrize(
    ("setting", "value"), [("step_log", "no/such/folder/steps.jsonl"), ("batch_invariant", True)]
)
def test_an_engine_that_does_not_start_leaves_the_model_and_the_other_ranks(
    serial: Decoder, monkeypatch: pytest.MonkeyPatch, setting: str, value: Any
) -> None:
    """Only the leader opens the log, so that the other ranks wait for its steps."""
    model = parallelize(copy.deepcopy(serial), Grid({}), dtype=torch.float64).eval()
    stops: list[None] = []
    monkeypatch.setattr(ModelRunner, "stop", lambda _: stops.append(None))
    config = EngineConfig(**{setting: value})
    with pytest.raises(PlanError, match=setting), open_engine(model, config, num_blocks=60):
        pass
    assert len(stops) == (setting == "step_log"), "all ranks refuse batch_invariant"
    cores = [one for one in model.modules() if isinstance(one, AttentionCore)]
    assert [core.kv_caches for core in cores] == [(), ()]


def test_steps_are_logged_for_the_simulator(serial: Decoder, tmp_path: Path) -> None:
    model = Decoder(CONFIG).double()
    model.load_state_dict(serial.state_dict())
    parallelize(model, Grid({}), dtype=torch.float64).eval()
    path = tmp_path / "steps.jsonl"
    config = EngineConfig(block_size=8, max_num_batched_tokens=10, step_log=str(path))
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with open_engine(model, config, num_blocks=60) as engine:
        served = serve(engine, [Request(request_id="a", prompt_token_ids=(5,) * 15, params=params)])
        assert len(served.outputs["a"]) == 4
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    # Two chunks of the prompt, the second with five tokens, then three decodes.
    assert [row["prompt_tokens"] for row in rows] == [10, 5, 0, 0, 0]
    assert [row["decode_tokens"] for row in rows] == [0, 0, 1, 1, 1]
    assert [row["mean_context"] for row in rows[2:]] == [16, 17, 18]
    assert load_step_table(path).seconds([StepLoad(1, 16.0)]) > 0.0
    with (
        pytest.raises(PlanError, match="step_log"),
        open_engine(
            model, EngineConfig(step_log=str(tmp_path / "none" / "steps.jsonl")), num_blocks=60
        ),
    ):
        pass
