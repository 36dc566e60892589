"""The search: all factorisations, nothing lost by pruning, what is settled stays settled."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from typing import Any

import pytest

from ranvier.config.plan import AXES, Plan
from ranvier.cost.layers import ActivationShape
from ranvier.planner import cluster, explain, frameworks, model_spec, search
from ranvier.planner.baselines import (
    RANVIER_STYLE,
    STYLES,
    PredictedCandidate,
    baseline_slowdowns,
    find_baselines,
    layout_family,
    matching_styles,
)
from ranvier.planner.memory.total import peak_memory
from ranvier.planner.predict import Candidate, Workload, predict_step
from ranvier.planner.search import RECOMPUTE_MODES, SearchRequest, enumerate_degrees, valid_grids


def small(batch: int = 32, **changes: Any) -> Workload:
    shape: dict[str, Any] = {"layers": 8, "embed": 1024, "heads": 16, "kv_heads": 4}
    shape |= {"head_dim": 64, "mlp": 4096, "gated": True, "vocab": 32000}
    return Workload(model_spec.dense_decoder(**{**shape, **changes}), 2048, batch)


def wish(
    nodes: int = 1, devices: int = 0, job: Workload | None = None, **changes: Any
) -> SearchRequest:
    machine = cluster.load_cluster("dgx-h100")
    machine = machine.with_size(devices=devices) if devices else machine.with_size(nodes=nodes)
    return SearchRequest(job or small(), machine, **changes)


def with_memory(one: SearchRequest, gigabytes: float) -> SearchRequest:
    machine = one.cluster
    return replace(
        one, cluster=replace(machine, device=replace(machine.device, memory=gigabytes * 1e9))
    )


@pytest.mark.parametrize("world", [1, 7, 12, 64])
def test_every_factorisation_comes_once(world: int) -> None:
    any_size = range(1, world + 1)
    axes = dict.fromkeys(("pipe", "data", "row"), any_size)
    found = [tuple(one.values()) for one in enumerate_degrees(world, axes)]
    triples = itertools.product(range(1, world + 1), repeat=2)
    want = [(a, b, world // (a * b)) for a, b in triples if world % (a * b) == 0]
    assert sorted(found) == sorted(want)
    fixed = list(enumerate_degrees(world, {"pipe": any_size, "row": [1]}))
    assert fixed == [{"pipe": world, "row": 1}]


def test_ranks_need_be_no_power_of_two() -> None:
    asked = wish(devices=6, job=small(batch=36))
    plans, refused = valid_grids(asked)
    assert len({tuple(p.degrees.values()) for p in plans}) + refused == 25
    assert {(p.data, p.depth) for p in plans if p.pipe == p.row == p.col == 1} >= {(3, 2), (6, 1)}
    assert all(
        p.world_size == 6 and p.row in (1, 2) for p in plans
    )  # 3 divides neither heads nor kv


@pytest.mark.parametrize("world", [6, 8, 12, 16])
def test_rules_for_one_axis_refuse_nothing_that_could_run(world: int) -> None:
    asked = wish(devices=0, nodes=1, job=small(batch=24))
    asked = replace(asked, cluster=replace(asked.cluster, per_node=world))
    quick = {tuple(p.degrees.values()) for p in valid_grids(asked)[0]}
    axes = dict.fromkeys(AXES, range(1, world + 1))
    axes |= {"expert": range(1, 2), "context": range(1, 2)}  # dense, and enough short samples
    slow = [
        p for sizes in enumerate_degrees(world, axes) for p in search.plans_of_degrees(asked, sizes)
    ]
    assert quick == {tuple(p.degrees.values()) for p in slow if search.is_allowed(asked, p)}
    assert len(quick) + valid_grids(asked)[1] == len(list(enumerate_degrees(world, axes)))


def every(asked: SearchRequest) -> list[PredictedCandidate]:
    """All layouts in the usual order of axes, nothing left out: the slow and simple way."""
    found = []
    for plan in valid_grids(asked)[0]:
        share = plan.global_batch // plan.num_replicas
        micros = [n for n in range(1, share + 1) if share % n == 0 and n % plan.micro_batch == 0]
        chunks = [n for n in (1, 2, 4, 8) if n == 1 or 1 < plan.pipe <= 8 // n]
        ways = itertools.product(
            micros, chunks, RECOMPUTE_MODES, ("step", "micro_batch"), ("device", "host")
        )
        for micro, chunk, kind, kept, where in ways:
            one = replace(
                plan, micro_batch=micro, virtual_stages=chunk, recompute=kind, reshard_after=kept
            )
            if search.is_allowed(asked, one):
                layout = Candidate(plan=one, axis_order=one.axis_order, states=where)
                found.append(
                    PredictedCandidate(layout, predict_step(asked.workload, layout, asked.cluster))
                )
    return found


@pytest.fixture(scope="module")
def slow() -> list[PredictedCandidate]:
    return every(wish(devices=8, job=small(batch=16)))


@pytest.mark.full
@pytest.mark.parametrize("gigabytes", [80.0, 6.0, 3.0])
def test_pruning_loses_nothing(slow: list[PredictedCandidate], gigabytes: float) -> None:
    result = search.search_layouts(with_memory(wish(devices=8, job=small(batch=16)), gigabytes))
    limit = result.best.prediction.limit
    fit = [one for one in slow if one.prediction.memory.total_bytes <= limit]
    best = min(fit, key=lambda one: one.prediction.step_seconds)
    assert result.best.prediction.step_seconds == pytest.approx(
        best.prediction.step_seconds, rel=0.02
    )
    for name, one in find_baselines(result.feasible_candidates, 8).items():
        own = [f.prediction.step_seconds for f in fit if STYLES[name](f.plan, 8)]
        assert one.prediction.step_seconds <= min(own) * 1.02, name


def test_states_rest_on_the_host_only_where_that_is_needed() -> None:
    job = Workload(model_spec.load_shipped_spec("llama3-8b"), 2048, 8)
    one = search.search_layouts(wish(devices=1, job=job))
    assert one.best.candidate.states == "host"  # 16 bytes a parameter are more than 80 GB
    assert {
        f.candidate.states
        for f in search.search_layouts(wish(devices=8, job=job)).feasible_candidates
    } == {"device"}
    machine = one.request.cluster
    poor = replace(machine, host=replace(machine.host, memory=1e9))
    assert not search.search_layouts(replace(one.request, cluster=poor)).feasible_candidates
    assert not search.has_fitting_layout(
        replace(one.request, cluster=poor)
    ) and search.has_fitting_layout(one.request)


def test_the_result_depends_on_the_wish_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = wish(nodes=2)
    first = search.search_layouts(asked)
    monkeypatch.setattr(search, "PARALLEL_THRESHOLD", 1)
    second = search.search_layouts(asked, workers=2)
    assert [one.candidate for one in first.feasible_candidates] == [
        one.candidate for one in second.feasible_candidates
    ]
    assert (
        first.num_candidates == second.num_candidates
        and first.oversized_candidates == second.oversized_candidates
    )


def test_found_layouts_can_run_and_fit() -> None:
    asked = wish(nodes=2)
    result = search.search_layouts(asked)
    assert result.feasible_candidates and result.best is result.feasible_candidates[0]
    for one in result.feasible_candidates:
        assert not list(one.plan.find_problems(asked.dim_sizes, 16))
        assert one.prediction.memory.total_bytes <= one.prediction.limit
        assert one.candidate.axis_order == one.plan.axis_order
    assert any(one.plan.rank_order for one in result.feasible_candidates)
    times = [float(f"{one.prediction.step_seconds:.3g}") for one in result.feasible_candidates]
    assert times == sorted(times)


def test_what_is_settled_stays() -> None:
    settled = Plan(row=4, data=-1, recompute="full", micro_batch=2)
    fixed = frozenset({"row", "data", "recompute", "micro_batch"})
    result = search.search_layouts(wish(nodes=2, plan=settled, fixed_fields=fixed))
    plans = [one.plan for one in (*result.feasible_candidates, *result.oversized_candidates)]
    assert {(p.row, p.recompute, p.micro_batch) for p in plans} == {(4, "full", 2)}
    assert len({p.data for p in plans}) > 1  # -1 is for the search to find


def test_of_equal_times_the_simpler_layout_wins() -> None:
    machine = cluster.load_cluster("dgx-h100")
    plan = Plan(data=8, global_batch=8, micro_batch=1)
    prediction = predict_step(small(8), Candidate(plan), machine)
    one = PredictedCandidate(Candidate(plan), prediction)
    for other in (
        replace(plan, data=4, depth=2),
        replace(plan, data=4, row=2),
        replace(plan, recompute="selective"),
        replace(plan, rank_order=("depth", "data")),
    ):
        assert one.sort_key < PredictedCandidate(Candidate(other), prediction).sort_key
    assert PredictedCandidate(Candidate(plan, states="host"), prediction).sort_key > one.sort_key


def test_less_memory_computes_more_again() -> None:
    roomy, tight = (search.search_layouts(with_memory(wish(), size)) for size in (80.0, 5.0))
    assert roomy.best.plan.recompute == "none"
    assert tight.best.prediction.step_seconds > roomy.best.prediction.step_seconds
    assert (
        explain.describe_bottleneck(tight).startswith("Bottleneck: memory.")
        and tight.oversized_candidates
    )
    assert not search.search_layouts(with_memory(wish(), 1.2)).feasible_candidates


def test_baselines_are_of_their_style() -> None:
    result = search.search_layouts(wish(nodes=2))
    best = find_baselines(result.feasible_candidates, 8)
    assert best[RANVIER_STYLE] is result.best and set(best) == set(STYLES)
    mega, axonn = (best[name].plan for name in ("Megatron-LM", "AxoNN"))
    assert mega.depth == mega.col == 1 and mega.row <= 8
    assert axonn.pipe == 1
    for name in ("DDP", "FSDP", "HSDP"):
        style = "ZeRO-1" if name == "DDP" else name
        assert layout_family(best[style].plan) == name
    assert best["FSDP"].plan.depth == 16
    assert min(baseline_slowdowns(best).values()) >= 0.99
    for name in ("Megatron-LM", "FSDP", "AxoNN"):
        own = [one for one in result.feasible_candidates if STYLES[name](one.plan, 8)]
        assert best[name] is own[0]


@pytest.mark.parametrize(
    ("degrees", "styles"),
    [
        ({}, "ZeRO-1 Megatron-LM AxoNN"),
        ({"data": 16}, "ZeRO-1 Megatron-LM AxoNN"),
        ({"depth": 16}, "FSDP AxoNN"),
        ({"depth": 8, "data": 2}, "HSDP AxoNN"),
        ({"row": 8, "data": 2}, "Megatron-LM AxoNN"),
        ({"row": 16}, "AxoNN"),
        ({"row": 8, "depth": 2}, "AxoNN"),
        ({"row": 4, "col": 4}, "AxoNN"),
        ({"col": 16}, "AxoNN"),
        ({"pipe": 2, "row": 8}, "Megatron-LM"),
        ({"pipe": 16}, "Megatron-LM"),
        ({"pipe": 2, "depth": 8}, ""),
        ({"pipe": 2, "data": 4, "col": 2}, ""),
    ],
    ids=str,
)
def test_a_layout_belongs_to_the_styles_that_have_its_axes(
    degrees: dict[str, int], styles: str
) -> None:
    plan = Plan(**{"data": 1, **degrees})
    assert matching_styles(plan, 8) == [*styles.split(), RANVIER_STYLE]


def megatron(asked: SearchRequest) -> PredictedCandidate:
    """The best layout of a pipeline and rows inside a node, nothing left out."""
    found, node = list[PredictedCandidate](), asked.cluster.per_node
    for plan in valid_grids(asked)[0]:
        if not STYLES["Megatron-LM"](plan, node):
            continue
        share, most = plan.global_batch // plan.num_replicas, asked.dim_sizes["layers"] // plan.pipe
        micros = [
            n for n in range(1, share + 1) if share % n == 0 and n * asked.workload.seq <= 2**18
        ]
        for micro, chunks in itertools.product(micros, range(1, max(min(most, 16), 1) + 1)):
            one = search.with_schedule(
                asked, replace(plan, micro_batch=micro, virtual_stages=chunks)
            )
            if plan.pipe * chunks > max(asked.dim_sizes["layers"], plan.pipe):
                continue
            if (plan.pipe > 1 or chunks == 1) and search.is_allowed(asked, one):
                found += [
                    x for x in search.search_recompute(asked, one) if x.prediction.fits_memory
                ]
    return min(found, key=lambda one: one.prediction.step_seconds)


@pytest.mark.parametrize(
    ("layers", "nodes", "batch", "fixed"),
    [
        (14, 2, 16, {"depth", "col", "row"}),
        pytest.param(14, 2, 16, set(), marks=pytest.mark.full),
        pytest.param(26, 4, 32, set(), marks=pytest.mark.full),
        pytest.param(24, 8, 64, set(), marks=pytest.mark.full),
    ],
)
def test_the_baseline_is_what_its_users_run(
    layers: int, nodes: int, batch: int, fixed: set[str]
) -> None:
    """Few micro-batches for many stages: chunks decide, and any number of them."""
    job = small(batch=batch, layers=layers, embed=8192, heads=64, kv_heads=8, mlp=28672)
    asked = wish(nodes=nodes, job=job, fixed_fields=frozenset(fixed))
    shown = find_baselines(search.search_layouts(asked).feasible_candidates, 8)["Megatron-LM"]
    best = megatron(asked)
    assert shown.prediction.step_seconds <= best.prediction.step_seconds * 1.005, (
        shown.plan,
        best.plan,
    )


def test_the_baseline_of_405b_on_2048_nodes_has_chunks() -> None:
    """It showed one that is slower than pipe 16 data 128 row 8 in four chunks."""
    job = Workload(model_spec.load_shipped_spec("llama3-405b"), 8192, 2048)
    fixed = frozenset({"depth", "col", "row", "recompute", "micro_batch"})
    asked = wish(
        nodes=2048, job=job, plan=Plan(global_batch=2048, micro_batch=1, row=8), fixed_fields=fixed
    )
    result = search.search_layouts(asked)
    shown = find_baselines(result.feasible_candidates, 8)["Megatron-LM"]
    usual = Plan(
        pipe=16, data=128, row=8, virtual_stages=4, micro_batch=1, global_batch=2048, compile="on"
    )
    usual = replace(usual, schedule="interleaved")
    known = predict_step(job, Candidate(usual, axis_order=usual.axis_order), asked.cluster)
    assert (
        known.fits_memory
        and shown.prediction.step_seconds <= known.step_seconds
        and shown.plan.virtual_stages > 1
    )
    assert not any(plan.pipe > 126 for plan in (f.plan for f in result.feasible_candidates[:5]))


def test_words_agree_with_numbers() -> None:
    """Who waits for the slowest stage does not wait for micro-batches, and bytes take time."""
    plan = Plan(pipe=2, row=4, stage_starts=(2,), global_batch=32, recompute="none")
    names = {"pipe", "row", "data", "depth", "col", "recompute", "virtual_stages"}
    uneven = search.search_layouts(wish(plan=plan, fixed_fields=frozenset(names)))
    said = explain.describe_bottleneck(uneven)
    assert said.startswith("Bottleneck: the slowest stage. Stage 1 of 2 (7 blocks and the head)"), (
        said
    )
    even = replace(plan, stage_starts=(), global_batch=2)
    few = search.search_layouts(wish(job=small(2), plan=even, fixed_fields=frozenset(names)))
    assert explain.describe_bottleneck(few).startswith("Bottleneck: the batch."), (
        explain.describe_bottleneck(few)
    )
    many = search.search_layouts(
        wish(nodes=5, job=small(64), plan=Plan(pipe=10), fixed_fields=frozenset({"pipe"}))
    )
    assert many.best.plan.pipe == 10
    for one in [f for f in many.feasible_candidates if f.plan.col > 1 and f.plan.row > 1][:3]:
        carried = explain._describe_traffic(one, many.request)
        assert not re.search(r"\b0 GB over", carried), carried
        assert min(one.prediction.seconds_by_part[axis] for axis in ("row", "col")) > 0.0


def test_families_have_names() -> None:
    named = {
        "one device": Plan(data=1),
        "DDP": Plan(data=4),
        "FSDP": Plan(data=1, depth=4),
        "HSDP": Plan(data=2, depth=2),
        "row": Plan(data=2, row=2),
        "row x depth": Plan(data=1, row=2, depth=2),
        "2-D, 3-D": Plan(data=1, row=2, col=2),
        "pipeline": Plan(data=1, pipe=2, row=2),
    }
    assert {name: layout_family(plan) for name, plan in named.items()} == {
        name: name for name in named
    }


def test_one_device_has_one_factorisation() -> None:
    result = search.search_layouts(wish(devices=1))
    assert result.num_grids == 1 and result.best.plan.world_size == 1
    assert math.prod(result.best.plan.degrees[axis] for axis in AXES) == 1


@pytest.fixture(scope="module")
def whole() -> dict[int, search.SearchResult]:
    """All layouts of a job on some numbers of nodes."""
    return {nodes: search.search_layouts(wish(nodes, job=small(batch=96))) for nodes in (1, 2, 3)}


@pytest.mark.sample(3)
@pytest.mark.parametrize("known", [1, 2, 3])
@pytest.mark.parametrize("nodes", [1, 2, 3])
def test_layouts_carried_over_are_those_of_a_search(
    whole: dict[int, search.SearchResult], known: int, nodes: int
) -> None:
    there = whole[nodes]
    quick = search.carry_over_layouts(there.request, [whole[known]])
    times = {
        one.candidate: one.prediction.step_seconds
        for one in (*there.feasible_candidates, *there.oversized_candidates)
    }
    same = [one for one in quick.feasible_candidates if one.candidate in times]
    assert len(same) > 10 and quick.num_candidates < there.num_candidates
    assert all(one.prediction.step_seconds == times[one.candidate] for one in same)
    for one in quick.feasible_candidates:
        assert one.plan.world_size == 8 * nodes and one.prediction.fits_memory
        assert not list(one.plan.find_problems(there.request.dim_sizes, 8 * nodes))
    behind = quick.best.prediction.step_seconds / there.best.prediction.step_seconds
    assert behind == 1.0 if known == nodes else 0.999 < behind < 1.01


def test_what_is_settled_is_not_carried_elsewhere(whole: dict[int, search.SearchResult]) -> None:
    asked = replace(whole[2].request, plan=Plan(data=1), fixed_fields=frozenset({"data"}))
    alone = search.search_layouts(replace(asked, cluster=whole[1].request.cluster))
    found = search.carry_over_layouts(asked, [alone]).feasible_candidates
    assert found and {one.plan.data for one in found} == {1}
    outer = frozenset({"pipe", "data", "depth"})
    odd = replace(asked, cluster=asked.cluster.with_size(devices=5), fixed_fields=outer)
    assert not search.carry_over_layouts(odd, [alone]).feasible_candidates


# ---- what stages hold -------------------------------------------------------------------


def held(found: PredictedCandidate, job: Workload) -> int:
    """Bytes of a layout with its policy as it is played."""
    plan = found.plan
    flow = ActivationShape(plan.micro_batch, job.seq, itemsize=2, statistics_itemsize=4)
    compiled = plan.compile == "on" or plan.row == 1
    return peak_memory(
        job.model, plan, flow, states=found.candidate.states, compiled=compiled
    ).allocated_bytes


def test_a_planned_pipeline_holds_what_is_predicted() -> None:
    plan, fixed = Plan(global_batch=32, pipe=4, depth=1, col=1), frozenset({"pipe", "depth", "col"})
    asked = wish(plan=plan, fixed_fields=fixed)
    found = search.search_layouts(asked).feasible_candidates
    assert {one.plan.virtual_stages for one in found} >= {1, 2}
    for one in found[::5]:
        assert one.plan.schedule == ("1f1b" if one.plan.virtual_stages == 1 else "interleaved")
        assert one.prediction.memory.allocated_bytes == held(one, asked.workload)
        assert explain.candidate_settings(one, asked)["plan.schedule"] == one.plan.schedule


def test_blocks_are_compiled_where_that_is_faster() -> None:
    """A graph overlaps less: on a slow network what it loses may be more than what it gains."""
    fixed = ("pipe", "row", "col", "micro_batch", "recompute")
    plan = Plan(global_batch=64, micro_batch=2, compile="auto")
    asked = wish(nodes=2, job=small(batch=64), plan=plan, fixed_fields=frozenset(fixed))
    machine = asked.cluster
    slow = replace(machine, network=replace(machine.network, bandwidth=5e9))
    for one, want in ((asked, "on"), (replace(asked, cluster=slow), "auto")):
        found = [x for x in search.search_layouts(one).feasible_candidates if x.plan.depth == 16]
        assert {x.plan.compile for x in found} == {want}
        (first, *_), other = found, {"on": "auto", "auto": "on"}[want]
        layout = replace(first.candidate, plan=replace(first.plan, compile=other))
        assert (
            predict_step(one.workload, layout, one.cluster).step_seconds
            > first.prediction.step_seconds
        )
        assert ("compiled" in explain.describe_candidate(first)) == (want == "on")
        assert explain.candidate_settings(first, one).get("plan.compile", "auto") == want
    words = explain.explain_choice(
        search.search_layouts(
            replace(asked, fixed_fields=asked.fixed_fields | {"depth"}, plan=plan)
        )
    )
    assert not any("compiled" in text for text in words), "no layer is split"
    split = search.search_layouts(
        replace(asked, plan=replace(plan, data=1), fixed_fields=asked.fixed_fields | {"data"})
    )
    assert any("--plan.compile on" in text for text in explain.explain_choice(split))
    run = search.search_layouts(replace(split.request, allows_compile=False))
    assert {one.plan.compile for one in run.feasible_candidates} == {"auto"}
    given = replace(
        asked, plan=replace(plan, depth=16), fixed_fields=asked.fixed_fields | {"depth", "data"}
    )
    assert search.search_layouts(given).best.plan.compile == "auto", "all degrees are given"


@pytest.mark.parametrize(
    "settled",
    [
        {"virtual_stages": 2},
        {"vocab_over_pipe": True},
        {"schedule": "interleaved"},
        {"schedule": "gpipe", "pipe": 2},
        {"stage_starts": (3,)},
    ],
    ids=str,
)
def test_what_is_settled_of_stages_leaves_pipelines(settled: dict[str, Any]) -> None:
    """Rules of one axis alone do not refuse what only a pipeline can have."""
    asked = wish(devices=4, plan=Plan(global_batch=32, **settled), fixed_fields=frozenset(settled))
    found = [
        one.plan for one in search.search_layouts(asked).feasible_candidates if one.plan.pipe > 1
    ]
    assert {plan.pipe for plan in found} >= (
        {2} if {"pipe", "stage_starts"} & {*settled} else {2, 4}
    )
    for name, value in settled.items():
        assert {getattr(plan, name) for plan in found} == {value}
    assert all(next(plan.find_problems(asked.dim_sizes, 4), None) is None for plan in found)


def test_an_answer_can_be_asked_about() -> None:
    """What a plan says, given as settings, is a plan again, and says the same."""
    asked = wish(devices=4)
    for one in search.search_layouts(asked).feasible_candidates[:40:4]:
        names = "pipe data depth row col virtual_stages schedule col_splits micro_batch recompute"
        names = [*names.split(), "reshard_after", "rank_order"]
        plan = replace(Plan(), global_batch=32, **{name: getattr(one.plan, name) for name in names})
        plan = replace(plan, compile=one.plan.compile)
        again = replace(
            asked, plan=plan, fixed_fields=frozenset(names), states=one.candidate.states
        )
        assert (
            search.search_layouts(again).best.prediction.step_seconds == one.prediction.step_seconds
        )


def test_bounded_stages_take_what_has_arrived() -> None:
    """A fixed order would be refused by a run with credits."""
    asked = wish(
        plan=Plan(global_batch=32, pipe=4, max_in_flight=2), fixed_fields=frozenset({"pipe"})
    )
    found = search.search_layouts(asked).feasible_candidates
    assert found and {one.plan.schedule for one in found} == {"message_driven"}


def test_who_asks_for_messages_is_told_what_they_hold() -> None:
    fixed = (
        *("pipe", "row", "depth", "col", "data", "schedule", "virtual_stages"),
        *("micro_batch", "recompute"),
    )
    plan = Plan(
        global_batch=32, pipe=4, data=2, micro_batch=1, schedule="message_driven", compile="on"
    )
    asked = wish(plan=plan, fixed_fields=frozenset(fixed))
    best = search.search_layouts(asked).best
    usual = search.search_layouts(replace(asked, plan=replace(plan, schedule="1f1b"))).best
    assert best.prediction.memory.allocated_bytes == held(best, asked.workload)
    assert best.prediction.memory.total_bytes > 1.1 * usual.prediction.memory.total_bytes
    middle = (best.prediction.memory.total_bytes + usual.prediction.memory.total_bytes) / 2
    between = (middle + frameworks.RANVIER.context_bytes) / 1e9
    tight = with_memory(asked, between / 0.96)
    free = replace(tight, fixed_fields=tight.fixed_fields - {"recompute"})
    assert search.search_layouts(free).best.plan.recompute != "none", (
        "more is computed again instead"
    )
    assert not search.search_layouts(tight).feasible_candidates, (
        "a layout fits in the usual order only"
    )
    assert search.search_layouts(
        replace(tight, plan=replace(plan, schedule="1f1b"))
    ).feasible_candidates
