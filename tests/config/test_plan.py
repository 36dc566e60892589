"""Plans: every problem at once, each with its values, the rule and a remedy that works."""

from __future__ import annotations

import math
import re
from dataclasses import FrozenInstanceError, replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ranvier.config.plan import AXES, Plan, divisors, nearest_multiple
from ranvier.errors import PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.sharding import INNER_RULES, OUTER_RULE, WEIGHT_RULE, Sharding

SIZES = {"embed": 24, "heads": 8, "kv_heads": 4, "mlp": 24, "vocab": 10, "seq": 12}


def problems(plan: Plan, world: int, **sizes: int) -> list[str]:
    """The problems that `check` reports."""
    with pytest.raises(PlanError) as caught:
        plan.check_and_resolve({**SIZES, **sizes}, world)
    assert str(caught.value).splitlines() == caught.value.problems
    return caught.value.problems


def only(plan: Plan, world: int, **sizes: int) -> str:
    (problem,) = problems(plan, world, **sizes)
    return problem


def test_good_plan_is_resolved() -> None:
    plan = Plan(depth=2, row=2, global_batch=24).check_and_resolve(SIZES, 12)
    assert (plan.data, plan.world_size, plan.num_replicas) == (3, 12, 6)
    assert (plan.micro_batch, plan.num_micro_batches) == (4, 1)
    assert plan.check_and_resolve(SIZES, 12) == plan
    assert (
        Plan(depth=2, global_batch=24, micro_batch=2).check_and_resolve(SIZES, 4).num_micro_batches
        == 3
    )


def test_any_degree_can_be_inferred() -> None:
    for axis in AXES:
        degrees: dict[str, Any] = {"data": 1, axis: -1}
        assert Plan(**degrees).resolve(2).degrees[axis] == 2


def test_check_needs_no_processes_and_changes_nothing() -> None:
    plan = Plan()
    plan.check_and_resolve(SIZES, 1)
    assert plan == Plan()
    assert not torch.distributed.is_initialized()
    with pytest.raises(FrozenInstanceError):
        plan.data = 2  # type: ignore[misc]


def test_two_inferred_degrees() -> None:
    text = only(Plan(row=-1), 8)
    assert text.startswith("data=-1 and row=-1 cannot both be inferred")
    assert text.endswith("data=1 or row=1.")


def test_world_that_does_not_divide() -> None:
    text = only(Plan(row=2, depth=2), 6)
    assert text == (
        "depth=2 · row=2 needs a multiple of 4 ranks, but there are 6. The product of the degrees "
        "must equal the number of ranks. Start 8 ranks or change a degree."
    )


def test_world_of_a_full_plan() -> None:
    assert only(Plan(data=2, row=2), 8).endswith("Start 4 ranks or use data=4.")
    assert only(Plan(data=2, row=2), 1) == (
        "data=2 · row=2 needs 4 ranks, but there is 1. The product of the degrees must equal the "
        "number of ranks. Start 4 ranks or change a degree."
    )


def test_context_divides_the_tokens_of_a_sample() -> None:
    text = only(Plan(context=8), 8)
    assert text == (
        "context·row=8 does not divide seq=12. A sharded dimension must be a multiple of its axis "
        "size. Use context·row=1, 2, 3, 4, 6 or 12, or seq=16."
    )


def test_ulysses_splits_the_heads_of_a_rank() -> None:
    sizes = {"heads": 8, "kv_heads": 2, "seq": 24}
    plan = Plan(context=3, row=2, context_attention="ulysses")
    with pytest.raises(PlanError, match="with context=3 and row=2, for 8 heads and 2 kv heads"):
        plan.check_and_resolve(sizes, 6)
    Plan(context=4, row=2, context_attention="ulysses").check_and_resolve(sizes, 8)


@pytest.mark.parametrize("size", [0, -2])
def test_degree_below_one(size: int) -> None:
    text = only(Plan(row=size), 4)
    assert text.startswith(f"row={size} is not a number of ranks.")
    assert text.endswith("Use row=1.")


