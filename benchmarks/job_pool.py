"""Runs the jobs of a benchmark in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, TypeVar

Result = TypeVar("Result")


def run_jobs(
    task: Callable[..., Result], jobs: Sequence[tuple[Any, ...]], *, processes: int
) -> list[Result]:
    """Returns the results of `task(*job)` in the order of the jobs.

    processes: Jobs at the same time. 1: one after the other in this process, without the seconds
        that a new one takes to import torch.
    """
    if processes == 1:
        return [task(*job) for job in jobs]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = [pool.submit(task, *job) for job in jobs]
        return [future.result() for future in futures]
