"""The bounds of benchmarks/serving.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

from ranvier.models import MODEL_SIZES, Decoder


@pytest.fixture(scope="module")
def bound() -> ModuleType:
    """The module with the formulas."""
    path = Path(__file__).resolve().parents[1] / "benchmarks" / "serving_bound.py"
    spec = importlib.util.spec_from_file_location("benchmark_serving_bound", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_bounds_of_published_shapes_are_those_of_the_specification(bound: ModuleType) -> None:
    lines = bound.check_anchors(MODEL_SIZES)
    assert len(lines) == 6
    wrong = dict(MODEL_SIZES) | {"llama3-8b": MODEL_SIZES["qwen3-8b"]}
    with pytest.raises(ValueError, match="64 x 2,048"):
        bound.check_anchors(wrong)


def test_weights_are_counted_as_the_model_has_them(bound: ModuleType) -> None:
    config = MODEL_SIZES["tiny"]
    model = Decoder(config)
    matrices = [param.numel() for param in model.parameters() if param.ndim > 1]
    embedding = config.vocab * config.embed
    expected = sum(matrices) - (0 if config.tie_embeddings else embedding)
    one = bound.Bound(config, bound.SPEC_RATES)
    assert one.body_weights + one.head_weights == expected


def test_a_workload_is_the_sum_of_its_steps(bound: ModuleType) -> None:
    one = bound.Bound(MODEL_SIZES["tiny"], bound.SPEC_RATES)
    steps = [
        one.prefill_seconds([10, 30]),
        one.decode_seconds(2, 11 + 31),
        one.decode_seconds(1, 32),
    ]
    assert one.workload_seconds([(10, 2), (30, 3)]) == pytest.approx(sum(steps))


def test_prompts_of_other_seeds_share_no_prefix(bound: ModuleType) -> None:
    first, second = (bound.draw_prompts([50, 20], 257, seed) for seed in (0, 1))
    assert [len(prompt) for prompt in first] == [50, 20]
    assert all(0 < token < 257 for prompt in first for token in prompt)
    assert all(a[:16] != b[:16] for a, b in zip(first, second, strict=True))
