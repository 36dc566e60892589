"""A user's own modules in a user's own loop: full batches in, full outputs out, on any grid."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from equivalence import gradients, worst
from grids import label
from pool import Pool
from ranvier import Grid, call_on_full_batch, parallelize
from ranvier.config.plan import Plan
from ranvier.data.batch import Batch
from ranvier.errors import DataError, PlanError, ShardingError
from ranvier.models import EXAMPLES, Decoder, DecoderConfig
from ranvier.models.decoder import CrossEntropy
from ranvier.optim.optimizer import Optimizer
from ranvier.train.step import forward_backward
from states import assemble

ONE_PASS, AFTER_STEPS = 1e-12, 1e-9
LR, CLIP, STEPS = 1e-2, 0.5, 3
BATCH, SEQ, EMBED, MLP, VOCAB = 8, 8, 16, 24, 29


class Features(nn.Module):
    """Features in, features out, with a residual and a norm."""

    dims = {"norm": ("embed",), "up": ("mlp", "embed"), "down": ("embed", "mlp")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": EMBED, "mlp": MLP}
        self.norm = nn.LayerNorm(EMBED)
        self.up, self.down = nn.Linear(EMBED, MLP), nn.Linear(MLP, EMBED)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Inside(Features):
    """The input and the output are inside of a block: 'mlp' in, 'mlp' out."""

    dims = {"down": ("embed", "mlp"), "norm": ("embed",), "up": ("mlp", "embed")}
    input_dims = {"x": ("batch", "seq", "mlp")}

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.up(self.norm(self.down(x))))


class Attending(nn.Module):
    """Attention of its own, over all tokens: the sequence is whole there."""

    dims = dict.fromkeys("qkv", ("heads", "embed")) | {"o": ("embed", "heads")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": EMBED, "heads": 4}
        self.q, self.v = nn.Linear(EMBED, 16), nn.Linear(EMBED, 16)
        self.k = nn.Linear(EMBED, 16, bias=False)  # one would have no gradient
        self.o = nn.Linear(16, EMBED)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (-1, 4)).transpose(1, 2) for f in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v)  # (b, h, s, d)
        return x + self.o(y.transpose(1, 2).flatten(2))


class Words(nn.Module):
    """Tokens in, logits out; the vocabulary is padded on most grids."""

    dims = {"embed": ("vocab", "embed"), "head": ("vocab", "embed")}

    def __init__(self) -> None:
        super().__init__()
        self.sizes = {"embed": EMBED, "mlp": MLP, "vocab": VOCAB}
        self.embed, self.body = nn.Embedding(VOCAB, EMBED), Features()
        self.head = nn.Linear(EMBED, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.body(self.embed(tokens)))


class Scored(Words):
    """Tokens and targets in, the sum of the losses out."""

    dims = {**Words.dims, "loss": ("vocab",)}

    def __init__(self) -> None:
        super().__init__()
        self.loss = CrossEntropy()

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:  # type: ignore[override]
        return self.loss(super().forward(tokens), targets)


class Squared(Features):
    """Features and their targets in, a mean out."""

    output_dims = "mean"

    def forward(self, x: Tensor, target: Tensor) -> Tensor:  # type: ignore[override]
        return F.mse_loss(super().forward(x), target)


def drawn(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(seed: int = 3, batch: int = BATCH) -> Tensor:
    return torch.randint(0, VOCAB, (batch, SEQ), generator=torch.Generator().manual_seed(seed))


def close_to(y: Tensor, *inputs: Tensor) -> Tensor:
    """A loss of full outputs that no two elements of enter alike."""
    return (F.mse_loss(y, drawn(*y.shape, seed=9)) + (y.sin() * drawn(*y.shape, seed=8)).sum()) / 7


def of_words(y: Tensor, *inputs: Tensor) -> Tensor:
    return F.cross_entropy(y.flatten(0, 1), tokens(5, len(y)).flatten())


def as_it_is(y: Tensor, *inputs: Tensor) -> Tensor:
    return y / 50


def cases() -> dict[str, tuple[type[nn.Module], list[Tensor], Callable[..., Tensor]]]:
    """A model, its full inputs, and the loss of its full output."""
    targets = tokens(5)
    targets[0, :3] = -100
    return {
        "features": (Features, [drawn(BATCH, SEQ, EMBED)], close_to),
        "uneven batch": (Features, [drawn(5, SEQ, EMBED)], close_to),
        "rows": (Features, [drawn(13, EMBED)], close_to),
        "inside": (Inside, [drawn(BATCH, SEQ, MLP)], close_to),
        "attention": (Attending, [drawn(BATCH, SEQ, EMBED)], close_to),
        "words": (Words, [tokens()], of_words),
        "uneven words": (Words, [tokens(batch=3)], of_words),
        "scored": (Scored, [tokens(), targets], as_it_is),
        "mean": (Squared, [drawn(BATCH, SEQ, EMBED), drawn(BATCH, SEQ, EMBED, seed=4)], as_it_is),
    }


CASES = [*cases()]


def build(kind: str) -> nn.Module:
    torch.manual_seed(1)
    return cases()[kind][0]().double()


def given(kind: str) -> list[Tensor]:
    """Inputs; gradients of features are wanted."""
    inputs = [x.clone() for x in cases()[kind][1]]
    return [x.requires_grad_() if x.is_floating_point() else x for x in inputs]


@functools.cache
def alone(kind: str) -> dict[str, Any]:
    """The loop in one process, with torch's own optimizer."""
    model, loss_of = build(kind), cases()[kind][2]
    groups = [
        {"params": [p], "weight_decay": 0.1 if p.dim() > 1 and "embed" not in n else 0.0}
        for n, p in model.named_parameters()
    ]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95), eps=1e-8)
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        optimizer.zero_grad()
        inputs = given(kind)
        output = model(*inputs)
        loss = loss_of(output, *inputs)
        loss.backward()
        if step == 0:
            found["output"] = output.detach()
            found["input grads"] = [x.grad for x in inputs]
            found["grads"] = {n: p.grad.clone() for n, p in model.named_parameters()}
        found["losses"].append(loss.item())
        found["norms"].append(nn.utils.clip_grad_norm_(model.parameters(), CLIP).item())
        optimizer.step()
    found["after"] = {n: p.detach() for n, p in model.named_parameters()}
    return found


