"""The longest sequence that fits on device and host, and the memory of runs with host memory."""

from __future__ import annotations

from typing import Any

import pytest

from commands import call
from ranvier.config.resolved_run import ResolvedRun
from ranvier.config.run import run_from_tables
from ranvier.errors import PlanError
from ranvier.planner.memory.breakdown import GIB
from ranvier.tools.dry_run import resolve_without_device
from ranvier.tools.longest_sequence import find_longest_sequence, fits, with_sequence

SMALL = {"layers": 4, "embed": 256, "heads": 4, "kv_heads": 2, "head_dim": 64, "mlp": 1024}


def limited_run(model: dict[str, Any], device: float, host: float, **plan: Any) -> ResolvedRun:
    """A run of one sample with `memory.auto` and limits in GiB."""
    tables = {
        "model": model,
        "plan": {"global_batch": 1} | plan,
        "memory": {"auto": True, "device_limit_gib": device, "host_limit_gib": host},
        "train": {"dtype": "bf16"},
    }
    return resolve_without_device(run_from_tables(tables), world=1)


def test_the_longest_sequence_fits_and_the_next_does_not() -> None:
    run = limited_run(SMALL, 1.25, 0.5)
    found = find_longest_sequence(run)
    assert found.seq % 1024 == 0 and found.seq > 65536
    assert fits(with_sequence(run, found.seq)) and not fits(with_sequence(run, found.seq + 1024))
    assert found.memory.total_bytes <= 1.25 * GIB and 0 < found.memory.host_bytes <= 0.5 * GIB
    whole = find_longest_sequence(limited_run(SMALL, 1.25, 0.5, token_chunk=0))
    assert whole.seq < 0.8 * found.seq, "chunks of tokens need less memory"


@pytest.mark.full
def test_llama_8b_fits_at_400k_tokens_on_one_h200() -> None:
    found = find_longest_sequence(limited_run({"size": "llama3-8b"}, 139.0, 128.0))
    assert found.seq >= 400_000 and "last block" in found.memory.where


def test_the_device_limit_must_be_known() -> None:
    with pytest.raises(PlanError, match="the device must be known"):
        find_longest_sequence(limited_run(SMALL, 0.0, 0.5))


def test_a_dry_run_predicts_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--memory.optimizer-states", "host", "--model.size", "tiny"]
    assert call("dry-run", *words) == 0
    shown = capsys.readouterr().out
    assert "host" in shown and "master" in shown and "moments" in shown
