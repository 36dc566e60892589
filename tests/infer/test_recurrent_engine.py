"""Recurrent depth in the engine: cached iterations, early exits and shared keys."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from engine_cases import Served, serve, watch_steps
from torch import Tensor

from pool import Pool
from ranvier.config.engine import EngineConfig, ExitCriterion
from ranvier.config.plan import Plan
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.infer.early_exit import ExitTest
from ranvier.infer.engine import block_bytes, open_engine
from ranvier.infer.generate import score_in_engine
from ranvier.infer.logprobs import score_sequences
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.models import MODEL_SIZES, DecoderConfig, RecurrentDecoder
from ranvier.models.decoder import AttentionCore
from ranvier.nn.cross_entropy import VocabShard
from ranvier.parallel.parallelize import parallelize
from ranvier.planner.cluster import load_cluster
from ranvier.planner.model_spec import load_shipped_spec
from ranvier.planner.serving_layout import serving_layout
from ranvier.planner.time.serving_step import RooflineCost

VOCAB = 29
COUNT = 7
PROMPTS = ((1, 2, 3, 4, 5, 6), (7,), (8, 9, 10, 11), (12, 13))
CONFIG = DecoderConfig(
    embed=16,
    heads=4,
    kv_heads=2,
    head_dim=4,
    mlp=24,
    vocab=VOCAB,
    max_seq=32,
    embed_scale=4.0,
    layers=4,
    prelude_layers=1,
    core_layers=2,
    coda_layers=1,
    mean_recurrence=6,
    backprop_depth=2,
    norm_position="sandwich",
    qk_bias=True,
    tie_embeddings=True,
)
FULL = pytest.mark.full
GRIDS = [
    pytest.param({}, "samples", id="one"),
    pytest.param({"row": 2, "col": 2}, "samples", id="row2-col2-samples"),
    pytest.param({"row": 2, "col": 2}, "features", id="row2-col2-features"),
    pytest.param({"context": 2, "row": 2}, "samples", id="context2-row2-samples"),
    pytest.param({"data": 2, "depth": 2}, "samples", id="data2-depth2"),
    pytest.param({"expert": 2, "context": 2}, "samples", id="expert2-context2"),
]


@functools.cache
def serial_model() -> RecurrentDecoder:
    """A model whose states change much from one iteration to the next."""
    torch.manual_seed(3)
    model = RecurrentDecoder(CONFIG).double().eval()
    with torch.no_grad():
        for param in model.parameters():
            if param.ndim > 1:
                param.normal_(0.0, 0.3)
    return model


def greedy_requests() -> list[Request]:
    params = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True)
    return [
        Request(request_id=str(i), prompt_token_ids=prompt, params=params)
        for i, prompt in enumerate(PROMPTS)
    ]


def tokens_of(served: Served) -> list[list[int]]:
    return [served.tokens(str(i)) for i in range(len(PROMPTS))]


@dataclasses.dataclass(frozen=True)
class Generated:
    """What a rank has: tokens and mean iterations on the leader, and unexpected communication."""

    tokens: list[list[int]]
    mean_iterations: float
    num_preemptions: int
    differences: list[str]


def generate(grid: Grid, inner: str, options: dict[str, Any], num_blocks: int = 60) -> Generated:
    """Generates on a grid, with the weights of the serial model."""
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)  # type: ignore[arg-type]
    model = RecurrentDecoder(CONFIG).double().eval()
    model.load_state_dict(serial_model().state_dict())
    model = parallelize(model, grid, plan)
    differences: list[str] = []
    config = EngineConfig(block_size=4, **options)
    with open_engine(model, config, num_blocks=num_blocks) as engine:
        # How many iterations there will be with early exits is not known before.
        if not config.exit:
            watch_steps(engine.runner, differences)
        if grid.rank != 0:
            engine.runner.follow()
            return Generated([], 0.0, 0, differences)
        served = serve(engine, greedy_requests())
    stats = served.stats
    return Generated(tokens_of(served), stats.mean_iterations, stats.num_preemptions, differences)


# ---- the same, restated ---------------------------------------------------------------------


class Restatement:
    """Token by token, with keys and values in plain lists.

    A finished token keeps its state, and later iterations see the keys and values of its last one.
    Iteration i uses the keys and values in place i mod `num_places`.
    """

    def __init__(self, num_iterations: int, num_places: int = 0) -> None:
        self.model = serial_model()
        self.num_iterations = num_iterations
        self.num_places = num_places or num_iterations
        self.tokens: list[int] = []
        self.layers: Any = self.model.blocks[1].layers
        self.stored: list[list[dict[int, tuple[Tensor, Tensor]]]] = [[] for _ in self.layers]
        """Keys and values of each layer, token and place."""
        self.states: list[Tensor] = []

    @torch.no_grad()
    def append(self, token: int, criterion: ExitCriterion | None = None) -> tuple[Tensor, int]:
        """Appends a token; returns logits of the next one, and the number of iterations."""
        self.tokens.append(token)
        model = self.model
        x, angles, _ = model.prepare_inputs(None, torch.tensor([self.tokens]), None, None)
        assert angles is not None
        injection = model.run_prelude(x, angles, None)
        state = model.initial_state(injection)[:, -1:]
        for stored in self.stored:
            stored.append({})
        history = [torch.full((VOCAB,), 1.0 / VOCAB, dtype=torch.float64)]
        logits = history[0]
        for i in range(self.num_iterations):
            state = self._iterate(state, injection[:, -1:], angles[:, -1:], i)
            whole = torch.cat([*self.states, state], 1)
            logits = model.head(model.run_coda(whole, angles, None))[0, -1]
            history.append(logits.softmax(-1))
            if criterion is not None and holds(criterion, history):
                self._keep_last(i)
                break
        self.states.append(state)
        return logits, i + 1

    def _iterate(self, state: Tensor, injection: Tensor, angles: Tensor, i: int) -> Tensor:
        core: Any = self.model.blocks[1]
        y = core.adapter(state) + injection
        for layer, stored in zip(self.layers, self.stored, strict=True):
            q, k, v = layer.attention.project_qkv(layer.norm1(y))
            q, k = layer.attention.core.rotate(q, k, angles)
            stored[-1][i % self.num_places] = (k, v)
            seen = [places[i % self.num_places] for places in stored]
            keys, values = (
                torch.cat(parts, 1).repeat_interleave(2, 2) for parts in zip(*seen, strict=True)
            )
            scores = torch.einsum("bshk,bthk->bhst", q, keys) / q.shape[-1] ** 0.5
            attended = torch.einsum("bhst,bthk->bshk", scores.softmax(-1), values)
            y = layer.forward_after_attention(y, attended.flatten(2))
        return y

    def _keep_last(self, i: int) -> None:
        """Lets later iterations see the last keys and values of the last token."""
        for stored in self.stored:
            for later in range(i + 1, self.num_iterations):
                stored[-1][later % self.num_places] = stored[-1][i % self.num_places]

    def generate(
        self, prompt: Sequence[int], criterion: ExitCriterion | None = None
    ) -> tuple[list[int], list[int]]:
        """Returns greedy tokens, and the number of iterations before each of them."""
        for token in prompt:
            logits, count = self.append(token)
        tokens, counts = [int(logits.argmax())], [count]
        while len(tokens) < COUNT:
            logits, count = self.append(tokens[-1], criterion)
            tokens.append(int(logits.argmax()))
            counts.append(count)
        return tokens, counts


def holds(criterion: ExitCriterion, history: Sequence[Tensor]) -> bool:
    """Whether a criterion holds after the last of some distributions; the first is uniform."""
    p, q = history[-2:]
    if criterion.kind == "kl":
        return float((p * (p.log() - q.log())).sum()) < criterion.threshold
    if criterion.kind == "entropy":
        first, second = (-(x * x.log()).sum() for x in (p, q))
        return float((first - second).abs()) < criterion.threshold
    count = int(criterion.threshold)
    last = [int(x.argmax()) for x in history[1:]][-count:]
    return len(last) == count and len({*last}) == 1


@functools.cache
def restate(exit_text: str = "", recurrence: int = 6, places: int = 0) -> tuple[Any, float]:
    """Tokens of all prompts, and mean iterations."""
    criterion = ExitCriterion.parse(exit_text) if exit_text else None
    found = [Restatement(recurrence, places).generate(one, criterion) for one in PROMPTS]
    counts = [count for _, one in found for count in one]
    return [tokens for tokens, _ in found], sum(counts) / len(counts)


# ---- tests ----------------------------------------------------------------------------------


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "inner"), GRIDS)
@pytest.mark.parametrize("recurrence", [-1, pytest.param(3, marks=FULL)])
def test_cached_tokens_are_those_of_the_full_forward_pass(
    pool: Pool, degrees: dict[str, int], inner: str, recurrence: int
) -> None:
    found = pool.on_grid(degrees, generate, inner, {"recurrence": recurrence})
    model = serial_model()
    model.eval_recurrence = 6 if recurrence < 0 else recurrence
    expected = []
    for prompt in PROMPTS:
        tokens = list(prompt)
        for _ in range(COUNT):
            with torch.no_grad():
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        expected.append(tokens[len(prompt) :])
    assert found[0].tokens == expected
    assert [one.differences for one in found] == [[]] * len(found)
    assert restate(recurrence=model.eval_recurrence)[0] == expected


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "inner"), GRIDS)
def test_exits_are_those_of_one_token_after_the_other(
    pool: Pool, degrees: dict[str, int], inner: str
) -> None:
    text = "kl:0.5"
    found = pool.on_grid(degrees, generate, inner, {"exit": text})
    tokens, mean = restate(text)
    assert found[0].tokens == tokens
    assert found[0].mean_iterations == pytest.approx(mean)
    # Negative control: tokens exit, and it matters.
    assert mean < 5.0
    assert tokens != restate()[0]


@pytest.mark.parametrize(
    "text",
    [
        pytest.param("kl:0", marks=FULL),
        "kl:0.2",
        "entropy:0.05",
        pytest.param("argmax:3", marks=FULL),
    ],
)
@pytest.mark.parametrize("budget", [pytest.param(1, marks=FULL), 64])
def test_all_criteria_equal_their_definitions(pool: Pool, text: str, budget: int) -> None:
    options = {"exit": text, "max_num_batched_tokens": budget}
    (found,) = pool.on_grid({}, generate, "samples", options)
    tokens, mean = restate(text)
    assert found.tokens == tokens
    assert found.mean_iterations == pytest.approx(mean)
    if text == "kl:0":
        assert tokens == restate()[0]


@pytest.mark.parametrize("kind", ["kl", "entropy"])
def test_no_row_is_below_a_threshold_of_zero(kind: str) -> None:
    """Also when rounding makes the divergence of almost equal distributions negative."""
    axis = Grid({}).axis("col")
    test = ExitTest(ExitCriterion.parse(f"{kind}:0"), VocabShard(axis, axis, 0, VOCAB), VOCAB)
    logits = torch.randn(100, VOCAB, dtype=torch.float64, generator=torch.manual_seed(0))
    for noise in (0.0, 1e-9, 2e-9):
        assert not test.update(logits + noise * logits.sin()).any()


def test_a_preempted_request_has_the_same_exits(pool: Pool) -> None:
    (found,) = pool.on_grid({}, generate, "samples", {"exit": "kl:0.5"}, 9)
    assert found.num_preemptions > 0
    assert found.tokens == restate("kl:0.5")[0]


def test_a_preempted_request_has_the_same_logprobs() -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)

    def logprobs_of_all(num_blocks: int) -> tuple[dict[str, list[float]], int]:
        model = RecurrentDecoder(CONFIG).double().eval()
        model.load_state_dict(serial_model().state_dict())
        model = parallelize(model, Grid({}), Plan())
        found: dict[str, list[float]] = {}
        config = EngineConfig(block_size=4, exit="kl:0.5")
        with open_engine(model, config, num_blocks=num_blocks) as engine:
            for i, prompt in enumerate(PROMPTS):
                engine.add(Request(request_id=str(i), prompt_token_ids=prompt, params=params))
            while engine.has_unfinished:
                for output in engine.step():
                    logprobs = [one.logprob for one in output.logprobs]
                    found.setdefault(output.request_id, []).extend(logprobs)
            return found, engine.stats().num_preemptions

    expected, _ = logprobs_of_all(80)
    # The tokens of a preempted request are computed again in one step, of which some have exited.
    found, num_preemptions = logprobs_of_all(12)
    assert num_preemptions > 0
    for name, row in expected.items():
        assert found[name] == pytest.approx(row, rel=1e-12, abs=1e-12)


def test_iterations_share_keys_and_values(pool: Pool) -> None:
    # One token at a time, since the tokens of a chunk see each other before they are overwritten.
    options = {"kv_share": 2, "max_num_batched_tokens": 1}
    (found,) = pool.on_grid({}, generate, "samples", options)
    assert found.tokens == restate(places=2)[0] != restate()[0]
    options |= {"exit": "kl:0.5"}
    (found,) = pool.on_grid({}, generate, "samples", options)
    assert found.tokens == restate("kl:0.5", places=2)[0]


def test_scores_with_exits(pool: Pool) -> None:
    model = parallelize(RecurrentDecoder(CONFIG).double(), Grid({}), Plan())
    sequences = [[*prompt, 3, 4] for prompt in PROMPTS]
    plain = score_sequences(model, sequences)
    found = score_in_engine(model, sequences, EngineConfig(exit="kl:0"))
    for one, other in zip(plain, found, strict=True):
        torch.testing.assert_close(one.logprobs, other.logprobs, rtol=1e-12, atol=1e-12)
        assert bool((one.is_greedy == other.is_greedy).all())
    stats = []
    score_in_engine(model, sequences, EngineConfig(exit="kl:1e9"), on_stats=stats.append)
    assert stats[0].mean_iterations == 1.0
    assert stats[0].num_iterated_tokens == sum(len(one) - 1 for one in sequences)


@pytest.mark.parametrize("budget", [pytest.param(64, marks=FULL), 5])
def test_scores_are_those_of_one_token_after_the_other(budget: int) -> None:
    criterion = ExitCriterion.parse("argmax:2")
    sequences = [[1, 2, 3, 4, 5, 6, 9, 11, 3, 2, 8, 1], [7, 3, 2, 1]]
    model = RecurrentDecoder(CONFIG).double().eval()
    model.load_state_dict(serial_model().state_dict())
    model = parallelize(model, Grid({}), Plan())
    config = EngineConfig(exit="argmax:2", max_num_batched_tokens=budget, block_size=4)
    for tokens, found in zip(sequences, score_in_engine(model, sequences, config), strict=True):
        whole = Restatement(6)
        rows = [whole.append(token, criterion)[0].log_softmax(-1) for token in tokens[:-1]]
        want = torch.stack([row[token] for row, token in zip(rows, tokens[1:], strict=True)])
        torch.testing.assert_close(found.logprobs, want.double(), rtol=1e-12, atol=1e-12)


def test_memory_counts_the_stored_iterations() -> None:
    model = parallelize(RecurrentDecoder(CONFIG), Grid({}), Plan())
    sizes = {
        options: block_bytes(model, EngineConfig(**dict(options)))
        for options in ((), (("recurrence", 12),), (("kv_share", 3),))
    }
    each = sizes[()] // 14
    # Two layers run once, and two of them 6 times.
    assert sizes == {
        (): 14 * each,
        (("recurrence", 12),): 26 * each,
        (("kv_share", 3),): 8 * each,
    }
    cores = [one for one in model.modules() if isinstance(one, AttentionCore)]
    with open_engine(model, EngineConfig(kv_share=3), num_blocks=4):
        assert [len(core.kv_caches) for core in cores] == [1, 3, 3, 1]


def test_the_simulator_counts_the_iterations() -> None:
    size = MODEL_SIZES["recurrent-0.5b"]
    plan = Plan().with_degrees({})
    layout = serving_layout(load_shipped_spec("recurrent-0.5b"), plan, load_cluster("dgx-h100"))
    layers = size.layers + (size.mean_recurrence - 1) * size.core_layers
    assert layout.kv_bytes_per_token == 2 * layers * size.kv_heads * size.head_dim * 2
    cost = layout.cost
    assert isinstance(cost, RooflineCost)
    # The weights of the core are read in each iteration, and stored once.
    assert cost.weight_bytes > 5 * layout.weight_bytes


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recurrence": 0}, "recurrence=0 is invalid"),
        ({"exit": "latent:0.03"}, "exit='latent:0.03' is invalid"),
        ({"exit": "kl"}, "exit='kl' is invalid"),
        ({"exit": "argmax:2.5"}, "exit='argmax:2.5' is invalid"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        EngineConfig(**options).check_recurrence(32)


def test_a_model_without_recurrent_depth_refuses_the_options() -> None:
    with pytest.raises(PlanError, match=r"recurrence=4, but the model has no recurrent depth"):
        EngineConfig(recurrence=4).check_recurrence(0)
    EngineConfig().check_recurrence(0)
