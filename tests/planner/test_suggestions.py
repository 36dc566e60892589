"""Impossible requests: what is said helps, which is tried."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from ranvier.config.plan import Plan
from ranvier.planner import cluster, model_spec, search, suggestions
from ranvier.planner.predict import Workload
from ranvier.planner.search import SearchRequest


def wish(size: str, seq: int, batch: int, nodes: int = 1) -> SearchRequest:
    return SearchRequest(
        Workload(model_spec.load_shipped_spec(size), seq, batch),
        cluster.load_cluster("dgx-h100").with_size(nodes=nodes),
    )


def said(asked: SearchRequest) -> str:
    result = search.search_layouts(asked)
    assert not result.feasible_candidates
    (problem,) = suggestions.explain_infeasible(result)
    return problem


def number(text: str, name: str) -> int:
    found = re.search(rf"{name}=(\d+)", text)
    assert found, text
    return int(found[1])


def on(asked: SearchRequest, nodes: int) -> SearchRequest:
    return replace(asked, cluster=replace(asked.cluster, nodes=nodes))


def test_a_model_too_large_gets_the_least_nodes() -> None:
    asked = wish("llama3-70b", 4096, 60)
    asked = replace(asked, cluster=asked.cluster.with_size(devices=1))
    text = said(asked)
    nodes = number(text, "nodes")
    assert "in any layout" in text and "GiB" in text
    assert search.search_layouts(on(asked, nodes)).feasible_candidates
    assert not search.search_layouts(on(asked, nodes - 1)).feasible_candidates


def test_samples_too_long_get_a_shorter_one() -> None:
    base = wish("llama3-8b", 2**19, 1)
    asked = replace(
        base, plan=Plan(row=1, col=1, pipe=1), fixed_fields=frozenset({"row", "col", "pipe"})
    )
    asked = replace(asked, cluster=asked.cluster.with_size(devices=1))
    text = said(asked)
    shorter = replace(asked, workload=replace(asked.workload, seq=number(text, "data.seq_len")))
    assert search.search_layouts(shorter).feasible_candidates


def test_more_ranks_than_samples_and_tokens() -> None:
    asked = wish("tiny", 96, 8, nodes=64)
    text = said(asked)
    assert text.startswith("512 devices cannot share this job")
    batch = replace(
        asked, workload=replace(asked.workload, batch=number(text, "plan.global_batch"))
    )
    assert suggestions.is_divisible(batch) and suggestions.is_divisible(
        on(asked, number(text, "nodes"))
    )
    assert not suggestions.is_divisible(on(asked, number(text, "nodes") + 1))


def test_a_batch_that_is_not_divisible() -> None:
    asked = wish("llama3-8b", 4096, 7)
    asked = replace(
        asked, plan=Plan(row=1, col=1, pipe=1), fixed_fields=frozenset({"row", "col", "pipe"})
    )
    text = said(asked)
    assert number(text, "plan.global_batch") == 8 and number(text, "devices") == 7


def test_degrees_that_are_no_divisors_are_told_as_the_plan_tells_them() -> None:
    asked = replace(wish("llama3-8b", 4096, 8), plan=Plan(row=3), fixed_fields=frozenset({"row"}))
    result = search.search_layouts(asked)
    problems = suggestions.explain_infeasible(result)
    assert problems[0].startswith(
        "row=3 on 8 devices is not possible. The product of the degrees must equal"
    )
    assert any("row=3 does not divide heads=32" in text for text in problems)
    assert problems[-1].endswith("Use plan.row=4.") and "Use" not in "".join(problems[:-1])


@pytest.mark.parametrize("settled", ["micro_batch", "recompute"])
def test_what_was_given_by_hand_is_named(settled: str) -> None:
    plan = Plan(micro_batch=16, recompute="none")
    base = wish("llama3-8b", 8192, 256)
    asked = replace(base, plan=plan, fixed_fields=frozenset({settled, "row"}), states="device")
    asked = replace(asked, plan=replace(plan, row=1), cluster=asked.cluster.with_size(devices=2))
    if search.search_layouts(asked).feasible_candidates:
        pytest.fail("this fits: choose another example")
    assert f"plan.{settled}" in said(asked)
