"""A step of models that are not ours to the letter: what makes it fast must not make it wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from equivalence import compile_with, gradients
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.errors import ShardingError
from ranvier.grid import Grid
from ranvier.models import Decoder, DecoderConfig
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

pytestmark = [  # of the compiler
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
]
CONFIG = DecoderConfig(layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29)
TOKENS = torch.randint(0, 29, (2, 8), generator=torch.Generator().manual_seed(0))
BATCH = Batch(TOKENS, TOKENS.roll(1, 1))


class Half(Decoder):
    """Does something to the loss of its head."""

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        """Half of it."""
        return super().forward(*args, **kwargs) * 0.5


class Louder(Decoder):
    """Does something between its blocks."""

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        """With twice the residual stream after each block."""
        x = self.embed(tokens)
        angles = self.rotary(torch.arange(8).unsqueeze(0), x.dtype)  # type: ignore[misc]
        for block in self.blocks:
            x = block(x, angles, None) * 2.0
        out: Tensor = self.head(self.norm(x), targets)
        return out


@pytest.mark.compiled
@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("kind", "compiled"),
    [
        *((Decoder, ""), (Half, ""), (Louder, ""), (Half, "aot_eager"), (Louder, "aot_eager")),
        pytest.param(Decoder, "aot_eager", marks=pytest.mark.full),  # nn/test_compiled.py does it
    ],
)
def test_gradients_are_those_of_the_plain_model(kind: type[Decoder], compiled: str) -> None:
    torch.manual_seed(0)
    serial = kind(CONFIG).double()
    loss = serial(BATCH.tokens, BATCH.targets) / TOKENS.numel()
    loss.backward()
    torch.manual_seed(0)
    plan = Plan(compile="on" if compiled else "off")
    model = compile_with(parallelize(kind(CONFIG).double(), Grid({}), plan), compiled)
    assert forward_backward(model, [BATCH]).item() == pytest.approx(loss.item(), abs=1e-12)
    for name, (grad, _) in gradients(get_parallel_model(model)).items():
        want = serial.get_parameter(name).grad
        assert want is not None
        torch.testing.assert_close(grad, want.flatten(), rtol=1e-11, atol=1e-14)


@pytest.mark.compiled
@pytest.mark.full
def test_a_hook_on_a_block_sees_a_tensor() -> None:
    model = compile_with(parallelize(Decoder(CONFIG), Grid({}), Plan(compile="on")), "aot_eager")
    seen = []
    handle = model.blocks[0].register_forward_hook(lambda *all_: seen.append(all_[-1]))
    forward_backward(model, [BATCH])
    handle.remove()
    assert [type(x) for x in seen] == [Tensor]


def test_a_loss_has_one_backward() -> None:
    model = parallelize(Decoder(CONFIG), Grid({}))
    loss = model(BATCH.tokens, BATCH.targets)
    loss.backward(retain_graph=True)
    with pytest.raises(
        RuntimeError, match=r"head: backward\(\) ran a second time.*Compute the loss"
    ):
        loss.backward()


@pytest.mark.compiled
@pytest.mark.full
def test_documents_as_numbers_are_compiled_too() -> None:
    ids = (torch.arange(8) // 3).expand(2, -1)
    losses = []
    for compiled in ("", "aot_eager"):
        torch.manual_seed(0)
        plan = Plan(compile="on" if compiled else "off")
        model = compile_with(parallelize(Decoder(CONFIG).double(), Grid({}), plan), compiled)
        losses.append(forward_backward(model, [Batch(TOKENS, TOKENS, None, ids)]).item())
    assert losses[0] == pytest.approx(losses[1], abs=1e-12)


@pytest.mark.compiled
@pytest.mark.full
def test_many_shapes_run_without_a_graph_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ranvier.nn.compile.MAX_MODEL_GRAPHS", 3)
    model = compile_with(parallelize(Decoder(CONFIG), Grid({}), Plan(compile="on")), "aot_eager")
    compiled = get_parallel_model(model).compiled_blocks
    assert compiled is not None
    for length in (8, 7, 6):
        forward_backward(model, [Batch(TOKENS[:, :length], TOKENS[:, :length])])
    assert len(compiled.graphs) == 3


def test_what_cannot_be_asked_of_parallelize() -> None:
    with pytest.raises(ShardingError, match="recompute='memory_budget' is only available through"):
        parallelize(Decoder(CONFIG), Grid({}), Plan(recompute="memory_budget"))