def loop(grid: Grid, kinds: list[str], inner: str) -> dict[str, dict[str, Any]]:
    """The same loop on a grid: every rank has the full batch."""
    return {kind: one_loop(grid, kind, inner) for kind in kinds}


def one_loop(grid: Grid, kind: str, inner: str) -> dict[str, Any]:
    plan = Plan(col_splits=inner).with_degrees(grid.degrees)  # type: ignore[arg-type]
    model, loss_of = parallelize(build(kind), grid, plan), cases()[kind][2]
    optimizer = Optimizer(
        model.parallel.bucket_scheduler, lr=LR, betas=(0.9, 0.95), eps=1e-8, decay=0.1, clip=CLIP
    )
    found: dict[str, Any] = {"losses": [], "norms": []}
    for step in range(STEPS):
        inputs = given(kind)
        output = call_on_full_batch(model, *inputs)
        loss = loss_of(output, *inputs)
        loss.backward()
        if step == 0:
            found["output"] = output.detach()
            found["input grads"] = [x.grad for x in inputs]
            found["grads"] = gradients(model.parallel)
            with torch.no_grad():
                found["again"] = call_on_full_batch(model, *inputs)
        found["losses"].append(loss.item())
        found["norms"].append(optimizer.step().item())
    found["after"] = model.parallel.sharded_state()
    return found


def differences(want: dict[str, Any], ranks: list[dict[str, Any]]) -> list[str]:
    """What differs from one process, on any rank."""
    lines = []
    for rank, have in enumerate(ranks):
        for key in ("output", "again"):
            lines += worst(f"{key} of rank {rank}", have[key], want["output"], ONE_PASS)
        for mine, theirs in zip(have["input grads"], want["input grads"], strict=True):
            if theirs is not None:
                lines += worst(f"gradient of the input on rank {rank}", mine, theirs, ONE_PASS)
        for key in ("losses", "norms"):
            a, b = torch.tensor(have[key]).double(), torch.tensor(want[key]).double()
            lines += worst(f"first of {key} of rank {rank}", a[:1], b[:1], ONE_PASS)
            lines += worst(f"{key} of rank {rank}", a, b, AFTER_STEPS)
    for key, limit in (("grads", ONE_PASS), ("after", AFTER_STEPS)):
        whole = assemble(have[key] for have in ranks)
        assert whole.keys() == want[key].keys()
        for name, x in whole.items():
            lines += worst(f"{key} {name}", x, want[key][name], limit)
    return lines