def test_a_degree_below_one_is_told_without_a_model() -> None:
    """As by `ranvier eval`, `generate` and `serve`, which resolve the degrees first."""
    with pytest.raises(PlanError, match=r"context=0 is not a number of ranks.*Use context=1"):
        Plan(context=0).resolve(8)


def test_unknown_axis() -> None:
    with pytest.raises(TypeError, match="rwo"):
        Plan(rwo=2)  # type: ignore[call-arg]
    with pytest.raises(PlanError, match=r"'rwo' is not an axis.*Use 'row'\."):
        Grid({"rwo": 2})
    with pytest.raises(PlanError, match=r"'colum' is not an axis.*Use 'col'\."):
        Grid({"col": 2}).axis("colum")
    with pytest.raises(PlanError, match=r"'colum' is not an axis"):
        Grid({"col": 2}).axis(share={"colum": 2})


def test_unknown_words() -> None:
    plan = Plan(col_splits="sample", recompute="ful", overlap=("dx", "gathr"))  # type: ignore[arg-type]
    lines = problems(plan, 1)
    assert [line.split(" ")[0] for line in lines] == [
        "col_splits='sample'",
        "recompute='ful'",
        "overlap='gathr'",
    ]
    assert [line.rsplit(" ", 1)[1] for line in lines] == [
        "'samples'.",
        "'full'.",
        "'weight_gather'.",
    ]


def test_batch_that_cannot_be_shared() -> None:
    text = only(Plan(data=3, global_batch=10), 3)
    assert text.startswith("global_batch=10 cannot be split over data·expert·depth=3 ranks.")
    assert text.endswith("Use global_batch=9.")
    assert only(Plan(data=1, global_batch=0), 1).endswith("Use global_batch=1.")


def test_micro_batch_that_does_not_divide() -> None:
    text = only(Plan(data=2, global_batch=12, micro_batch=4), 2)
    assert (
        "micro_batch=4 does not divide the 6 sequences of a rank (global_batch=12 over 2)" in text
    )
    assert text.endswith("Use micro_batch=1, 2, 3 or 6.")


def test_col_splits_samples_or_features() -> None:
    """The remedies are valid: features only where they divide, a micro-batch that the share has."""
    plan = Plan(data=1, col=4, global_batch=12, micro_batch=6)
    text = only(plan, 4)
    assert text.startswith("col=4 does not divide micro_batch=6.")
    assert text.endswith("Use micro_batch=4, or col=1, 2, 3 or 6, or col_splits='features'.")
    replace(plan, micro_batch=4).check_and_resolve(SIZES, 4)
    replace(plan, col_splits="features").check_and_resolve(SIZES, 4)
    assert "col_splits='features'" not in only(plan, 4, heads=6, kv_heads=6).split("Use")[1]


def test_no_micro_batch_of_the_share_fits_col() -> None:
    plan = Plan(data=2, col=4, global_batch=6)
    text = only(plan, 8)
    assert "Use global_batch=8 and micro_batch=4, or col=1 or 3" in text
    replace(plan, global_batch=8, micro_batch=4).check_and_resolve(SIZES, 8)


def test_neither_samples_nor_features_fit_col() -> None:
    """Features: then heads and mlp must divide by row·col, and the message names both numbers."""
    plan = Plan(data=1, row=2, col=3, global_batch=4, col_splits="features")
    text = only(plan, 6, kv_heads=2)
    assert text.startswith("row·col=6 does not divide heads=8.")
    assert text.endswith("Use row·col=1, 2, 4 or 8, or heads=6.")


@pytest.mark.parametrize(
    ("plan", "world", "start", "end"),
    [
        (Plan(row=8), 8, "row=8 does not divide seq=12.", "row=1, 2, 3, 4, 6 or 12, or seq=16."),
        (Plan(col=5), 5, "col=5 does not divide embed=24.", "12 or 24, or embed=25."),
        (Plan(row=16), 16, "row=16 does not divide heads=8.", "row=1, 2, 4 or 8, or heads=16."),
    ],
)
def test_dims_that_do_not_divide(plan: Plan, world: int, start: str, end: str) -> None:
    lines = problems(replace(plan, global_batch=40, micro_batch=5), world)
    (text,) = [line for line in lines if line.startswith(start)]
    assert text.endswith(end)


