"""The serving simulator: times against a short simulation of its own, rates, replicas, traces."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from ranvier.config.plan import Plan
from ranvier.errors import DataError, PlanError
from ranvier.infer.arrivals import RequestGenerator, SimulatedRequest, parse_lengths, read_trace
from ranvier.infer.simulator import (
    RequestTimes,
    ServingConfig,
    ServingResult,
    find_max_rate,
    percentile,
    simulate_serving,
)
from ranvier.infer.step_table import StepRecord, StepTable, load_step_table
from ranvier.planner.cluster import load_cluster
from ranvier.planner.model_spec import load_shipped_spec
from ranvier.planner.serving_layout import serving_layout
from ranvier.planner.time.serving_step import RooflineCost, StepCost, StepLoad

BANDWIDTH = 4.3e12
FLOPS = 700e12
ATTENTION_FLOPS = 350e12


def llama_cost(efficiency: float = 0.7, host_seconds: float = 0.4e-3) -> RooflineCost:
    """llama3-8b on one device with round rates."""
    cost = serving_layout(
        load_shipped_spec("llama3-8b"), Plan(data=1), load_cluster("dgx-h200")
    ).cost
    return replace(
        cost,
        bandwidth=BANDWIDTH,
        flops=FLOPS,
        attention_flops=ATTENTION_FLOPS,
        efficiency=efficiency,
        host_seconds=host_seconds,
    )


def make_config(**changes: object) -> ServingConfig:
    settings: dict[str, object] = {
        "max_model_len": 100_000,
        "num_blocks": 10_000,
        "lookahead": False,
        "enable_prefix_caching": False,
    }
    return ServingConfig(**{**settings, **changes})  # type: ignore[arg-type]


# ---- a simulation of its own ----------------------------------------------------------------


def simulate_simply(
    requests: list[SimulatedRequest], cost: StepCost, budget: int, rows: int
) -> list[RequestTimes]:
    """decode_first without blocks, step by step."""
    coming = list(range(len(requests)))
    running: list[int] = []
    waiting: list[int] = []
    times = [RequestTimes(one.arrival) for one in requests]
    prompts_left = [one.input_tokens for one in requests]
    now = 0.0
    while coming or waiting or running:
        while coming and requests[coming[0]].arrival <= now:
            waiting.append(coming.pop(0))
        if not running and not waiting:
            now = requests[coming[0]].arrival
            continue
        # A last chunk of one token costs the same as a decode.
        decodes = [i for i in running if prompts_left[i] <= 1]
        left = budget - len(decodes)
        chunks: dict[int, int] = {}
        for i in [i for i in running if prompts_left[i] > 1] + waiting:
            if left <= 0 or (i in waiting and len(running) >= rows):
                break
            if i in waiting:
                running.append(i)
            chunks[i] = min(left, prompts_left[i])
            left -= chunks[i]
        waiting = [i for i in waiting if i not in running]
        decodes += [i for i, count in chunks.items() if count == 1]
        chunks = {i: count for i, count in chunks.items() if count > 1}
        context = 0
        for i in decodes:
            context += requests[i].input_tokens + len(times[i].token_times)
            context -= max(0, prompts_left[i] - 1)
        pairs = 0.0
        for i, count in chunks.items():
            pairs += count * (requests[i].input_tokens - prompts_left[i] + count / 2)
        ready = [i for i in decodes if prompts_left[i] <= 1]
        ready += [i for i, count in chunks.items() if count == prompts_left[i]]
        load = StepLoad(
            len(decodes),
            context / max(1, len(decodes)),
            sum(chunks.values()),
            pairs,
            len(ready),
        )
        now += cost.seconds([load])
        for i in decodes:
            prompts_left[i] = max(0, prompts_left[i] - 1)
        for i, count in chunks.items():
            prompts_left[i] -= count
        for i in ready:
            times[i].token_times.append(now)
        running = [i for i in running if len(times[i].token_times) < requests[i].output_tokens]
    return times


@pytest.mark.parametrize(("rate", "budget", "rows"), [(20.0, 512, 256), (60.0, 200, 12)])
def test_times_equal_a_simple_simulation(rate: float, budget: int, rows: int) -> None:
    requests = RequestGenerator(num_requests=60, seed=3, output_tokens="exponential:40").generate(
        rate
    )
    cost = llama_cost()
    config = make_config(max_num_batched_tokens=budget, max_num_seqs=rows)
    found = simulate_serving(requests, config, cost).requests
    expected = simulate_simply(requests, cost, budget, rows)
    assert len(found) == len(expected) == 60
    for one, other in zip(found, expected, strict=True):
        assert one.arrival == other.arrival
        assert one.token_times == pytest.approx(other.token_times, rel=1e-9)


TABLE = [
    ("decode_first", 512, (28, 104, 6.2, 17)),
    ("decode_first", 1024, (25, 98, 6.2, 32)),
    ("decode_first", 2048, (26, 107, 6.2, 49)),
    ("prefill_first", 8192, (22, 92, 6.4, 86)),
]
"""Latencies of llama3-8b at 0.7 of the maximum rate, in ms, by another simulator."""


@pytest.mark.sample(1)
@pytest.mark.parametrize(("policy", "budget", "expected"), TABLE)
def test_latencies_of_budgets(
    policy: str, budget: int, expected: tuple[float, float, float, float]
) -> None:
    cost = llama_cost(efficiency=0.7, host_seconds=0.4e-3)
    generator = RequestGenerator()
    most = make_config(max_num_batched_tokens=1024)
    rate = (
        0.7
        * simulate_serving(generator.generate(math.inf), most, cost).summary()[
            "output_tokens_per_second"
        ]
    )
    requests = generator.generate(rate / 128)
    config = make_config(max_num_batched_tokens=budget, policy=policy)
    found = simulate_serving(requests, config, cost).summary()
    names = ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99")
    assert [found[name] for name in names] == pytest.approx(expected, rel=0.1)


# ---- the engine's features ------------------------------------------------------------------


def test_everything_is_computed_once_without_pressure() -> None:
    requests = RequestGenerator(num_requests=50).generate(50.0)
    for lookahead in (False, True):
        for policy in ("decode_first", "prefill_first", "static"):
            config = make_config(policy=policy, lookahead=lookahead)
            result = simulate_serving(requests, config, llama_cost())
            assert [len(one.token_times) for one in result.requests] == [
                one.output_tokens for one in requests
            ]
            assert result.num_computed_tokens == sum(
                one.input_tokens + one.output_tokens - 1 for one in requests
            )
            assert result.num_preemptions == 0
            assert all(one.token_times[0] > one.arrival for one in result.requests)


def test_lookahead_delays_only_new_requests() -> None:
    requests = RequestGenerator(num_requests=100, output_tokens="fixed:50").generate(20.0)
    plain = simulate_serving(requests, make_config(), llama_cost()).summary()
    ahead = simulate_serving(requests, make_config(lookahead=True), llama_cost()).summary()
    assert plain["ttft_mean"] < ahead["ttft_mean"] < plain["ttft_mean"] + 3 * plain["itl_p99"]
    assert ahead["itl_p50"] == pytest.approx(plain["itl_p50"], rel=0.1)


def test_few_blocks_preempt_and_everyone_is_served() -> None:
    requests = RequestGenerator(
        num_requests=60, input_tokens="fixed:300", output_tokens="fixed:200"
    ).generate(math.inf)
    result = simulate_serving(requests, make_config(num_blocks=20), llama_cost())
    found = result.summary()
    assert found["num_preemptions"] > 0 and found["num_requests"] == 60
    assert 0.9 < found["block_use_max"] <= 1.0
    assert found["num_computed_tokens"] > 60 * 499


def test_requests_that_never_fit_are_refused() -> None:
    requests = [SimulatedRequest(0.0, 100, 10), SimulatedRequest(0.1, 5000, 10)]
    result = simulate_serving(requests, make_config(num_blocks=20), llama_cost())
    assert len(result.requests) == 1 and "1,280" in result.refused[0]
    result = simulate_serving(requests, make_config(max_model_len=1000), llama_cost())
    assert len(result.requests) == 1 and "5,010 tokens" in result.refused[0]


def test_common_prefixes_are_computed_once() -> None:
    generator = RequestGenerator(
        num_requests=40, input_tokens="fixed:64", prefix_groups=2, prefix_tokens=640
    )
    requests = generator.generate(5.0)
    cold = simulate_serving(requests, make_config(), llama_cost())
    warm = simulate_serving(requests, make_config(enable_prefix_caching=True), llama_cost())
    assert cold.prefix_cache_hits == 0
    # All but the first of each group find the prefix.
    assert warm.prefix_cache_hits == 38 * 640
    assert warm.summary()["ttft_p50"] < 0.5 * cold.summary()["ttft_p50"]


def test_replicas_share_the_load() -> None:
    requests = RequestGenerator(num_requests=200).generate(math.inf)
    one = simulate_serving(requests, make_config(), llama_cost())
    two = simulate_serving(requests, make_config(num_replicas=2), llama_cost())
    assert len(two.requests) == 200 and len(two.samples) == 2
    assert 1.3 < one.seconds / two.seconds < 2.0
    # A prefix is found where it was computed.
    generator = RequestGenerator(num_requests=60, prefix_groups=6, prefix_tokens=640)
    caching = make_config(num_replicas=3, enable_prefix_caching=True)
    shared = simulate_serving(generator.generate(2.0), caching, llama_cost())
    assert shared.prefix_cache_hits == 54 * 640


def test_stages_of_a_pipeline_work_at_the_same_time() -> None:
    requests = RequestGenerator(
        num_requests=64, input_tokens="fixed:64", output_tokens="fixed:64"
    ).generate(math.inf)
    one = simulate_serving(requests, make_config(), llama_cost())
    four = simulate_serving(requests, make_config(num_stages=4), llama_cost())
    # Steps of 16 requests read the same weights as steps of 64, but four of them run at a time.
    assert 0.5 < four.seconds / one.seconds < 1.2
    assert four.summary()["itl_p50"] == pytest.approx(one.summary()["itl_p50"], rel=0.3)
    assert [len(request.token_times) for request in four.requests] == [64] * 64


def test_homes_are_padded_to_the_fullest() -> None:
    cost = llama_cost()
    empty = StepLoad()
    full = StepLoad(32, 512.0, 0, 0.0, 32)
    assert cost.seconds([full, empty]) == cost.seconds([full, full]) == cost.seconds([full])
    requests = RequestGenerator(num_requests=40).generate(20.0)
    result = simulate_serving(requests, make_config(num_homes=3), cost)
    assert len(result.requests) == 40


# ---- measured steps -------------------------------------------------------------------------


class RecordingCost:
    """A cost that keeps what it was asked, as an engine would."""

    def __init__(self, cost: StepCost) -> None:
        self.cost = cost
        self.records: list[StepRecord] = []

    def seconds(self, loads: Sequence[StepLoad]) -> float:
        spent = self.cost.seconds(loads)
        load = loads[0]
        self.records.append(
            StepRecord(load.decode_tokens, load.mean_context, load.prompt_tokens, spent)
        )
        return spent


def test_a_step_table_predicts_the_run_it_was_measured_in() -> None:
    generator = RequestGenerator(num_requests=150)
    recorder = RecordingCost(llama_cost())
    config = make_config(max_num_batched_tokens=512)
    run = simulate_serving(generator.generate(30.0), config, recorder).summary()
    table = StepTable(recorder.records)
    again = simulate_serving(generator.generate(30.0), config, table).summary()
    assert len(table.records) < len(recorder.records) / 2
    assert again["output_tokens_per_second"] == pytest.approx(
        run["output_tokens_per_second"], rel=0.05
    )
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert again[name] == pytest.approx(run[name], rel=0.1)
    # Other requests and another rate, as long as steps are alike.
    other = replace(generator, seed=5)
    right = simulate_serving(other.generate(20.0), config, llama_cost()).summary()
    found = simulate_serving(other.generate(20.0), config, table).summary()
    for name in ("ttft_p50", "ttft_p99", "itl_p50", "itl_p99"):
        assert found[name] == pytest.approx(right[name], rel=0.1)


def test_steps_outside_of_a_table_follow_the_trend() -> None:
    cost = llama_cost()
    chance = random.Random(0)
    records = []
    for _ in range(300):
        decodes = chance.randint(1, 64)
        context = float(chance.randint(100, 2000))
        prompts = chance.choice([0, 0, chance.randint(2, 512)])
        load = StepLoad(decodes, context, prompts, prompts**2 / 2, decodes)
        records.append(StepRecord(decodes, context, prompts, cost.seconds([load])))
    table = StepTable(records)
    for load in (StepLoad(128, 4000.0, 0, 0.0, 128), StepLoad(8, 500.0, 2048, 2048**2 / 2, 9)):
        assert table.seconds([load]) == pytest.approx(cost.seconds([load]), rel=0.2)


def test_step_tables_are_read_and_refused(tmp_path: Path) -> None:
    rows = [
        {"decode_tokens": 4, "mean_context": 100.0, "prompt_tokens": 0, "seconds": 0.01},
        {"decode_tokens": 0, "mean_context": 0, "prompt_tokens": 64, "seconds": 0.02},
    ]
    path = tmp_path / "steps.json"
    for text in (json.dumps(rows), "\n".join(map(json.dumps, rows))):
        path.write_text(text)
        table = load_step_table(path)
        assert table.seconds([StepLoad(4, 100.0)]) == pytest.approx(0.01, rel=0.05)
        assert table.seconds([StepLoad(0, 0.0, 64)]) == pytest.approx(0.02, rel=0.05)
    for text, message in (
        ("", "0 steps with decoding tokens and 0 with prompt"),
        (json.dumps(rows[:1]), "1 steps with decoding tokens and 0 with prompt"),
        ("{", "step 1 has decode_tokens=None"),
        (json.dumps([{**rows[0], "seconds": 0}]), "seconds=0"),
        (json.dumps([{**rows[0], "seconds": True}]), "seconds=True"),
        ('[{"decode_tokens": NaN}]', "decode_tokens=nan"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            load_step_table(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        load_step_table(tmp_path / "other.json")


# ---- requests -------------------------------------------------------------------------------


def test_generated_requests_have_the_given_distributions() -> None:
    generator = RequestGenerator(
        num_requests=4000, input_tokens="uniform:100:1024", output_tokens="exponential:128"
    )
    requests = generator.generate(10.0)
    assert requests == generator.generate(10.0)
    assert np.mean([one.input_tokens for one in requests]) == pytest.approx(562, rel=0.03)
    assert np.mean([one.output_tokens for one in requests]) == pytest.approx(128, rel=0.06)
    for burstiness in (0.25, 1.0, 4.0):
        arrivals = [one.arrival for one in replace(generator, burstiness=burstiness).generate(10.0)]
        gaps = np.diff(arrivals)
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness**-0.5, rel=0.1)
    # The rate changes only the times.
    faster = generator.generate(20.0)
    assert [one.arrival for one in faster] == pytest.approx([one.arrival / 2 for one in requests])
    assert [one.input_tokens for one in faster] == [one.input_tokens for one in requests]
    assert {one.arrival for one in generator.generate(math.inf)} == {0.0}
    assert parse_lengths("fixed:7", "lengths")(random.Random(0)) == 7


@pytest.mark.parametrize(
    "text",
    ["", "gamma", "fixed:0", "fixed:x", "uniform:5:1", "normal:5", "fixed:nan", "gamma:1:2:3"],
)
def test_wrong_distributions_are_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not a distribution of lengths"):
        parse_lengths(text, "input_tokens")


def test_traces_are_read_and_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"arrival": 2.5, "input_tokens": 9, "output_tokens": 3}\n\n'
        '{"arrival": 1, "input_tokens": 8, "output_tokens": 2, "prefix_group": "a"}\n'
        '{"input_tokens": 7, "output_tokens": 1, "prefix_group": "a", "prefix_tokens": 99}\n'
    )
    assert read_trace(path) == [
        SimulatedRequest(0.0, 7, 1, "a", 7),
        SimulatedRequest(1.0, 8, 2, "a", 8),
        SimulatedRequest(2.5, 9, 3),
    ]
    for text, message in (
        ("", "has no requests"),
        ("[]", "not a JSON object"),
        ("{", "not a JSON object"),
        ('{"arival": 1}', "Did you mean|arival is not a known key"),
        ('{"arrival": -1}', "arrival=-1 is not a time"),
        ('{"arrival": Infinity}', "arrival=inf is not a time"),
        ('{"input_tokens": 1}', "output_tokens=None"),
        ('{"input_tokens": 0, "output_tokens": 1}', "input_tokens=0"),
        ('{"input_tokens": NaN, "output_tokens": 1}', "input_tokens=nan"),
        ('{"input_tokens": 1, "output_tokens": 1, "prefix_group": 5}', "prefix_group=5"),
    ):
        path.write_text(text)
        with pytest.raises(DataError, match=message):
            read_trace(path)
    with pytest.raises(DataError, match="cannot be read: No such file"):
        read_trace(tmp_path / "other.jsonl")


# ---- results --------------------------------------------------------------------------------


def test_percentiles_are_those_of_numpy() -> None:
    chance = random.Random(1)
    for size in (1, 2, 7, 100):
        values = sorted(chance.random() for _ in range(size))
        for share in (0.0, 0.5, 0.9, 0.99, 1.0):
            assert percentile(values, share) == pytest.approx(np.quantile(values, share))
    assert percentile([], 0.5) == 0.0


def result_of(times: list[RequestTimes]) -> ServingResult:
    return ServingResult(times, [], 1, 1, 1, 0, 0, 0, 10, [[]])


def test_latencies_of_a_request() -> None:
    result = result_of([RequestTimes(1.0, [2.0, 2.5, 4.0]), RequestTimes(3.0, [3.25])])
    assert result.latencies() == {
        "ttft": [1.0, 0.25],
        "itl": [0.5, 1.5],
        "tpot": [1.0],
        "e2e": [3.0, 0.25],
    }
    found = result.summary()
    assert found["ttft_mean"] == 625.0 and found["itl_p50"] == 1000.0
    assert result.seconds == 3.0 and found["output_tokens_per_second"] == pytest.approx(4 / 3)


def test_the_largest_rate_is_bisected() -> None:
    tried = []

    def simulate(rate: float) -> ServingResult:
        """A server of 10 requests/s whose time to first token is 1 / (10 - rate)."""
        tried.append(rate)
        wait = 1 / (10 - rate) if rate < 10 else 100.0
        times = [RequestTimes(0.0, [wait]), RequestTimes(0.0, [0.2])]
        return result_of(times if rate < math.inf else [RequestTimes(0.0, [1.0])] * 3)

    trials = find_max_rate(simulate, {"ttft_p99": 500.0}, precision=0.001)
    best = max(trial.rate for trial in trials if trial.holds)
    # 99 % of the way from 0.2 to 1 / (10 - rate) is half a second.
    assert best == pytest.approx(10 - 1 / (0.2 + 0.3 / 0.99), rel=0.002)
    assert [trial.rate for trial in trials] == sorted(trial.rate for trial in trials)
    assert len(tried) < 20
    together = find_max_rate(simulate, {"ttft_p99": 1e9}, precision=0.01)
    assert [trial.rate for trial in together] == [math.inf]
    none = find_max_rate(simulate, {"ttft_p99": 1e-3}, precision=0.01)
    assert not any(trial.holds for trial in none) and len(none) < 20


def test_the_largest_rate_holds_the_limits() -> None:
    generator = RequestGenerator(num_requests=80)
    cost = llama_cost()
    config = make_config(max_num_batched_tokens=512)
    limits = {"ttft_p99": 150.0, "itl_p99": 40.0}
    trials = find_max_rate(
        lambda rate: simulate_serving(generator.generate(rate), config, cost),
        limits,
        precision=0.05,
    )
    holding = [trial for trial in trials if trial.holds]
    assert 0 < len(holding) < len(trials) < 20
    assert all(holding[-1].summary[name] <= limit for name, limit in limits.items())