GRIDS: list[tuple[dict[str, int], str]] = [
    ({"data": 2, "row": 2}, "samples"),
    ({"depth": 2, "col": 2}, "samples"),
    ({"row": 2, "col": 2}, "features"),
]
MORE: list[tuple[dict[str, int], str]] = [
    ({"context": 2}, "samples"),
    ({"context": 2, "row": 2}, "features"),
    ({"data": 2}, "samples"),
    ({"row": 4}, "samples"),
    ({"col": 4}, "features"),
    ({"expert": 2, "depth": 2}, "samples"),
    ({"data": 2, "expert": 2}, "samples"),
    ({"depth": 2, "row": 2, "col": 2}, "samples"),
    ({"data": 2, "depth": 2, "row": 2}, "features"),
    ({"expert": 2, "row": 2, "col": 2}, "samples"),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("degrees", "inner"),
    [*GRIDS, *(pytest.param(*grid, marks=pytest.mark.full) for grid in MORE)],
    ids=lambda x: label(x) if isinstance(x, dict) else x,
)
def test_a_loop_of_ones_own_learns_the_same_on_any_grid(
    pool: Pool, degrees: dict[str, int], inner: str
) -> None:
    own = degrees.get("col", 1) < 4 and degrees.get("context", 1) == 1
    kinds = [kind for kind in CASES if kind != "attention" or own]
    ranks = pool.on_grid(degrees, loop, kinds, inner)
    for kind in kinds:
        assert differences(alone(kind), [found[kind] for found in ranks]) == [], kind


def test_on_one_rank_it_is_the_model_itself() -> None:
    for kind, found in loop(Grid({}), CASES, "samples").items():
        assert differences(alone(kind), [found]) == [], kind


class Dropping(Features):
    """Elements of the residual stream are dropped in training."""

    dims = {**Features.dims, "drop": ("embed",)}

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.drop(x))


def drop(grid: Grid) -> list[Tensor]:
    torch.manual_seed(1)
    model = parallelize(Dropping().double(), grid)
    return [call_on_full_batch(model, drawn(5, SEQ, EMBED)).detach() for _ in range(2)]


def test_dropout_is_the_same_on_any_grid(pool: Pool) -> None:
    first, second = want = drop(Grid({}))
    assert not torch.equal(first, second)
    for found in pool.on_grid({"depth": 2, "row": 2}, drop):
        for have, one in zip(found, want, strict=True):
            assert worst("output", have, one, ONE_PASS) == []


# ---- context ------------------------------------------------------------------------------------


class Surprise(nn.Module):
    """A decoder that returns the loss of each token, and its logits."""

    output_dims = {"losses": ("batch", "seq"), "logits": ("batch", "seq", "vocab")}

    def __init__(self) -> None:
        super().__init__()
        shape = {"embed": EMBED, "heads": 4, "kv_heads": 2, "head_dim": 4, "mlp": MLP}
        config = DecoderConfig(**shape, layers=2, vocab=VOCAB, sliding_window=3, dropout=0.2)  # type: ignore[arg-type]
        self.decoder = Decoder(config)
        self.sizes = self.decoder.sizes

    def forward(
        self, tokens: Tensor, positions: Tensor | None = None, documents: Any = None
    ) -> dict[str, Tensor]:
        logits = self.decoder(tokens, positions=positions, documents=documents)
        return {"logits": logits, "losses": (logits.square().mean(-1) + tokens / 7)}


def packed_ids() -> Tensor:
    """Documents of odd lengths, other ones in each sample."""
    cuts = [(1, 2, 5), (8,), (3, 5), (7, 1), (5, 3)]
    return torch.stack([torch.arange(len(n)).repeat_interleave(torch.tensor(n)) for n in cuts])


