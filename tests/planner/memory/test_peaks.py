"""Turns and stages that need not be looked at have no peak that is higher."""

from __future__ import annotations

from typing import Any

import pytest

from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.pipeline import memory_replay
from ranvier.planner.comm_volume import find_stage_starts
from ranvier.planner.memory.total import fullest_stages, peak_memory
from ranvier.planner.model_spec import load_shipped_spec

FLOW = ActivationShape(1, 512, itemsize=2, statistics_itemsize=4)


@pytest.mark.parametrize(
    "layout",
    [
        {"pipe": 4, "virtual_stages": 3, "global_batch": 32},
        {"pipe": 4, "virtual_stages": 2, "global_batch": 16, "depth": 2, "recompute": "full"},
        {"pipe": 4, "virtual_stages": 3, "global_batch": 24, "depth": 2, "vocab_over_pipe": True},
        {"pipe": 8, "global_batch": 32, "data": 2, "recompute": "selective"},
        {"pipe": 2, "global_batch": 16, "schedule": "zero-bubble"},
        {"depth": 4, "global_batch": 32},
    ],
    ids=str,
)
@pytest.mark.parametrize("size", ["llama3-8b", "gpt2"])
def test_the_fullest_turns_are_enough(
    size: str, layout: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, model = Plan(micro_batch=1, **{"data": 1, **layout}), load_shipped_spec(size)
    simulated = plan.schedule != Plan().schedule

    def totals() -> list[int]:
        kept = {"simulated": simulated, "keeps": False}
        return [
            peak_memory(model, plan, FLOW, stage=i, **kept).total_bytes for i in range(plan.pipe)
        ]

    found, counts = totals(), list[tuple[int, int]]()
    fewer = memory_replay._drop_covered
    monkeypatch.setattr(memory_replay, "_drop_covered", lambda every: _all(fewer, counts, every))
    for kept in (memory_replay._interleaved_snapshots, memory_replay.peak_snapshots):
        kept.cache_clear()
    try:
        assert totals() == found
    finally:
        for kept in (memory_replay._interleaved_snapshots, memory_replay.peak_snapshots):
            kept.cache_clear()
    assert all(less <= more for less, more in counts)
    assert any(less < more for less, more in counts) == (plan.pipe > 1)


def _all(fewer: Any, counts: list[tuple[int, int]], found: Any) -> Any:
    """All turns, each a kind; notes how many there are, and how many `fewer` leaves."""
    every = [*found]
    counts.append((sum(map(len, fewer(every))), len(every)))
    return tuple((one,) for one in every)


@pytest.mark.parametrize(
    ("size", "layout"),
    [
        ("llama3-8b", {"pipe": 4, "virtual_stages": 4}),
        ("llama3-405b", {"pipe": 11, "recompute": "full"}),
        ("mixtral-8x7b", {"pipe": 5}),
        ("ted-6.7b-16e", {"pipe": 12, "recompute": "full"}),
        ("deepseek-moe-16b", {"pipe": 6, "depth": 2}),
    ],
)
def test_the_worst_stage_is_among_those_with_parts_of_their_own(
    size: str, layout: dict[str, Any]
) -> None:
    model = load_shipped_spec(size)
    plan = Plan(micro_batch=1, data=1, global_batch=4 * layout["pipe"], **layout)
    every = [
        peak_memory(model, plan, FLOW, simulated=False, stage=i).total_bytes
        for i in range(plan.pipe)
    ]
    assert peak_memory(model, plan, FLOW, simulated=False).total_bytes == max(every)
    few = fullest_stages(
        model,
        plan.pipe,
        plan.virtual_stages,
        find_stage_starts(model, plan, FLOW.seq),
        plan.vocab_over_pipe,
    )
    assert len(few) < plan.pipe and (size == "llama3-8b" or every.index(max(every)) > 0)
