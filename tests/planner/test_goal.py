"""Goals in words, and the fewest nodes that reach them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from ranvier.errors import PlanError
from ranvier.planner import goal
from ranvier.planner.goal import DAY, Goal
from ranvier.settings import ModelConfig


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("70B, 2T tokens, 30 days", Goal(2e12, 30 * DAY, "llama3-70b", 70e9)),
        ("llama3-8b, 15T tokens, 2 weeks", Goal(15e12, 14 * DAY, "llama3-8b")),
        ("12 hours, 500M tokens", Goal(5e8, DAY / 2)),
        ("1.5b params,1 T token,0.5 month", Goal(1e12, 15 * DAY, "", 1.5e9)),
    ],
)
def test_words_are_numbers(text: str, want: Goal) -> None:
    assert goal.parse(text) == want


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("70B, 30 days", "no tokens"),
        ("2T tokens", "no a time"),
        ("70B, 2T tokens, fast", "'fast' is no size"),
        ("70B, 0 tokens, 30 days", "no number above 0"),
        ("1.2.3T tokens, 1 day", "no number above 0"),
        ("", "no tokens and no a time"),
    ],
)
def test_other_words_are_refused(text: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        goal.parse(text)


@pytest.mark.parametrize("parameters", [3e8, 1.5e9, 13e9, 33e9, 120e9, 1e12])
def test_a_model_of_so_many_parameters(parameters: float) -> None:
    config = goal.shape(parameters)
    changes: dict[str, Any] = {name: getattr(config, name) for name in goal.SHAPE}
    made = ModelConfig(**changes, vocab=config.vocab)
    assert made.parameters == pytest.approx(parameters, rel=0.12)
    assert not config.problems() and 40 <= config.embed / config.layers <= 270


def searched(rates: dict[int, float]) -> Any:
    """Searches that find a rate, or nothing, and are counted."""
    asked: list[int] = []

    def search(nodes: int) -> Any:
        asked.append(nodes)
        rate = rates.get(nodes, 0.0)
        best = SimpleNamespace(prediction=SimpleNamespace(rate=rate))
        wish = SimpleNamespace(world=8 * nodes)
        return SimpleNamespace(found=[best], best=best, wish=wish) if rate else None

    search.asked = asked  # type: ignore[attr-defined]
    return search


LINEAR = {nodes: 100.0 * nodes for nodes in range(1, 5000)}


@pytest.mark.parametrize("first", [1, 5, 9, 64, 3000])
@pytest.mark.parametrize("least", [1, 2, 7, 13])
def test_the_fewest_nodes_from_any_guess(least: int, first: int) -> None:
    search = searched(LINEAR)
    aim = Goal(tokens=100.0 * least * 1000.0, seconds=1000.0)
    reached = goal.fewest(aim, search, first=first)
    assert reached is not None and reached.enough
    assert reached.nodes == least
    assert reached.device_hours == pytest.approx(8 * least * 1000.0 / 3600.0)
    assert len(search.asked) == len(set(search.asked)) <= 24


def test_large_numbers_are_near() -> None:
    aim = Goal(tokens=100.0 * 777, seconds=1.0)
    reached = goal.fewest(aim, searched(LINEAR), first=500)
    assert reached is not None and 777 <= reached.nodes <= 777 * 1.07


def test_a_goal_out_of_reach_says_what_is_fastest() -> None:
    rates = {1: 10.0, 2: 15.0, 4: 20.0, 8: 18.0}  # above, no layout fits
    reached = goal.fewest(Goal(1000.0, 1.0), searched(rates), most=64)
    assert reached is not None and not reached.enough
    assert (reached.nodes, reached.seconds) == (4, 50.0)
    assert goal.fewest(Goal(1000.0, 1.0), searched({}), most=64) is None
    assert goal.guess(Goal(2e12, 30 * DAY), 70e9, 8 * 989e12) == pytest.approx(102, abs=2)


def test_all_layouts_are_searched_in_the_end() -> None:
    aim, search = Goal(tokens=1000.0, seconds=1.0), searched({4: 1100.0})
    quick = goal.Reached(4, search(4), 1000.0 / 1050.0, True)
    assert goal.surer(quick, aim, search(4)).seconds == pytest.approx(1000.0 / 1100.0)
    assert goal.surer(quick, aim, None) is quick
    slower = searched({4: 900.0})
    assert goal.surer(quick, aim, slower(4)) is quick
