"""Too few file handles: the limit is raised where that is allowed, else it is told."""

from __future__ import annotations

import errno
import os
import resource

import pytest

from ranvier import launch
from ranvier.errors import DataError, PlanError
from ranvier.grid import Grid
from ranvier.launch import ProcessInfo, RestartPolicy
from ranvier.launch.signals import _describe_error
from ranvier.system import file_handles

HANDLES = resource.RLIMIT_NOFILE


def _few(me: ProcessInfo) -> int:
    """Groups are made until no handle is left."""
    hard = resource.getrlimit(HANDLES)[1]
    resource.setrlimit(HANDLES, (48, hard))
    with launch.join_process_group(me, "gloo", 60.0):
        assert resource.getrlimit(HANDLES) == (hard, hard), "raised as far as it may be"
        limit = len(os.listdir("/proc/self/fd")) + 40
        resource.setrlimit(HANDLES, (limit, limit))
        grid = Grid({"data": 2}, connected=True)
        for number in range(100):
            grid.axis("data", channel=f"channel {number}")
    return 0


def test_too_few_handles_for_a_group_are_told(capfd: pytest.CaptureFixture[str]) -> None:
    """They were a segmentation fault of Gloo, or an error with its C++ frames."""
    policy = RestartPolicy(grids=(("data=2", 2),), max_restarts=3, restart_on_error=True)
    assert launch.launch_ranks(2, _few, preload=["torch"], policy=policy) == 64
    text = capfd.readouterr().err
    assert (
        "Creating a group of 2 ranks over data needs 8 more, and 12 are reserved" in text
        and "ulimit -n" in text
    )
    assert "Traceback" not in text and "gloo" not in text


def test_too_few_handles_for_a_launcher_are_told_before_ranks_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        file_handles, "_handle_limit", lambda: len(os.listdir("/proc/self/fd")) + 20
    )
    with pytest.raises(PlanError, match=r"Launching 2 ranks needs 16 more.*ulimit -n 4096"):
        launch.launch_ranks(2, _few, preload=["torch"])


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.EMFILE, os.strerror(errno.EMFILE), "a file"),
        RuntimeError("[enforce fail at loop.cc:48] pipe: Too many open files\nframe #0"),
        DataError("corpus cannot be mapped: [Errno 24] Too many open files: 'corpus'. Copy it."),
        ImportError("libc.so: cannot open shared object file: Too many open files"),
    ],
)
def test_any_shortage_of_handles_has_a_remedy(error: Exception) -> None:
    text, code = _describe_error(error)
    assert code == 64 and "frame" not in text and "Traceback" not in text
    limit = resource.getrlimit(HANDLES)[0]
    assert f"the limit of this process is {limit}" in text and "ulimit -n" in text
