"""What a user's own loop may do, and what is refused instead of being silently wrong."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from equivalence import Case, batch_of, copied, gradients, micros_of
from pool import Pool
from ranvier.errors import DataError, PlanError, ShardingError
from ranvier.grid import Grid
from ranvier.models.decoder import Decoder, DecoderConfig
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallelize import parallelize
from ranvier.train.step import forward_backward

SMALL = DecoderConfig(layers=2, embed=16, heads=8, kv_heads=2, head_dim=4, mlp=24, vocab=29)


def own_loop(grid: Grid, begin: bool) -> list[float]:
    """Losses of a loop without any of the package's steps; gradients of two passes are added."""
    model = Case("llama").on(grid)
    optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-2)
    (batch,) = micros_of(batch_of("llama", samples=8, packed=False), grid, 1)
    losses = []
    for _ in range(3):
        if begin:
            model.parallel.bucket_scheduler.begin_step("own")
        for _ in range(2):
            loss = model(**batch.model_inputs())
            loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_loop_of_ones_own_needs_no_begin(pool: Pool) -> None:
    for degrees in ({"depth": 2}, {"data": 2}):
        with_begin, without = (pool.on_grid(degrees, own_loop, begin) for begin in (True, False))
        assert with_begin == without
        assert without[0][2] < without[0][0]


def after_changes(grid: Grid) -> list[str]:
    """Forward passes that use weights from before a step or a load."""
    model = Case("llama").on(grid)
    optimizer = Optimizer(model.parallel.bucket_scheduler, lr=1e-1)
    (batch,) = micros_of(batch_of("llama", samples=8, packed=False), grid, 1)
    bad = []

    def look(name: str) -> None:
        now = model(**batch.model_inputs()).item()
        model.parallel.bucket_scheduler.begin_step("")
        if now != model(**batch.model_inputs()).item():
            bad.append(name)

    model(**batch.model_inputs()).backward()
    optimizer.step()
    look("step")
    whole = {n: torch.randn(w.sharding.shape).double() for n, w in model.parallel.weights.items()}
    torch.manual_seed(3)
    whole = {n: torch.randn(x.shape).double() for n, x in whole.items()}
    model.parallel.load_full_state(whole)
    look("load")
    loaded = copied(model.parallel.sharded_state())
    model(**batch.model_inputs()).backward()
    optimizer.step(lr=0.0)
    kept = model.parallel.sharded_state()
    return bad + [n for n, (x, _) in loaded.items() if not torch.equal(x, kept[n][0])]


def test_weights_are_never_those_of_before(pool: Pool) -> None:
    assert pool.on_grid({"depth": 2}, after_changes) == [[], []]