def test_kv_heads_neither_split_nor_shared() -> None:
    text = only(Plan(row=6), 6, heads=12, kv_heads=4)
    assert text.startswith("row=6 neither divides kv_heads=4 nor is a multiple of it.")
    assert text.endswith("Use row=2, 4 or 8.")
    Plan(row=12).check_and_resolve({**SIZES, "heads": 12}, 12)


def test_all_problems_at_once() -> None:
    plan = Plan(
        data=3, expert=2, context=2, row=5, col=7, global_batch=10, micro_batch=3, recompute="all"
    )  # type: ignore[arg-type]
    starts = [line.split(".")[0] for line in problems(plan, 8)]
    expected = [
        "recompute='all' is unknown",
        "data=3 · expert=2 · context=2 · row=5 · col=7 needs 420 ranks, but there are 8",
        "global_batch=10 cannot be split over data·expert·depth=6 ranks",
        "col=7 does not divide micro_batch=3",
        "context·row=10 does not divide seq=12",
        "col=7 does not divide embed=24",
        "row=5 does not divide heads=8",
        "row=5 does not divide mlp=24",
        "row=5 neither divides kv_heads=4 nor is a multiple of it",
    ]
    assert starts == expected


def test_experts_divide() -> None:
    sizes = {**SIZES, "expert": 6, "expert_mlp": 18}
    with pytest.raises(PlanError) as caught:
        Plan(expert=4, row=2, col=2, global_batch=32).check_and_resolve(sizes, 16)
    text = "\n".join(caught.value.problems)
    assert "expert=4 does not divide experts=6." in text
    assert "row·col=4 does not divide expert_mlp=18." in text
    assert "or experts=8." in text
    assert Plan(expert=2, col=2, global_batch=8).check_and_resolve(sizes, 4).num_replicas == 2


def test_problems_that_stop_inference_hide_no_others() -> None:
    """An unresolved plan is checked on, without problems that it does not have."""
    assert [line.split(" ")[0] for line in problems(Plan(row=-1, col=5, global_batch=5), 8)] == [
        "data=-1",
        "col=5",
    ]
    assert [line.split(" ")[0] for line in problems(Plan(depth=0, col=5, global_batch=5), 10)] == [
        "depth=0",
        "col=5",
    ]
    assert len(problems(Plan(row=3), 8, heads=9, kv_heads=3)) == 1


def test_every_message_has_value_rule_and_remedy() -> None:
    plan = Plan(data=3, pipe=2, row=5, col=7, global_batch=10, micro_batch=3)
    for line in problems(plan, 8):
        sentences = re.split(r"\. (?=[A-Z])", line)
        assert len(sentences) == 3, line
        assert re.search(r"\d", sentences[0]), line
        assert re.match(r"(Use|Start) .*\d", sentences[2]), line


DEGREES = st.sampled_from([1, 2, 3, 4, 6, 8])


@given(
    row=DEGREES,
    col=DEGREES,
    inner=st.sampled_from(["samples", "features"]),
    heads=st.integers(1, 24),
    kv_heads=st.integers(1, 12),
    embed=st.integers(1, 24),
    mlp=st.integers(1, 24),
)
def test_plan_accepts_what_sharding_can_cut(
    row: int, col: int, inner: Any, heads: int, kv_heads: int, embed: int, mlp: int
) -> None:
    """The two places that know what divides agree."""
    sizes = {"heads": heads, "kv_heads": kv_heads, "embed": embed, "mlp": mlp, "vocab": 7}
    plan = Plan(row=row, col=col, col_splits=inner, global_batch=col, micro_batch=col)
    try:
        plan.check_and_resolve(sizes, row * col)
        accepted = True
    except PlanError:
        accepted = False
    degrees = dict.fromkeys(AXES, 1) | {"row": row, "col": col}
    try:
        for rule in (WEIGHT_RULE, OUTER_RULE, INNER_RULES[plan.col_splits]):
            for dim, size in sizes.items():
                elements = size if dim == "mlp" else size * 4  # its units are elements
                Sharding.from_dims([elements], [dim], rule, degrees, units=sizes | {"vocab": 28})
        cut = True
    except ShardingError:
        cut = False
    assert accepted == cut


