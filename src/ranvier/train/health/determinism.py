"""Bitwise reproducible runs on CUDA, also across a resume.

Only algorithms with a fixed order of additions are allowed (torch raises on others), and nothing is
chosen by a measurement, which may differ next time. Our own kernels use no atomics. Runs on a CPU
are reproducible anyway, with the same number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ranvier import launch
from ranvier.config.run import RunConfig
from ranvier.errors import PlanError


def check_deterministic(run: RunConfig) -> None:
    """Raise on settings that would make a deterministic run depend on measurements."""
    if run.guard.replay_interval and run.train.device == "cuda" and not run.train.deterministic:
        raise PlanError(
            f"guard.replay_interval={run.guard.replay_interval} without train.deterministic. On "
            "cuda the same work may otherwise give different bits. Use train.deterministic=True or "
            "guard.replay_interval=0."
        )
    if not run.train.deterministic:
        return
    problems = []
    if run.plan.recompute == "memory_budget":
        problems.append(
            "train.deterministic=True with plan.recompute='memory_budget'. The micro-batch would "
            "depend on measured memory, and results depend on the micro-batch. Use "
            "plan.recompute='none', 'selective' or 'full'."
        )
    if run.memory.auto:
        problems.append(
            "train.deterministic=True with memory.auto=True. The micro-batch would depend on "
            "measured memory, and results depend on the micro-batch. Use memory.auto=False."
        )
    if run.plan.compile == "on" and not compiles_deterministically():
        problems.append(
            f"train.deterministic=True with plan.compile='on' and torch {torch.__version__}. Its "
            "compiler chooses kernels by measuring. Use plan.compile='off' or a newer torch."
        )
    if problems:
        raise PlanError(problems)


def compiles_deterministically() -> bool:
    """Whether Inductor has a mode without measurements that change numerics."""
    from torch._inductor import config

    return hasattr(config, "deterministic")


@contextmanager
def deterministic_algorithms(on: bool) -> Iterator[None]:
    """Use only deterministic algorithms inside; must be entered before the first CUDA kernel."""
    if not on:
        yield
        return
    # cuBLAS reads its workspace setting only once, when it is initialized.
    launch.use_deterministic_cublas()
    cudnn = torch.backends.cudnn
    memory = torch.utils.deterministic
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
    )
    flags = [(cudnn, "deterministic", True), (cudnn, "benchmark", False)]
    # torch fills every `torch.empty` by default in this mode; no code here reads such memory.
    flags.append((memory, "fill_uninitialized_memory", False))
    if compiles_deterministically():
        from torch._inductor import config

        flags.append((config, "deterministic", True))
    old = [getattr(owner, name) for owner, name, _ in flags]
    try:
        torch.use_deterministic_algorithms(True)
        for owner, name, value in flags:
            setattr(owner, name, value)
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        for (owner, name, _), value in zip(flags, old, strict=True):
            setattr(owner, name, value)
