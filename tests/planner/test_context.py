"""Context in the planner: what it costs, when it is searched and chosen, and why."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from machines import machine
from ranvier.cli.plan import PlanOptions, read_document_lengths
from ranvier.config.plan import ContextOrder, Plan
from ranvier.config.run import run_from_tables
from ranvier.cost.context_attention import KVGatherLayout
from ranvier.cost.layers import ActivationShape
from ranvier.errors import PlanError
from ranvier.planner import cluster, explain, model_spec, predict, search
from ranvier.planner.comm_volume import ShardingKey, step_comm_volume
from ranvier.planner.document_lengths import DocumentLengths, read_histogram
from ranvier.planner.predict import Candidate, Workload
from ranvier.planner.request import can_split_context
from ranvier.planner.search import SearchRequest
from ranvier.planner.time.communication import RankGroups
from ranvier.planner.time.context_attention import ContextTime, context_attention_time
from ranvier.sharding import order_tokens
from ranvier.train.layout import build_workload, choose_layout

SIZE = "llama3-8b"


def request(*, seq: int, batch: int, nodes: int = 1, size: str = SIZE) -> SearchRequest:
    """A request on nodes of eight H100."""
    machine = cluster.load_cluster("dgx-h100").with_size(nodes=nodes)
    return SearchRequest(Workload(model_spec.load_shipped_spec(size), seq, batch), machine)


def timed(
    plan: Plan, *, seq: int = 131072, documents: DocumentLengths | None = None
) -> ContextTime:
    """Attention over context of a block of llama3-8b."""
    machine = cluster.load_cluster("dgx-h100").with_size(nodes=1)
    model = model_spec.load_shipped_spec(SIZE)
    block = next(part for part in model.parts if part.is_block)
    ranks = RankGroups(plan, plan.axis_order, machine.per_node)["context",]
    flow = ActivationShape(plan.micro_batch, seq, 2, 4)
    key = ShardingKey.from_plan(plan).activation_key
    return context_attention_time(model, block, key, flow, documents, machine, ranks)


def step(plan: Plan, **changes: Any) -> predict.Prediction:
    """The prediction of llama3-8b with one sample of 131,072 tokens."""
    asked = request(seq=131072, batch=plan.global_batch)
    job = replace(asked.workload, **changes)
    return predict.predict_step(job, Candidate(plan), asked.cluster)


CONTEXT8 = Plan(data=1, context=8, global_batch=1, micro_batch=1)


@pytest.mark.parametrize("window", [0, 1, 9, 40])
@pytest.mark.parametrize("order", ["contiguous", "zigzag", "balanced"])
def test_counts_of_keys_are_those_of_their_rows(order: ContextOrder, window: int) -> None:
    draw = random.Random(f"{order} {window}")
    for ranks in (2, 3, 8):
        lengths = [draw.randint(1, 60) for _ in range(9)]
        lengths[-1] += -sum(lengths) % ranks
        one = order_tokens(lengths, ranks, order)
        for rank in range(ranks):
            layout = KVGatherLayout((one, one), rank, window)
            assert layout.num_sent == sum(map(len, layout.sent_rows))
            assert layout.fetched_counts[rank] == sum(map(len, layout.received_keys))
            assert layout.num_rows + layout.fetched_counts[rank] == layout.num_keys


def test_bytes_of_equal_samples_are_those_of_given_orders() -> None:
    model = model_spec.load_shipped_spec(SIZE)
    plan = Plan(data=1, context=4, col=2, global_batch=4, micro_batch=4)
    plain = ActivationShape(4, 4096, 2, 4)
    orders = (order_tokens((4096,), 4, "balanced"),) * 4
    several = replace(plain, token_orders=orders)
    for index in range(4):
        one, other = (
            step_comm_volume(model, plan, flow, context_index=index) for flow in (plain, several)
        )
        assert one.bytes_by_axis() == other.bytes_by_axis()
    assert one.bytes_by_axis()["all_to_all", ("context",)] > 0


def test_recomputed_blocks_fetch_no_keys_again() -> None:
    model = model_spec.load_shipped_spec(SIZE)
    flow = ActivationShape(1, 131072, 2, 4)
    plans = (CONTEXT8, replace(CONTEXT8, recompute="full"))
    counted = [step_comm_volume(model, plan, flow).bytes_by_axis() for plan in plans]
    assert counted[0]["all_to_all", ("context",)] == counted[1]["all_to_all", ("context",)]
    full = step(replace(CONTEXT8, recompute="full")).seconds_by_part["recompute"]
    serial = step(Plan(data=1, row=8, global_batch=1, micro_batch=1, recompute="full"))
    # With row, attention is recomputed as well.
    assert full < 0.6 * serial.seconds_by_part["recompute"]


def test_orders_and_overlap_are_priced() -> None:
    plan = replace(CONTEXT8, context_attention="kv_gather")
    balanced = step(plan).seconds_by_part
    contiguous = step(replace(plan, context_order="contiguous")).seconds_by_part
    assert contiguous["attention"] == pytest.approx(1.875 * balanced["attention"], rel=1e-3)
    assert timed(plan).balance == pytest.approx(1.0, abs=1e-3)
    # Ulysses has all tokens of some heads on each rank.
    chosen = step(replace(CONTEXT8, context_order="contiguous")).seconds_by_part
    assert chosen["attention"] == pytest.approx(balanced["attention"], rel=1e-3)
    waiting = step(replace(plan, overlap=("dx", "dw", "weight_gather"))).seconds_by_part
    assert waiting["context"] > 1.5 * balanced["context"] > 0.0


def test_methods_are_priced_by_what_the_slowest_rank_moves() -> None:
    gathers, rings, exchanges = (
        timed(replace(CONTEXT8, context_attention=method))
        for method in ("kv_gather", "ring", "ulysses")
    )
    # The first rank of one document fetches the keys of all others; gradients are in fp32.
    assert gathers.forward == pytest.approx(rings.forward, rel=0.1)
    assert gathers.backward == pytest.approx(3 * gathers.forward, rel=0.1)
    assert exchanges.forward < 0.7 * gathers.forward
    assert exchanges.hidden_share == 0.0 < gathers.hidden_share < rings.hidden_share == 1.0


def test_documents_that_are_whole_on_a_rank_fetch_nothing() -> None:
    short = DocumentLengths.from_histogram({1024: 1}, 131072)
    found = timed(CONTEXT8, documents=short)
    assert found.forward == found.backward == 0.0 and found.balance <= 1.05
    assert short.score_share() == pytest.approx(1 / 128, rel=0.01)
    long = DocumentLengths.from_histogram({500: 1, 1000: 1, 90_000: 1}, 131072)
    assert 0.0 < timed(CONTEXT8, documents=long).forward < timed(CONTEXT8).forward
    attention = [
        step(CONTEXT8, documents=one).seconds_by_part["attention"] for one in (short, None)
    ]
    assert attention[0] < 0.02 * attention[1]


def test_typical_documents_fill_samples_and_continue_in_the_next() -> None:
    found = DocumentLengths.from_histogram({3000: 7}, 1000)
    assert set(found.samples) == {(1000,)}
    found = DocumentLengths.from_histogram({300: 2}, 1000)
    assert found.samples[:2] == ((300, 300, 300, 100), (200, 300, 300, 200))
    assert found.samples == DocumentLengths.from_histogram({300: 2}, 1000).samples


@pytest.mark.parametrize(
    ("seq", "batch", "degrees"),
    [
        (8192, 8, (1,)),  # as many samples as ranks
        (8192, 4, (1, 2)),  # at least 4,096 tokens on a rank
        (4096, 1, (1,)),
        (131072, 8, (1, 2, 4, 8)),  # a sample may not fit on a rank
    ],
)
def test_context_is_searched_only_where_it_may_help(
    seq: int, batch: int, degrees: tuple[int, ...]
) -> None:
    asked = request(seq=seq, batch=batch)
    assert asked.context_degrees == degrees
    assert ("context" in asked.searched_axes) == (len(degrees) > 1)


def test_a_given_degree_of_context_is_kept() -> None:
    asked = request(seq=4096, batch=8)
    fixed = frozenset({"context", "pipe", "col"})
    asked = replace(asked, plan=Plan(context=2), fixed_fields=fixed, allows_compile=False)
    found = search.search_layouts(asked)
    assert {one.plan.context for one in found.feasible_candidates} == {2}
    assert not [*explain.explain_context(found)]


def test_one_long_sample_is_split_and_many_short_ones_are_not() -> None:
    unpiped: dict[str, Any] = {
        "plan": Plan(pipe=1),
        "fixed_fields": frozenset({"pipe"}),
        "allows_compile": False,
    }
    long = search.search_layouts(replace(request(seq=131072, batch=1), **unpiped))
    assert long.best.plan.context > 1
    (why,) = explain.explain_context(long)
    assert why.startswith(f"context {long.best.plan.context}: 1 sample of 131,072 tokens per step")
    assert "The best layout without context" in why and why in explain.summarize_choice(long)
    short = search.search_layouts(replace(request(seq=8192, batch=64), **unpiped))
    assert short.best.plan.context == 1
    assert [*explain.explain_context(short)] == [
        "Context is not used: 64 samples of 8,192 tokens per step are enough for 8 ranks."
    ]


def test_weights_are_gathered_over_context_where_they_need_much_memory() -> None:
    asked = request(seq=131072, batch=8, nodes=8, size="llama3-70b")
    # 424 GB of weights and gradients over 16, 1 and 64 ranks.
    found = search.plans_of_degrees(asked, {"context": 4, "row": 8, "pipe": 2})
    assert {plan.shard_weights_over for plan in found} == {"depth", "depth_context"}
    found = search.plans_of_degrees(asked, {"context": 64})
    assert {plan.shard_weights_over for plan in found} == {"depth_context"}
    found = search.plans_of_degrees(asked, {"pipe": 8, "row": 8, "context": 8})
    assert {plan.shard_weights_over for plan in found} == {"depth"}


@pytest.mark.full
@pytest.mark.parametrize(("seq", "batch"), [(131072, 8), (8192, 2048)])
def test_512_devices_split_few_long_samples(seq: int, batch: int) -> None:
    found = search.search_layouts(request(seq=seq, batch=batch, nodes=64, size="llama3-70b"))
    other = next(one for one in found.feasible_candidates if one.plan.context == 1)
    ratio = other.prediction.step_seconds / found.best.prediction.step_seconds
    (why,) = explain.explain_context(found)
    if seq == 131072:
        assert found.best.plan.context > 1 and ratio >= 1.2 and why.startswith("context ")
    else:
        assert found.best is other and "are enough for 512 ranks" in why


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("12\n0\n", "Line 2 of FILE is '0'. The length of a document"),
        ("12 0\n", "Line 1 of FILE is '12 0'"),
        ("7\n-3\n", "Line 2 of FILE is '-3'"),
        ("7\n1.5\n", "Line 2 of FILE is '1.5'"),
        ("7 8 9\n", "Line 1 of FILE is '7 8 9'"),
        ("9" * 5000, "Line 1 of FILE is '9999"),
        ("# nothing\n", "FILE has no document lengths"),
        (None, "FILE cannot be read"),
    ],
)
def test_a_wrong_file_of_lengths_is_one_clear_message(
    text: str | None, message: str, tmp_path: Path
) -> None:
    file = tmp_path / "lengths.txt"
    if text is not None:
        file.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_histogram(str(file))
    (problem,) = caught.value.problems
    assert message.replace("FILE", str(file)) in problem and problem.count(". ") == 2


def test_a_file_of_lengths_may_count_documents(tmp_path: Path) -> None:
    file = tmp_path / "lengths.csv"
    file.write_text("100 # short ones\n100, 2\n\n7 3\n")
    assert read_histogram(str(file)) == {100: 3, 7: 3}


def test_the_explanation_says_what_lengths_change() -> None:
    asked = request(seq=131072, batch=1)
    documents = DocumentLengths.from_histogram({1024: 1}, 131072)
    degrees = {"pipe": 1, "data": 1, "context": 8, "depth": 1, "row": 1, "col": 1}
    asked = replace(
        asked,
        workload=replace(asked.workload, documents=documents),
        plan=Plan(**degrees),
        fixed_fields=frozenset(degrees),
    )
    said = " ".join(explain.explain_choice(search.search_layouts(asked)))
    assert "Samples have 128.0 documents on average" in said
    assert "0.8 % of the work of whole samples, and 0.0 % of the keys of other ranks" in said


def test_lengths_without_a_mask_of_documents_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "lengths.txt"
    file.write_text("1000\n")
    wanted = PlanOptions(lengths=str(file))
    assert read_document_lengths(wanted) == {1000: 1}
    wanted = replace(wanted, data=replace(wanted.data, document_mask=False))
    with pytest.raises(PlanError, match="or omit --lengths"):
        read_document_lengths(wanted)


def test_context_is_not_searched_where_settings_refuse_it() -> None:
    tables: dict[str, Any] = {"plan": {"global_batch": 1}, "data": {"seq_len": 8192}}
    tables["model"] = {"sliding_window": 16, "max_seq": 8192}
    assert can_split_context(run_from_tables(tables))
    tables["plan"]["context_attention"] = "ring"
    assert not can_split_context(run_from_tables(tables))


def test_train_splits_long_samples_where_it_helps_and_prints_why() -> None:
    shape = {"layers": 2, "embed": 64, "heads": 2, "kv_heads": 1, "head_dim": 32, "mlp": 128}
    tables: dict[str, Any] = {"model": {**shape, "vocab": 256, "max_seq": 4096}}
    tables |= {"data": {"seq_len": 4096}, "train": {"dtype": "fp32"}}
    few = run_from_tables({**tables, "plan": {"global_batch": 2}})
    # Two heads and two samples cannot be split over eight ranks otherwise.
    found, predicted = choose_layout(few, build_workload(few), machine(8))
    assert found.plan.context > 1
    assert f"context {found.plan.context}: 2 samples of 4,096 tokens" in predicted.why
    assert "\n" not in predicted.why
    many = run_from_tables({**tables, "plan": {"global_batch": 8}})
    found, predicted = choose_layout(many, build_workload(many), machine(8))
    assert found.plan.context == 1 and found.plan.data == 8
    assert "8 samples of 4,096 tokens per step are enough for 8 ranks" in predicted.why