@given(number=st.integers(0, 300), of=st.integers(1, 40))
def test_nearest_multiple(number: int, of: int) -> None:
    near = nearest_multiple(number, of)
    assert near % of == 0
    assert all(abs(near - number) <= abs(other - number) for other in range(of, 400, of))


@given(number=st.integers(1, 300))
def test_divisors(number: int) -> None:
    found = divisors(number)
    assert found == sorted(set(found))
    assert all(number % n == 0 for n in found)
    assert math.prod(found) ** 2 == number ** len(found)


@pytest.mark.parametrize(
    ("plan", "start", "end"),
    [
        (Plan(virtual_stages=2), "virtual_stages=2 with pipe=1.", "Use pipe=2 or remove it."),
        (
            Plan(vocab_over_pipe=True),
            "vocab_over_pipe=True with pipe=1.",
            "Use pipe=2 or remove it.",
        ),
        (Plan(stage_starts=(2,)), "stage_starts=[2] with pipe=1.", "Use pipe=2 or remove it."),
        (Plan(pipe=8), "pipe=8 with virtual_stages=1 gives 8 virtual stages", "of at most 4."),
        (
            Plan(pipe=2, virtual_stages=4),
            "pipe=2 with virtual_stages=4 gives 8 virtual",
            "of at most 4.",
        ),
        (
            Plan(pipe=2, schedule="1f1b", virtual_stages=2),
            "schedule='1f1b' with virtual_stages=2.",
            "or virtual_stages=1.",
        ),
        (
            Plan(pipe=2, schedule="interleaved"),
            "schedule='interleaved' with virtual_stages=1",
            "'1f1b'.",
        ),
        (Plan(pipe=2, schedule="fifo"), "schedule='fifo' is unknown.", "Use '1f1b'."),  # type: ignore[arg-type]
        (
            Plan(pipe=2, max_in_flight=-1),
            "max_in_flight=-1 is too small.",
            "Use max_in_flight=0.",
        ),
    ],
)
def test_pipelines_that_cannot_be(plan: Plan, start: str, end: str) -> None:
    lines = problems(replace(plan, data=1), plan.pipe, layers=2)
    (text,) = [line for line in lines if line.startswith(start)]
    assert text.endswith(end)


def test_a_pipeline_has_several_micro_batches_unless_told_otherwise() -> None:
    sizes = {**SIZES, "layers": 6}
    plan = Plan(pipe=2, data=2, global_batch=32).check_and_resolve(sizes, 4)
    assert (plan.micro_batch, plan.num_micro_batches) == (2, 8)
    assert Plan(pipe=2, data=2, global_batch=8).check_and_resolve(sizes, 4).num_micro_batches == 4
    split = Plan(pipe=2, col=2, global_batch=8).check_and_resolve(sizes, 4)
    assert (split.micro_batch, split.num_micro_batches) == (2, 4), "col splits the samples"
    assert (
        Plan(pipe=2, global_batch=8, micro_batch=8).check_and_resolve(sizes, 2).num_micro_batches
        == 1
    )
    assert Plan(global_batch=8).check_and_resolve(sizes, 1).num_micro_batches == 1


def test_an_order_names_each_axis_once() -> None:
    assert "order='rwo' is unknown" in only(Plan(rank_order=("rwo",)), 1)
    assert "names an axis twice" in only(Plan(rank_order=("row", "row")), 1)
    assert Plan(rank_order=("row", "pipe")).axis_order[-2:] == ("row", "pipe")
