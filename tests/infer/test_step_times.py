"""The budget of a step keeps a latency, by measured steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ranvier.infer.arrivals import RequestGenerator
from ranvier.infer.block_pool import BlockPool
from ranvier.infer.request import Request
from ranvier.infer.sampling_params import SamplingParams
from ranvier.infer.scheduler import Scheduler
from ranvier.infer.sequence import Sequence
from ranvier.infer.simulator import ServingConfig, ServingResult, simulate_serving
from ranvier.infer.step_times import MIN_PROMPT_TOKENS, StepTimes, choose_token_budget
from ranvier.planner.time.serving_step import AttentionWork, RooflineCost

MOST = 2048


def measured(*steps: tuple[int, float]) -> StepTimes:
    """The sums over steps of so many tokens and seconds."""
    times = StepTimes()
    for tokens, seconds in steps:
        times = times.add(tokens, seconds)
    return times


def test_the_line_through_measured_steps_is_found() -> None:
    start, slope = measured(*((n, 0.004 + 1e-5 * n) for n in (1, 64, 500, 64, 1))).fit()
    assert (start, slope) == pytest.approx((0.004, 1e-5))
    # Neither part is negative, and steps of one size are proportional.
    assert measured((10, 0.02), (100, 0.01)).fit() == pytest.approx((0.0148, 0.0), rel=0.02)
    assert measured((10, 0.001), (100, 0.02)).fit()[0] == 0.0
    assert measured((8, 0.004), (8, 0.004)).fit() == pytest.approx((0.0, 0.0005))


def test_recent_steps_count_most() -> None:
    steps = [(n, 0.001 + 1e-5 * n) for n in (1, 512)] * 50
    later = [(n, 0.010 + 4e-5 * n) for n in (1, 512)] * 200
    assert measured(*steps, *later).fit() == pytest.approx((0.010, 4e-5), rel=0.01)


def test_a_budget_takes_the_target_at_most() -> None:
    times = measured(*((n, 0.004 + 1e-5 * n) for n in (1, 64, 500)))
    assert choose_token_budget(times, 0.010, num_decodes=8, most=MOST) in (499, 500)
    assert choose_token_budget(times, 1.0, num_decodes=8, most=MOST) == MOST
    # Requests that run are never left out, and new ones progress.
    least = 8 + MIN_PROMPT_TOKENS
    assert choose_token_budget(times, 0.001, num_decodes=8, most=MOST) == least
    assert choose_token_budget(StepTimes(), 0.010, num_decodes=8, most=MOST) == least
    assert choose_token_budget(times, 0.001, num_decodes=0, most=MOST) == MOST
    assert choose_token_budget(times, 0.001, num_decodes=8, most=10) == 10


@given(
    st.lists(st.tuples(st.integers(1, 10_000), st.floats(1e-9, 1e3)), max_size=30),
    st.floats(1e-3, 60.0),
    st.integers(0, 300),
    st.integers(1, 10_000),
)
def test_a_budget_is_in_its_bounds(
    steps: list[tuple[int, float]], target: float, num_decodes: int, most: int
) -> None:
    budget = choose_token_budget(measured(*steps), target, num_decodes=num_decodes, most=most)
    assert min(most, num_decodes + 1) <= budget <= most


def test_a_scheduler_with_a_target_cuts_prompts_only_next_to_decodes() -> None:
    scheduler = Scheduler(
        [BlockPool(100, 16)],
        max_num_batched_tokens=512,
        max_num_seqs=8,
        max_model_len=1000,
        target_itl_seconds=0.01,
        enable_prefix_caching=False,
    )

    def add(name: str, length: int) -> None:
        request = Request(
            request_id=name, prompt_token_ids=(1,) * length, params=SamplingParams(max_tokens=9)
        )
        scheduler.add(Sequence(request=request, block_size=16, max_model_len=1000))

    add("first", 300)
    step = scheduler.schedule()
    assert step.num_tokens == 300
    scheduler.finish_step(step, {"first": [5]})
    scheduler.record_seconds(step, 0.020)
    add("second", 400)
    step = scheduler.schedule()
    # 0.9 · 10 ms at 20 ms / 300 tokens.
    assert step.num_tokens in (134, 135) and step.items[0].request_id == "first"


def serve(target_seconds: float) -> ServingResult:
    """Long prompts between running answers; a step takes 4 ms and 20 us per token."""
    cost = RooflineCost(
        weight_bytes=0.0,
        flops_per_token=20e-6,
        head_flops=0.0,
        attention=(AttentionWork(0.0, 0.0),),
        bandwidth=1.0,
        flops=1.0,
        attention_flops=1.0,
        efficiency=1.0,
        host_seconds=4e-3,
    )
    generator = RequestGenerator(
        num_requests=200, input_tokens="fixed:900", output_tokens="fixed:40", seed=1
    )
    config = ServingConfig(
        max_num_batched_tokens=MOST,
        max_model_len=10_000,
        num_blocks=10_000,
        enable_prefix_caching=False,
        target_itl_seconds=target_seconds,
    )
    return simulate_serving(generator.generate(12.0), config, cost)


def test_the_simulator_keeps_the_target() -> None:
    free, held = (serve(target).summary() for target in (0.0, 0.012))
    assert free["itl_p99"] > 20.0
    assert held["itl_p99"] <= 12.0
    assert held["num_requests"] == free["num_requests"] == 200