def _policy(save: str, ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    mm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    keep = save == "all" or (save == "mm" and mm)
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective(grid: Grid, save: str) -> list[str]:
    """Gradients that a selective checkpoint of each block changes."""
    results = []
    for wrapped in (False, True):
        model = Case("llama").on(grid)
        if wrapped:
            contexts = partial(create_selective_checkpoint_contexts, partial(_policy, save))
            for block in model.blocks:
                block.forward = partial(
                    checkpoint, block.forward, use_reentrant=False, context_fn=contexts
                )
        micros = micros_of(batch_of("llama", samples=8, packed=False), grid, 1)
        for _ in range(2):
            forward_backward(model, micros)
        results.append(gradients(model.parallel))
    return [n for n, (g, _) in results[0].items() if not torch.equal(g, results[1][n][0])]


@pytest.mark.sample(1)
@pytest.mark.parametrize("save", ["none", "mm"])
def test_selective_checkpoints_change_nothing(pool: Pool, save: str) -> None:
    assert pool.on_grid({"depth": 2, "row": 2}, selective, save) == [[]] * 4


def lone() -> Any:
    return parallelize(Decoder(SMALL), Grid({}))


def stepped(model: Any) -> None:
    model.parallel.bucket_scheduler.begin_step("")
    tokens = torch.zeros(2, 8, dtype=torch.long)
    model(tokens, tokens).backward()
    Optimizer(model.parallel.bucket_scheduler).step()


def test_what_leaves_its_bucket_is_refused() -> None:
    for change in (lambda m: m.double(), lambda m: m.load_state_dict(m.state_dict(), assign=True)):
        model = lone()
        model.norm.weight.data = model.norm.weight.data.clone()
        with pytest.raises(ShardingError, match="no longer part of its bucket"):
            stepped(model)
        model = lone()
        change(model)
        with pytest.raises(ShardingError, match="no longer part of its bucket"):
            stepped(model)


def test_freezing_afterwards_is_refused_and_before_is_heeded() -> None:
    model = lone()
    model.embed.weight.requires_grad_(False)
    with pytest.raises(
        ShardingError, match=r"embed.weight has requires_grad=False.*before you call"
    ):
        stepped(model)
    plain = Decoder(SMALL)
    plain.embed.weight.requires_grad_(False)
    before = plain.embed.weight.clone()
    model = parallelize(plain, Grid({}))
    stepped(model)
    assert torch.equal(model.embed.weight, before)


@pytest.mark.parametrize("number", [29, 1000, -1])
def test_tokens_outside_of_the_vocabulary_are_refused(number: int) -> None:
    model, good = lone(), torch.zeros(2, 8, dtype=torch.long)
    bad = good.clone()
    bad[1, 3] = number
    with pytest.raises(DataError, match=rf"embed received token ids from .*{number}.*\[0, 29\)"):
        model(bad, good)
    with pytest.raises(DataError, match=r"head received token ids .* or equal to -100"):
        model(good, bad)


@pytest.mark.parametrize("size", [5, 101])
def test_a_head_with_another_vocabulary_is_refused(size: int) -> None:
    class Classifier(nn.Module):
        dims = {"embed": ("vocab", "embed"), "head": ("vocab", "embed")}

        def __init__(self) -> None:
            super().__init__()
            self.sizes = {"vocab": 100, "embed": 16}
            self.embed, self.head = nn.Embedding(100, 16), nn.Linear(16, size)

    message = rf"head.weight has {size} elements .*sizes has vocab=100"
    with pytest.raises(ShardingError, match=message):
        parallelize(Classifier(), Grid({}))


def test_dropout_without_a_name_is_refused() -> None:
    class Hidden(nn.Module):
        dims = {"up": ("mlp", "embed")}

        def __init__(self) -> None:
            super().__init__()
            self.sizes = {"mlp": 8, "embed": 8}
            self.up, self.drop = nn.Linear(8, 8), nn.Dropout(0.1)

    with pytest.raises(ShardingError, match=r"dropout layers without named dim.*drop \(p=0.1\)"):
        parallelize(Hidden(), Grid({}))


def test_attention_and_mlp_drop_different_elements() -> None:
    model = parallelize(Decoder(DecoderConfig(dropout=0.5)), Grid({}))
    model.parallel.step_context.samples = torch.arange(2)
    x = torch.ones(2, 8, 64)
    block = model.blocks[0]
    assert not torch.equal(block.dropout1(x), block.dropout2(x))


def test_mixed_types_and_second_calls_are_refused() -> None:
    mixed = Decoder(SMALL)
    mixed.norm.double()
    with pytest.raises(ShardingError, match=r"float32, torch.float64.*Pass dtype= to parallelize"):
        parallelize(mixed, Grid({}))
    with pytest.raises(ShardingError, match="already parallel"):
        parallelize(lone(), Grid({}))


def wrong_rank(grid: Grid) -> str:
    with pytest.raises(PlanError) as error:
        Grid({"row": 2}, rank=1 - grid.rank, connected=True)
    return str(error.value)


def padded_logits(grid: Grid) -> int:
    with torch.no_grad():
        return int(Case("llama").on(grid)(torch.zeros(8, 8, dtype=torch.long)).shape[-1])


def test_ranks_know_themselves_and_logits_have_no_padding(pool: Pool) -> None:
    assert "but this process is rank 0" in pool.on_grid({"row": 2}, wrong_rank)[0]
    assert pool.on_grid({"row": 2}, padded_logits) == [15, 14]


def norm_of_vectors(grid: Grid) -> float:
    """Gradient norm where only norms are trained, so that some ranks own no part of it."""
    torch.manual_seed(1)
    plain = Decoder(SMALL)
    for name, param in plain.named_parameters():
        param.requires_grad_("norm" in name)
    model = parallelize(plain, grid)
    forward_backward(model, micros_of(batch_of("llama", samples=8, packed=False), grid, 1))
    return Optimizer(model.parallel.bucket_scheduler).step().item()


def test_ranks_without_a_part_of_the_norm_take_part_in_it(pool: Pool) -> None:
    (one,) = pool.on_grid({}, norm_of_vectors)
    assert one > 0.0
    assert pool.on_grid({"row": 2}, norm_of_vectors) == pytest.approx([one] * 2, rel=1e-5)
