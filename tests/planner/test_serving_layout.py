"""Costs of serving steps: the roofline on one device and on grids."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ranvier.config.plan import Plan
from ranvier.planner.cluster import load_cluster
from ranvier.planner.model_spec import load_shipped_spec
from ranvier.planner.serving_layout import GridCommunication, serving_layout
from ranvier.planner.time.serving_step import RooflineCost, StepLoad, largest_budget

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


def test_the_roofline_is_the_formula() -> None:
    cost = llama_cost(efficiency=0.5, host_seconds=1e-3)
    block = 2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    head = 128256 * 4096
    read = 2 * (32 * block + head)
    assert cost.weight_bytes == read
    kv = 4 * 8 * 128 * 32
    (attention,) = cost.attention
    assert attention.kv_bytes == kv
    # Decodes read weights, keys and values.
    spent = cost.seconds([StepLoad(64, 2048.0, 0, 0.0, 64)])
    assert spent == pytest.approx(1e-3 + 2 * (read + 64 * 2048 * kv) / BANDWIDTH)
    # A prompt of 2,048 tokens after 1,024 others is limited by compute.
    pairs = 2048 * (1024 + 1024)
    work = (2 * 32 * block * 2048 + 2 * head) / FLOPS
    seen = 4 * 32 * 32 * 128 * pairs / ATTENTION_FLOPS
    spent = cost.seconds([StepLoad(0, 0.0, 2048, pairs, 1)])
    assert spent == pytest.approx(1e-3 + 2 * (work + seen))


@pytest.mark.parametrize(
    ("size", "milliseconds"),
    [("qwen3-0.6b", 0.277), ("llama3-1b", 0.575), ("llama3-8b", 3.49), ("qwen3-8b", 3.52)],
)
def test_limits_at_batch_one(size: str, milliseconds: float) -> None:
    cost = serving_layout(load_shipped_spec(size), Plan(data=1), load_cluster("dgx-h200")).cost
    assert 1e3 * cost.weight_bytes / BANDWIDTH == pytest.approx(milliseconds, rel=0.003)


def grid_seconds(size: str, decodes: int, prompts: int = 0, **degrees: int | str) -> float:
    plan = replace(Plan(data=1), **degrees)  # type: ignore[arg-type]
    layout = serving_layout(load_shipped_spec(size), plan, load_cluster("dgx-h200"))
    homes = layout.num_homes
    load = StepLoad(decodes // homes, 2048.0, prompts // homes, prompts**2 / homes / 2, 1)
    return layout.cost.seconds([load] * homes)


def test_grids_split_weights_and_caches() -> None:
    model = load_shipped_spec("llama3-8b")
    cluster = load_cluster("dgx-h200")
    whole = serving_layout(model, Plan(data=1), cluster)
    assert whole.cost.communication is None
    for degrees, weights, cache, homes in (
        ({"row": 4}, 4, 4, 1),
        ({"row": 16}, 16, 8, 1),  # eight KV heads: ranks beyond them hold copies
        ({"row": 2, "col": 2}, 4, 2, 2),
        ({"row": 2, "col": 2, "col_splits": "features"}, 4, 4, 1),
        ({"pipe": 2}, 2, 2, 1),
        ({"depth": 2}, 2, 1, 2),
        ({"data": 2}, 1, 1, 1),
    ):
        part = serving_layout(model, replace(Plan(data=1), **degrees), cluster)
        assert part.weight_bytes == pytest.approx(whole.weight_bytes / weights)
        assert part.kv_bytes_per_token == pytest.approx(whole.kv_bytes_per_token / cache)
        assert part.num_homes == homes
        assert part.num_blocks(64) > whole.num_blocks(64) or degrees == {"data": 2}


def test_grids_are_faster_where_they_should_be() -> None:
    one = grid_seconds("llama3-8b", 64)
    assert grid_seconds("llama3-8b", 64, row=4) < one
    assert grid_seconds("llama3-8b", 64, row=2, col=2) < one
    # A pipeline does not make a step shorter, and gathering weights makes it much longer.
    assert one < grid_seconds("llama3-8b", 64, pipe=4) < 1.1 * one
    assert grid_seconds("llama3-8b", 64, depth=4) > 2 * one
    assert grid_seconds("qwen3-30b-a3b", 64, expert=4) < grid_seconds("qwen3-30b-a3b", 64)


def test_few_tokens_are_not_split_over_row() -> None:
    plan = replace(Plan(data=1), row=4)
    layout = serving_layout(load_shipped_spec("llama3-8b"), plan, load_cluster("dgx-h200"))
    talk = layout.cost.communication
    assert isinstance(talk, GridCommunication)
    # Two all-reduces per layer, one for the embedding.
    assert sum(rate.count for rate in talk.whole_tokens if rate.op == "all_reduce") == 2 * 32 + 1
    assert not any(rate.op == "all_gather" for rate in talk.whole_tokens)
    # One token is padded to four if it is split.
    layouts = (talk._total_seconds(talk.split_tokens, 4), talk._total_seconds(talk.whole_tokens, 1))
    assert talk.seconds(1, 1) == min(layouts) + talk._total_seconds(talk.sampled, 1)
    many = talk._total_seconds(talk.split_tokens, 4096)
    assert talk.seconds(4096, 1) == many + talk._total_seconds(talk.sampled, 1)


def test_context_splits_the_cache_attention_and_prompts() -> None:
    model = load_shipped_spec("llama3-8b")
    cluster = load_cluster("dgx-h200")
    whole, part = (
        serving_layout(model, replace(Plan(data=1), context=context), cluster) for context in (1, 4)
    )
    assert part.weight_bytes == whole.weight_bytes and part.num_homes == 1
    assert part.kv_bytes_per_token == whole.kv_bytes_per_token / 4
    # A block of four pages is one page on each rank, so a sequence may be four times as long.
    assert part.num_blocks(4 * 64) == whole.num_blocks(64)
    talk = part.cost.communication
    assert isinstance(talk, GridCommunication)
    # A decode gathers outputs and log-sum-exps, a prompt q, k and v, and sends its results.
    assert [(rate.op, rate.count) for rate in talk.whole_queries] == [("all_gather", 32)]
    assert talk.whole_queries[0].bytes_per_token == 4 * 4 * 32 * 129
    assert [rate.bytes_per_token for rate in talk.split_queries] == [2 * 48 * 128, 4 * 32 * 129]
    silent = replace(part.cost, communication=None)
    prompt = StepLoad(0, 0.0, 8192, 8192**2 / 2, 0)
    ratio = whole.cost.seconds([prompt]) / silent.seconds([prompt])
    assert 3.5 < ratio <= 4.0
    decode = StepLoad(1, 1e6, 0, 0.0, 1)
    ratio = whole.cost.seconds([decode]) / silent.seconds([decode])
    assert 2.5 < ratio < 4.0, "all ranks read all weights"


def test_experts_are_read_as_tokens_use_them() -> None:
    cost = serving_layout(
        load_shipped_spec("qwen3-30b-a3b"), Plan(data=1), load_cluster("dgx-h200"), efficiency=1.0
    ).cost
    assert cost.expert_share == pytest.approx(8 / 128)
    # A token reads its 8 of 128 experts in 48 layers: 3.62 GB.
    assert cost.expert_bytes * cost.expert_share == pytest.approx(3.62e9, rel=0.01)
    alone = cost.seconds([StepLoad(1, 1.0, 0, 0.0, 1)])
    many = cost.seconds([StepLoad(128, 1.0, 0, 0.0, 128)])
    everything = (cost.weight_bytes + cost.expert_bytes) / cost.bandwidth
    assert alone < 0.15 * everything and everything * 0.9 < many < everything * 1.2


def test_the_largest_budget_holds_a_latency() -> None:
    cost = llama_cost()
    decodes = StepLoad(32, 600.0, 0, 0.0, 32)
    budget = largest_budget(cost, decodes, 0.030, most=8192)
    assert 256 <= budget < 8192 and budget % 64 == 0

    def seconds(total: int) -> float:
        prompts = total - 32
        return cost.seconds([decodes._replace(prompt_tokens=prompts, prompt_pairs=prompts**2 / 2)])

    assert seconds(budget) <= 0.030 < seconds(budget + 64)
    assert largest_budget(cost, decodes, 1e-9, most=8192) == 64
    assert largest_budget(cost, decodes, 10.0, most=8192) == 8192
