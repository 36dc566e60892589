"""What context cannot do is one message with value, rule and the nearest valid choice.

Each comes before any process is started: from settings, or from a model that is not yet on ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hf_models import gpt2, llama, mistral
from ranvier.config.plan import Plan
from ranvier.config.run import run_from_tables
from ranvier.data.needles import describe_short_length
from ranvier.errors import PlanError, RanvierError
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.parallel.parallelize import parallelize
from ranvier.tools.extend_context import extended_config

SIZES = {"heads": 8, "kv_heads": 2, "seq": 4096, "embed": 64, "mlp": 128, "layers": 2}
SMALL = {"embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 29}


def check_plan(**settings: Any) -> None:
    """Checks a plan as `ranvier train` does before it starts ranks."""
    plan = Plan(data=1, **settings)
    plan.check_and_resolve(SIZES, plan.world_size)


def check_run(**tables: dict[str, Any]) -> None:
    """Checks a run as `ranvier train` does before it starts ranks."""
    problems = [*run_from_tables(tables).find_problems()]
    if problems:
        raise PlanError(problems)


def place(model: torch.nn.Module, attention: str = "auto", **degrees: int) -> None:
    """Puts a model on a grid without ranks."""
    grid = Grid(degrees)
    settings: dict[str, Any] = {"context_attention": attention, "col_splits": "features"}
    parallelize(model, grid, Plan(**settings).with_degrees(grid.degrees))


CASES: dict[str, tuple[Callable[[], object], list[str]]] = {
    "sequence that context and row do not divide": (
        lambda: check_plan(context=3, row=2),
        ["context·row=6 does not divide seq=4096", "or seq=4098"],
    ),
    "ulysses with heads that context does not divide": (
        lambda: check_plan(context=16, context_attention="ulysses"),
        ["'ulysses' with context=16", "8 heads and 2 kv heads", "context=1, 2, 4 or 8"],
    ),
    "ulysses for a model that is put on a grid": (
        lambda: place(Decoder(DecoderConfig(**SMALL)), "ulysses", context=3),  # type: ignore[arg-type]
        ["ulysses cannot split 8 query heads and 2 kv heads over 3 ranks", "Use 1, 2, 4, 8 ranks"],
    ),
    "ring with a window": (
        lambda: check_run(
            model={"sliding_window": 8}, plan={"context": 2, "context_attention": "ring"}
        ),
        ["'ring' with a sliding window of 8 tokens", "no kernel", "'auto' or 'kv_gather'"],
    ),
    "attention dropout": (
        lambda: place(mistral(attention_dropout=0.1), context=2),
        ["model.layers.0.self_attn", "attention_dropout=0.1", "depend on the grid", "=0.0"],
    ),
    "Hugging Face family without our attention": (
        lambda: place(gpt2(), context=2),
        ["GPT2LMHeadModel", "context=2", "llama, qwen3, mistral, gemma2", "Use context=1"],
    ),
    "frequencies that depend on the batch": (
        lambda: place(
            llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
            context=2,
        ),
        ["rope_type='dynamic' with context=2", "largest position", "Use context=1"],
    ),
    "maximum position below the present one": (
        lambda: extended_config(DecoderConfig(max_seq=1024), 512),
        ["max_position=512", "present maximum of 1024", "Use --max-position 2048"],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_has_value_rule_and_remedy(name: str) -> None:
    work, words = CASES[name]
    with pytest.raises(RanvierError) as error:
        work()
    text = str(error.value)
    assert [word for word in words if word not in text] == [], text
    assert text.count(". ") >= 2 and "\n" not in text, "one message of three sentences"
    assert not torch.distributed.is_initialized()


def test_a_needle_longer_than_the_window_says_how_long_it_must_be() -> None:
    text = describe_short_length(64, 90, 1)
    assert "lengths=64 is too short" in text and "Use --lengths 90 or more" in text
