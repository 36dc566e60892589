"""A vocabulary so small that a rank holds nothing but its padding."""

from __future__ import annotations

import pytest
import torch

from equivalence import gradients
from pool import Pool
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import ShardedStateDict
from ranvier.train.step import forward_backward
from states import assemble

CONFIG = DecoderConfig(layers=1, embed=8, heads=4, kv_heads=2, head_dim=4, mlp=8, vocab=5)


def model_and_batch(tied: bool) -> tuple[Decoder, Batch]:
    """The same on every rank; all tokens occur, the first most often."""
    torch.manual_seed(0)
    model = Decoder(DecoderConfig(**{**vars(CONFIG), "tie_embeddings": tied})).double()
    tokens = torch.tensor([[0, 1, 0, 2], [3, 0, 4, 0]])
    return model, Batch(tokens, tokens.roll(1, 1))


def gradients_and_norm(grid: Grid, tied: bool) -> tuple[ShardedStateDict, float, float]:
    """My gradients, the norm, and the largest magnitude that an update leaves in the padding."""
    model, batch = model_and_batch(tied)
    parallel = parallelize(model, grid).parallel
    forward_backward(model, [batch])
    grads = gradients(parallel)  # type: ignore[arg-type]
    forward_backward(model, [batch])
    norm = Optimizer(parallel.bucket_scheduler, lr=0.1).step().item()  # type: ignore[union-attr,arg-type]
    weight, place = parallel.sharded_state()["embed.weight"]  # type: ignore[union-attr,operator]
    return grads, norm, weight[place.valid_shape[0] :].abs().sum().item()


@pytest.mark.parametrize("tied", [False, True])
def test_padding_gets_no_gradient(pool: Pool, tied: bool) -> None:
    results = pool.on_grid({"row": 4}, gradients_and_norm, tied)
    model, batch = model_and_batch(tied)
    (model(**batch.model_inputs()) / batch.targets.numel()).backward()
    params = dict(model.named_parameters())
    grads = assemble(state for state, _, _ in results)
    for name, param in params.items():
        assert param.grad is not None
        error = (grads[name] - param.grad).abs().max()
        assert error <= 1e-12 * param.grad.abs().max(), name
    want = torch.nn.utils.get_total_norm([p.grad for p in params.values() if p.grad is not None])
    for _, norm, padding in results:
        assert abs(norm - want.item()) <= 1e-12 * want.item()
        assert padding == 0.0
