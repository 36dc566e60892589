"""Ladder residuals: each module reads the stream without the output of the module before it.

The equations are restated in plain torch. On grids, loss, gradients, norms and weights equal those
of one process, and the recorded communication is the predicted one.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import Case, Serial, batch_of, compare, run_case, sized
from grids import label
from pool import Pool
from ranvier.models import Decoder, DecoderConfig

pytestmark = pytest.mark.nccl
LR, CLIP = 1e-2, 0.5
AXES = ("pipe", "data", "expert", "context", "depth", "row", "col")
LAYERS = {"all layers": (), "last 2 of 4": (2, 3), "2 in the middle": (1, 2)}


def build(**changes: object) -> Decoder:
    sizes = {"layers": 4, "embed": 16, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": 24}
    torch.manual_seed(3)
    config = DecoderConfig(**{"vocab": 29, "max_seq": 16, **sizes, **changes})  # type: ignore[arg-type]
    return Decoder(config).double()


def restated_loss(model: Decoder, ladder: set[int], tokens: Tensor, targets: Tensor) -> Tensor:
    """r <- r + a; a = attn(n(r)); r <- r + m; m = mlp(n(r)) in ladder layers; r + a + m at last."""
    r = model.embed(tokens)
    a = m = torch.zeros_like(r)
    for layer, block in enumerate(model.blocks):
        if layer in ladder:
            r = r + a
            a = block.attention(block.norm1(r), None, None)
            r = r + m
            m = block.mlp(block.norm2(r))
        else:
            r = r + a + m
            a = block.attention(block.norm1(r), None, None)
            m = block.mlp(block.norm2(r + a))
    logits = model.head(model.norm(r + a + m))
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, 1), targets.flatten(), reduction="sum"
    )


@pytest.mark.parametrize("layers", LAYERS.values(), ids=LAYERS)
def test_the_model_equals_its_equations(layers: tuple[int, ...]) -> None:
    model = build(residual="ladder", ladder_layers=layers)
    tokens = torch.randint(0, 29, (3, 8), generator=torch.Generator().manual_seed(1))
    targets = tokens.roll(-1, 1)
    losses = (
        model(tokens, targets),
        restated_loss(model, {*layers} or {0, 1, 2, 3}, tokens, targets),
    )
    grads = [torch.autograd.grad(loss, list(model.parameters())) for loss in losses]
    torch.testing.assert_close(losses[0], losses[1], rtol=1e-12, atol=0.0)
    for have, want in zip(*grads, strict=True):
        assert (have - want).abs().max() <= 1e-12 * want.abs().max()


# ---- grids ---------------------------------------------------------------------------------------


def ladder(**changes: Any) -> str:
    """The name of a small model with a ladder residual."""
    return sized(**{"layers": 2, "residual": "'ladder'", **changes})


def list_grids() -> list[dict[str, int]]:
    """All grids of up to 8 ranks on all axes."""
    sizes = itertools.product((1, 2, 4, 8), repeat=len(AXES))
    return [dict(zip(AXES, some, strict=True)) for some in sizes if math.prod(some) <= 8]


def draw_model(degrees: dict[str, int], drawn: random.Random) -> str:
    """A small model: all layers or some have a ladder residual."""
    changes: dict[str, Any] = {"layers": 8 if degrees["pipe"] > 1 else 3}
    chosen = [i for i in range(changes["layers"]) if drawn.random() < 0.6]
    changes["ladder_layers"] = drawn.choice([(), tuple(chosen)])
    if degrees["expert"] > 1:
        changes |= {"experts": 8, "experts_per_token": 2, "moe_layer_interval": 2}
    changes["norm_position"] = drawn.choice(("'pre'", "'pre'", "'pre'", "'post'", "'both'"))
    changes["bias"] = drawn.choice((True, False)) and degrees["expert"] == 1
    changes["tie_embeddings"] = drawn.choice((True, False))
    return ladder(**{name: str(value).replace(" ", "") for name, value in changes.items()})


def list_cases() -> list[Any]:
    """All grids with both splits of col, overlapped and not; the rest is drawn."""
    cases = []
    for number, degrees in enumerate(list_grids()):
        for inner, overlap in itertools.product(("samples", "features"), (True, False)):
            drawn = random.Random(f"{number} {inner} {overlap}")
            stages = degrees["pipe"] > 1
            recompute = drawn.choice(("none", "selective", "full"))
            case = Case(
                draw_model(degrees, drawn),
                inner=inner,
                overlap=overlap,
                both=overlap,
                recompute=recompute,
                collectives=drawn.choice(("rerun", "save")) if recompute != "none" else "rerun",
                micro_batches=2 if stages else 1,
                policy=drawn.choice(("message_driven", "zero-bubble", "1f1b", "gpipe")),
                weights_over=drawn.choice(("depth", "depth_context")),
                packed=drawn.choice((True, False)),
                steps=3,
            )
            name = f"{label(degrees)}-{number}-{inner}-{recompute}{'-overlap' * overlap}"
            # Without rows nothing is reduced, so that nothing can be pending.
            marks = () if degrees["row"] > 1 else pytest.mark.full
            cases.append(pytest.param(degrees, case, id=name, marks=marks))
    return cases


@functools.cache
def serial(model: str, packed: bool = False, samples: int = 16) -> Serial:
    return Serial(model, batch_of(model, samples=samples, packed=packed), LR, CLIP, steps=3)


def differences(pool: Pool, degrees: dict[str, int], case: Case) -> list[str]:
    """What differs from one process: losses, gradients, norms, weights, and communication."""
    whole = serial(case.model, case.packed)
    return compare(whole, pool.on_grid(degrees, run_case, case, whole.batch, LR, CLIP))


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "case"), list_cases())
def test_a_model_equals_one_process(pool: Pool, degrees: dict[str, int], case: Case) -> None:
    assert differences(pool, degrees, case) == []


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"ladder_layers": (1,)}, r"ladder_layers=\[1\] has no effect with residual='serial'"),
        (
            {"residual": "ladder", "ladder_layers": (0, 4)},
            r"ladder_layers=\[0, 4\] contains an invalid layer.*from 0 to 3",
        ),
        ({"residual": "ladder", "ladder_layers": (-1,)}, r"ladder_layers=\[-1\] contains"),
        (
            {"residual": "ladder", "norm_position": "sandwich"},
            "not supported with norm_position='sandwich'.*Use norm_position='pre'",
        ),
        (
            {"residual": "ladder", "core_layers": 2, "prelude_layers": 1, "coda_layers": 1}
            | {"mean_recurrence": 4, "backprop_depth": 2},
            "not supported with core_layers=2",
        ),
    ],
)
def test_inconsistent_settings_are_refused(changes: dict[str, Any], words: str) -> None:
    (problem,) = DecoderConfig(layers=4, **changes).find_problems()
    assert re.search(words, problem), problem
