"""Several processes: results in order, what is kept stays, errors come back."""

from __future__ import annotations

import os

import pytest

from ranvier.planner.several import several


class Kept:
    """Counts its calls, as something that keeps results would."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, item: int) -> tuple[int, int, int]:
        if item < 0:
            raise ValueError(f"{item} is below 0")
        self.calls += 1
        return item, os.getpid(), self.calls


@pytest.mark.parametrize("workers", [1, 2])
def test_results_are_in_order_and_processes_stay(workers: int) -> None:
    items = [*range(25)]
    with several({"one": Kept()}, workers) as mapped:
        found = [mapped("one", items), mapped("one", items)]
        assert mapped("one", []) == []
    assert [item for item, _, _ in found[0]] == items == [item for item, _, _ in found[1]]
    here = {pid for some in found for _, pid, _ in some}
    assert len(here) == workers and (os.getpid() in here) == (workers == 1)
    most = {pid: max(n for some in found for _, p, n in some if p == pid) for pid in here}
    assert sum(most.values()) == 50, "each process goes on counting in the second call"


@pytest.mark.parametrize("workers", [1, 2])
def test_errors_come_back(workers: int) -> None:
    with (
        pytest.raises(ValueError, match="-3 is below 0"),
        several({"one": Kept()}, workers) as mapped,
    ):
        mapped("one", [1, 2, -3, 4])
