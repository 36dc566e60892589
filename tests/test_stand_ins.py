"""Classes that stand in for classes of the package have their names and parameters."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import pytest

from infer import fake_engine, test_serving_policy, test_serving_simulator
from ranvier.infer.engine import Engine
from ranvier.infer.policy import SequenceView
from ranvier.planner.time.serving_step import StepCost

STAND_INS: Mapping[type, type] = {
    fake_engine.FakeEngine: Engine,
    test_serving_policy.FakeSequence: SequenceView,
    test_serving_simulator.RecordingCost: StepCost,
}


def public_members(kind: type) -> dict[str, Any]:
    """Methods and properties of a class, and names that it annotates."""
    names = {*vars(kind), *getattr(kind, "__annotations__", {})}
    return {name: getattr(kind, name, None) for name in names if not name.startswith("_")}


def find_differences(stand_in: type, real: type) -> list[str]:
    """Returns the methods of a stand-in that the class does not have, or has otherwise.

    If the class is a protocol, the stand-in also has all of its members.
    """
    ours, theirs = public_members(stand_in), public_members(real)
    problems = []
    for name, member in ours.items():
        if not inspect.isfunction(member):
            continue
        if name not in theirs:
            problems.append(f"{real.__name__} has no {name}")
        elif inspect.isfunction(theirs[name]):
            names = [[*inspect.signature(one).parameters] for one in (member, theirs[name])]
            if names[0] != names[1]:
                problems.append(f"{name} has the parameters {names[0]} instead of {names[1]}")
    if getattr(real, "_is_protocol", False):
        problems += [f"{name} is missing" for name in theirs if name not in ours]
    return problems


@pytest.mark.parametrize("stand_in", STAND_INS, ids=lambda kind: kind.__name__)
def test_a_stand_in_is_like_its_class(stand_in: type) -> None:
    assert find_differences(stand_in, STAND_INS[stand_in]) == []


def test_differences_are_found() -> None:
    class Renamed:
        def step(self, seconds: float) -> None:
            """Has another parameter."""

        def begin(self) -> None:
            """Is not there."""

    assert sorted(find_differences(Renamed, Engine)) == [
        "Engine has no begin",
        "step has the parameters ['self', 'seconds'] instead of ['self']",
    ]
    assert "seconds is missing" in find_differences(Renamed, StepCost)