def surprise(grid: Grid, packed: bool, order: str) -> tuple[list[Tensor], dict[str, Any]]:
    """Outputs of two batches, and gradients; a batch of 5 is filled up on most grids."""
    torch.manual_seed(1)
    plan = Plan(context_order=order).with_degrees(grid.degrees)  # type: ignore[arg-type]
    model = parallelize(Surprise().double(), grid, plan).train()
    more: dict[str, Tensor] = {}
    if packed:
        more = {"documents": packed_ids(), "positions": tokens(2, 5) % 8}
    found = []
    for seed in (3, 4):
        y = call_on_full_batch(model, tokens(seed, 5), **more)
        (close_to(y["logits"]) + close_to(y["losses"])).backward()
        found += [y["logits"].detach(), y["losses"].detach()]
    return found, gradients(model.parallel)


@pytest.mark.parametrize(
    ("degrees", "packed", "order"),
    [
        ({"context": 2}, True, "zigzag"),
        pytest.param({"context": 2}, False, "balanced", marks=pytest.mark.full),
        pytest.param({"context": 4}, True, "balanced", marks=pytest.mark.full),
        pytest.param({"context": 2, "data": 2}, True, "balanced", marks=pytest.mark.full),
    ],
)
def test_outputs_over_context_return_in_window_order(
    pool: Pool, degrees: dict[str, int], packed: bool, order: str
) -> None:
    want, grads = surprise(Grid({}), packed, order)
    assert len(want) == 4
    results = pool.on_grid(degrees, surprise, packed, order)
    for found, _ in results:
        for have, one in zip(found, want, strict=True):
            assert worst("output", have, one, ONE_PASS) == []
    whole = assemble(part for _, part in results)
    for name, (grad, _) in grads.items():
        assert worst(name, whole[name], grad, ONE_PASS) == []


def test_attention_in_the_models_own_code_is_refused_over_context() -> None:
    with pytest.raises(ShardingError, match=r"has heads \(q.weight\), but no attention core"):
        parallelize(Attending(), Grid({"context": 2}))


# ---- debug mode ---------------------------------------------------------------------------------


class Pooled(Features):
    """Tokens of a rank are reduced inside: another number on each rank of row."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).mean(1)


class Number(Features):
    """A number, of which nobody says how it was reduced."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).sum()


def complaint(work: Callable[[], Any]) -> str:
    """What a call says."""
    try:
        work()
    except (DataError, ShardingError) as error:
        return str(error)
    return ""


def feed_wrongly(grid: Grid) -> list[str]:
    """What ranks say, each fed in its own wrong way; in debug mode."""
    debug = Grid(grid.degrees, rank=grid.rank, connected=True, groups=grid.groups, debug=True)
    features, words = parallelize(build("features"), debug), parallelize(build("words"), debug)
    scored = parallelize(build("scored"), debug)
    x, ids, mine = drawn(BATCH, SEQ, EMBED), tokens(), drawn(2, 2, EMBED, seed=grid.rank)
    other = tokens(seed=grid.index["row"])
    torch.manual_seed(grid.index["row"])
    unlike = Features()
    with torch.no_grad():
        fine = [complaint(lambda: words(ids)), complaint(lambda: features(mine))]
    return [
        *fine,
        complaint(lambda: words(tokens(seed=grid.index["data"]))),
        complaint(lambda: scored(tokens(seed=grid.index["data"]), ids)),
        complaint(lambda: features(x)),  # every rank has the full input
        complaint(lambda: words(ids)),
        complaint(lambda: words(other)),
        complaint(lambda: call_on_full_batch(words, other)),
        complaint(lambda: call_on_full_batch(features, x + grid.index["data"])),
        complaint(lambda: parallelize(unlike, debug)),
    ]


