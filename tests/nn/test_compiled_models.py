"""Compiled blocks of every architecture: the loss and every gradient of eager blocks, in float64.

Losses alone hardly show that a gradient is missing. The backend traces as the compiler does, and
then runs one operation at a time. `scripts/other_torch.sh` runs these tests with other versions of
torch, whose tracing differs.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig

from equivalence import ONE_PASS, Case, batch_of, compile_with, gradients, worst
from published_models import CASES as PUBLISHED
from ranvier.config.plan import Plan
from ranvier.grid import Grid
from ranvier.models import EXAMPLES, build_decoder
from ranvier.models.config import AdapterConfig
from ranvier.models.hf.registry import FAMILIES
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import begin_model_step, forward_backward

pytestmark = [
    pytest.mark.compiled,
    pytest.mark.filterwarnings("default"),  # compilers give some
]
OTHERS = (
    "recurrent",
    "recurrent untied",
    "sandwich",
    "ladder lora",
    "ladder dora",
    "streams lora",
    "moe 1 of 8 capacity raw",
    "moe 2 of 8 capacity shared sigmoid",
)
"""Architectures and adapters without a published family in `PUBLISHED`, and mixtures."""
RECOMPUTE = ("none", "full", "selective")
MODELS = list(dict.fromkeys((*PUBLISHED, *EXAMPLES, *OTHERS)))
CASES = [(name, RECOMPUTE[i % 3]) for i, name in enumerate(MODELS)]


def build(name: str) -> nn.Module:
    """Returns a model of a published family, or one of the generic tests, in float64."""
    if name not in PUBLISHED:
        return Case(name).build()
    family, settings = PUBLISHED[name]
    config = FAMILIES[family].config_from_hf(AutoConfig.for_model(family, **settings).to_dict())
    model = build_decoder(config, AdapterConfig()).double()
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_(std=0.2)
    return model


def train_step(name: str, recompute: Any, backend: str) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and all gradients of two micro-batches of packed documents."""
    plan = Plan(recompute=recompute, compile="on" if backend else "off")
    model = compile_with(parallelize(build(name), Grid({}), plan), backend)
    begin_model_step(model, 0)
    micro_batches = [batch.to("cpu") for batch in batches()]
    loss = forward_backward(model, micro_batches)
    grads = {key: grad for key, (grad, _) in gradients(get_parallel_model(model)).items()}
    return loss, grads


def batches() -> list[Any]:
    """Returns two batches, whose samples have other numbers of documents."""
    packed = batch_of("", samples=4, packed=True)
    return [packed.select(slice(0, 2)), packed.select(slice(2, 4))]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("name", "recompute"), CASES)
def test_compiled_blocks_have_every_gradient_of_eager_ones(name: str, recompute: str) -> None:
    torch._dynamo.reset()
    eager_loss, eager_grads = train_step(name, recompute, "")
    loss, grads = train_step(name, recompute, "aot_eager")
    assert worst("loss", loss, eager_loss, ONE_PASS) == []
    assert grads.keys() == eager_grads.keys()
    largest = max(grad.abs().max().item() for grad in eager_grads.values())
    lines = []
    for key, grad in eager_grads.items():
        lines += worst(key, grads[key], grad, ONE_PASS, largest)
    assert lines == []


def test_every_family_is_compiled() -> None:
    """Transformers has no Huginn, which is `recurrent`, and no ParScale, which is `streams`."""
    others = {"huginn_raven", "qwen2_parscale"}
    assert {family for family, _ in PUBLISHED.values()} == FAMILIES.keys() - others
