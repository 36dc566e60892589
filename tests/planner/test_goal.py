"""Goals in words, and the fewest nodes that reach them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from ranvier.cli.plan import PlanOptions
from ranvier.cli.plan_goal import ClusterNodeSearch
from ranvier.config.kinds import named_model
from ranvier.config.plan import Plan
from ranvier.config.sections import DecoderModelConfig
from ranvier.errors import PlanError
from ranvier.planner import goal
from ranvier.planner.goal import SECONDS_PER_DAY, Goal


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("70B, 2T tokens, 30 days", Goal(2e12, 30 * SECONDS_PER_DAY, "llama3-70b", 70e9)),
        ("llama3-8b, 15T tokens, 2 weeks", Goal(15e12, 14 * SECONDS_PER_DAY, "llama3-8b")),
        ("12 hours, 500M tokens", Goal(5e8, SECONDS_PER_DAY / 2)),
        ("1.5b params,1 T token,0.5 month", Goal(1e12, 15 * SECONDS_PER_DAY, "", 1.5e9)),
    ],
)
def test_words_are_numbers(text: str, want: Goal) -> None:
    assert goal.parse_goal(text) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("70B, 30 days", "no tokens"),
        ("2T tokens", "has no time"),
        ("70B, 2T tokens, fast", "'fast' is not a size"),
        ("70B, 0 tokens, 30 days", "is not a number above 0"),
        ("1.2.3T tokens, 1 day", "is not a number above 0"),
        ("", "no tokens and no time"),
    ],
)
def test_other_words_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        goal.parse_goal(text)


@pytest.mark.parametrize("parameters", [3e8, 1.5e9, 13e9, 33e9, 120e9, 1e12])
def test_a_model_of_so_many_parameters(parameters: float) -> None:
    config = goal.llama_like_config(parameters)
    changes: dict[str, Any] = {name: getattr(config, name) for name in goal.SHAPE_FIELDS}
    made = DecoderModelConfig(**changes, vocab=config.vocab)
    assert made.num_parameters == pytest.approx(parameters, rel=0.12)
    assert not config.find_problems() and 40 <= config.embed / config.layers <= 270


class Rates:
    """Searches that find a rate, or nothing, and are counted; quick ones may see less."""

    def __init__(self, rates: dict[int, float], *, seen: float = 1.0) -> None:
        self.rates, self.seen = rates, seen
        self.asked: list[int] = []
        """Where all layouts were searched."""
        self.looked: list[int] = []

    def can_share_evenly(self, nodes: int) -> bool:
        return nodes in self.rates

    def quick_search(self, nodes: int) -> Any:
        self.looked.append(nodes)
        return self._fake_result(nodes, self.seen)

    def full_search(self, nodes: int) -> Any:
        assert nodes not in self.asked, "searched twice"
        self.asked.append(nodes)
        return self._fake_result(nodes, 1.0)

    def _fake_result(self, nodes: int, share: float) -> Any:
        assert nodes in self.rates, "cannot share the job"
        if not self.rates[nodes]:
            return None  # too little memory
        best = SimpleNamespace(
            prediction=SimpleNamespace(tokens_per_second=share * self.rates[nodes])
        )
        return SimpleNamespace(
            feasible_candidates=[best], best=best, request=SimpleNamespace(world_size=8 * nodes)
        )


LINEAR = {nodes: 100.0 * nodes for nodes in range(1, 5000)}


@pytest.mark.parametrize("first", [1, 5, 9, 64, 3000])
@pytest.mark.parametrize("least", [1, 2, 7, 13, 777])
def test_the_fewest_nodes_from_any_guess(least: int, first: int) -> None:
    rates = Rates(LINEAR)
    aim = Goal(tokens=100.0 * least * 1000.0, seconds=1000.0)
    reached = goal.find_fewest_nodes(aim, rates, first=first)
    assert reached is not None and reached.meets_goal
    assert reached.nodes == least
    assert reached.device_hours == pytest.approx(8 * least * 1000.0 / 3600.0)
    assert rates.asked == [least, least - 1][:least]
    assert len(rates.looked) <= 60


@pytest.mark.parametrize("seen", [0.999, 0.99, 0.9])
def test_quick_looks_that_see_less_do_not_decide(seen: float) -> None:
    rates = Rates(LINEAR, seen=seen)
    reached = goal.find_fewest_nodes(Goal(tokens=100.0 * 90, seconds=1.0), rates, first=80)
    assert reached is not None and reached.meets_goal and reached.nodes == 90
    assert reached.seconds == pytest.approx(1.0)
    assert {89, 90} <= {*rates.asked}


@pytest.mark.parametrize("first", [1, 30, 50, 97, 512])
def test_numbers_that_cannot_share_the_job_are_passed_over(first: int) -> None:
    even = {nodes: 100.0 * nodes for nodes in range(6, 5000, 6)} | {2: 0.0, 3: 0.0}
    rates = Rates(even)
    reached = goal.find_fewest_nodes(Goal(tokens=100.0 * 61, seconds=1.0), rates, first=first)
    assert reached is not None and reached.meets_goal and reached.nodes == 66
    assert rates.asked[-2:] == [66, 60] and reached.next_fewer == (60, pytest.approx(61 / 60))


def test_a_smaller_number_that_suits_the_job_better_is_found() -> None:
    rates = Rates({**LINEAR, 96: 10_300.0})
    reached = goal.find_fewest_nodes(Goal(tokens=100.0 * 100, seconds=1.0), rates, first=128)
    assert reached is not None and reached.nodes == 96 and 95 in rates.asked


@pytest.mark.parametrize("first", [1, 700, 997, 1500])
def test_numbers_that_divide_well_are_looked_at(first: int) -> None:
    rates = Rates({n: (100.0 if n % 24 == 0 else 70.0) * n for n in range(1, 5000)})
    reached = goal.find_fewest_nodes(Goal(tokens=100.0 * 1000, seconds=1.0), rates, first=first)
    assert reached is not None and reached.nodes == 1008  # 1429 of the others
    assert rates.asked[-1] == 1007 and len(rates.asked) < 4


def test_a_goal_out_of_reach_says_what_is_fastest() -> None:
    rates = dict.fromkeys(range(1, 65), 0.0) | {1: 10.0, 2: 15.0, 4: 20.0, 8: 18.0}
    reached = goal.find_fewest_nodes(Goal(1000.0, 1.0), Rates(rates), most=64)
    assert reached is not None and not reached.meets_goal
    assert (reached.nodes, reached.seconds) == (4, 50.0)
    assert (
        goal.find_fewest_nodes(Goal(1000.0, 1.0), Rates(dict.fromkeys(range(1, 65), 0.0)), most=64)
        is None
    )
    assert goal.find_fewest_nodes(Goal(1000.0, 1.0), Rates({}), most=64) is None
    assert goal.guess_nodes(Goal(2e12, 30 * SECONDS_PER_DAY), 70e9, 8 * 989e12) == pytest.approx(
        102, abs=2
    )


@pytest.mark.full
@pytest.mark.parametrize(("tokens", "given"), [(50e9, set()), (30e9, {"plan.global_batch"})])
def test_no_smaller_number_would_do_in_a_search_of_all_layouts(
    tokens: float, given: set[str]
) -> None:
    run = PlanOptions(model=named_model("llama3-8b"), plan=Plan(pipe=1, col=1, global_batch=240))
    on = ClusterNodeSearch(replace(run, cluster="dgx-h100"), {"plan.pipe", "plan.col", *given})
    aim = Goal(tokens, SECONDS_PER_DAY)
    reached = goal.find_fewest_nodes(aim, on, first=6)
    assert reached is not None and reached.meets_goal and reached.nodes > 3
    assert reached.result is on.full_results[reached.nodes]
    for nodes in range(1, reached.nodes + 1):
        result = on.full_search(nodes) if on.can_share_evenly(nodes) else None
        enough = (
            result is not None
            and aim.tokens <= aim.seconds * result.best.prediction.tokens_per_second
        )
        assert enough == (nodes == reached.nodes), nodes