def test_debug_mode_compares_what_ranks_were_given(pool: Pool) -> None:
    for said in pool.on_grid({"data": 2, "row": 2}, feed_wrongly):
        assert said[:4] == [""] * 4
        assert "Ranks 0 and 2 received the same values of 'x'" in said[4] and "axis data" in said[4]
        assert "count 2 times" in said[4] and "call_on_full_batch" in said[4]
        assert "Ranks 0 and 2 received the same values of 'tokens'" in said[5]
        assert "Ranks 0 and 1 received different values of 'tokens'" in said[6] and "row" in said[6]
        assert "Ranks 0 and 1 received different values of 'tokens'" in said[7]
        assert (
            "Ranks 0 and 2 received different values of 'x'" in said[8] and "axis data" in said[8]
        )
        assert "the same full batch on every rank" in said[8]
        assert "Ranks 0 and 1 received different values of 'up.weight'" in said[9]
        assert "manual_seed" in said[9]


def feed_stages_wrongly(grid: Grid) -> list[str]:
    debug = Grid(grid.degrees, rank=grid.rank, connected=True, groups=grid.groups, debug=True)
    torch.manual_seed(1)
    model = parallelize(EXAMPLES["llama"]().double(), debug)
    mine = tokens(seed=grid.index["data"])
    same = complaint(lambda: forward_backward(model, [Batch(tokens(), tokens())]))
    return [same, complaint(lambda: forward_backward(model, [Batch(mine, mine)]))]


def test_debug_mode_compares_what_stages_were_given(pool: Pool) -> None:
    for same, good in pool.on_grid({"pipe": 2, "data": 2}, feed_stages_wrongly):
        assert (
            "Ranks 0 and 1 received the same values of 'tokens', 'targets'" in same and good == ""
        )


# ---- what cannot be told ------------------------------------------------------------------------


def ask_too_much(grid: Grid) -> list[str]:
    x = drawn(4, SEQ, EMBED)
    pooled, number = (parallelize(kind().double(), grid) for kind in (Pooled, Number))
    inside, scored = (parallelize(build(kind), grid) for kind in ("inside", "scored"))
    inside.input_dims = {"x": ("batch", "seq", "embed")}
    said = [
        complaint(lambda: call_on_full_batch(pooled, x)),
        complaint(lambda: call_on_full_batch(number, x)),
        complaint(lambda: call_on_full_batch(scored, tokens(batch=3), tokens(batch=3))),
        complaint(lambda: call_on_full_batch(inside, drawn(4, SEQ, MLP))),
    ]
    pooled.output_dims = ("batch", "embed")
    return [*said, complaint(lambda: call_on_full_batch(pooled, x))]


def test_what_shapes_do_not_tell_is_asked_for(pool: Pool) -> None:
    words = [
        ("output has the shape", "after the call"),
        ("returned a scalar", "output_dims = 'mean'"),
        ("3 samples", "Use a batch size that the grid divides"),
        ("reads x as 'mlp'", "input_dims = {'x': ('batch', 'seq', 'mlp')}"),
        ("row splits the tokens", "reduce it after"),
    ]
    for said in pool.on_grid({"data": 2, "row": 2}, ask_too_much):
        for text, (problem, remedy) in zip(said, words, strict=True):
            assert problem in text and remedy in text, text


def test_inputs_that_no_grid_can_divide_are_refused() -> None:
    row, pipe = Grid({"row": 2}), Grid({"pipe": 2})
    with pytest.raises(DataError, match=r"7 tokens.*Pad it to 8 tokens"):
        call_on_full_batch(parallelize(Features(), row), torch.zeros(2, 7, EMBED))
    with pytest.raises(ShardingError, match=r"24 features, but embed=16.*input_dims"):
        call_on_full_batch(parallelize(Features(), row), torch.zeros(2, SEQ, MLP))
    with pytest.raises(DataError, match="same number of samples"):
        inputs = torch.zeros(2, SEQ, EMBED), torch.zeros(3, SEQ, EMBED)
        call_on_full_batch(parallelize(Squared(), row), *inputs)
    odd = parallelize(Features(), row)
    odd.input_dims = {"x": ("batch", "time", "embed")}
    with pytest.raises(ShardingError, match="'batch', 'seq'"):
        call_on_full_batch(odd, torch.zeros(2, SEQ, EMBED))
    with pytest.raises(PlanError, match=r"pipe=2.*forward_backward"):
        call_on_full_batch(parallelize(EXAMPLES["llama"](), pipe), torch.zeros(2, 8).long())
