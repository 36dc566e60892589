"""The benchmark of long sequences runs on a CPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "long_sequences.py"
SETTINGS = ("plan.token_chunk=256", "plan.recompute=full", "memory.activation_offload_fraction=0.5")


@pytest.mark.full
@pytest.mark.parametrize("option", ["--steps=1", "--stop-after-last-block"])
def test_a_tiny_model_takes_a_step(tmp_path: Path, option: str) -> None:
    file = tmp_path / "found.json"
    words = [sys.executable, str(SCRIPT), "--smoke", "--seq=1024", f"--json={file}", option]
    words += [f"--set={word}" for word in (*SETTINGS, "memory.device_limit_gib=1.0")]
    shown = subprocess.run(words, check=True, capture_output=True, text=True, timeout=120).stdout
    found = json.loads(file.read_text())
    assert found["seq"] == 1024 and "activations" in found["predicted"]["device"]
    if option == "--stop-after-last-block":
        assert "the backward pass of the last block is done" in shown and "seconds" not in found
    else:
        assert found["tokens_per_second"] > 0
