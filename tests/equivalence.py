"""The heart of the suite: a model on a grid against the same model as plain PyTorch, in float64.

Runs inside workers. Every comparison gives lines of text, one for each thing that differs; none is
success.
"""

from __future__ import annotations

import ast
import itertools
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hf_models import HF_MODELS
from pool import device_of
from ranvier.config.plan import Plan
from ranvier.cost.layers import ActivationShape
from ranvier.data.batch import Batch
from ranvier.grid import Grid
from ranvier.models import EXAMPLES, AdapterConfig, Decoder, DecoderConfig, RecurrentDecoder
from ranvier.models import build_decoder as build_decoder
from ranvier.models.document_attention import Documents
from ranvier.nn.context_documents import ContextDocuments
from ranvier.nn.materialize import materialize_parameters
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.rules import Jorge, Muon, Rule
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.parallel.parallelize import parallelize
from ranvier.sharding import Shard, ShardedStateDict, TokenOrder, TokenSegment
from ranvier.tools.serial_optimizer import build_serial_optimizer
from ranvier.tools.verify import predict_events
from ranvier.trace import diff_events
from ranvier.train.step import begin_model_step, forward_backward
from same_dim_cases import build_same_dim_model
from states import assemble

ONE_PASS, STEPS = 1e-12, 1e-9
"""Relative to the tensor's largest magnitude; never relaxed."""


@dataclass(frozen=True)
class Case:
    """One way to run a model."""

    model: str
    inner: str = "samples"
    overlap: bool = True
    recompute: str = "none"
    collectives: str = "rerun"
    micro_batches: int = 1
    packed: bool = False
    fast: bool = True
    both: bool = False
    """Compute the gradients without overlap as well; they must be equal to the bit."""
    policy: str = "message_driven"
    chunks: int = 1
    spread: bool = False
    keep: bool = False
    token_order: str = "balanced"
    """Order of tokens over context; `random` draws one for each sample."""
    context_attention: str = "auto"
    weights_over: str = "depth"
    token_chunk: int = -1
    delay: int = -1
    """Seed of the delays of messages between stages; -1: none."""
    steps: int = 2
    """In the first the order of the gathers is not known, in the second it is."""
    rule: Rule | None = None
    """Update rule of the optimizer; None: AdamW."""

    @property
    def label(self) -> str:
        """A short name, in which hyphens separate the values of the options."""
        model = self.model.replace("-", "_").removeprefix("sized ")
        words = [model, self.inner, self.recompute, f"micro{self.micro_batches}"]
        words += ["kept"] * (self.collectives == "save")
        words += (
            ["packed"] * self.packed + ["plain"] * (not self.overlap) + ["pairs"] * (not self.fast)
        )
        return "-".join(words)

    def build(self) -> nn.Module:
        """The model, the same on every call."""
        torch.manual_seed(1)
        return build(self.model)

    def plan_on(self, grid: Grid) -> Plan:
        """The plan on a grid."""
        settings: dict[str, Any] = {} if self.overlap else {"overlap": ()}
        return Plan(
            col_splits=self.inner,  # type: ignore[arg-type]
            recompute=self.recompute,  # type: ignore[arg-type]
            schedule=self.policy,  # type: ignore[arg-type]
            virtual_stages=self.chunks,
            vocab_over_pipe=self.spread,
            stage_time_jitter=0.0,
            reshard_after="step" if self.keep else "micro_batch",
            context_attention=self.context_attention,  # type: ignore[arg-type]
            shard_weights_over=self.weights_over,  # type: ignore[arg-type]
            token_chunk=self.token_chunk,
            **settings,
        ).with_degrees(grid.degrees)

    def on(
        self,
        grid: Grid,
        *,
        dtype: torch.dtype | None = None,
        seed: int = 0,
        room: int | None = None,
        compiled: str = "",
        **changes: Any,
    ) -> nn.Module:
        """The model on a grid.

        room: bytes on the host for weights. compiled: with this backend. changes: of the plan.
        """
        plan = replace(self.plan_on(grid), compile="on" if compiled else "off", **changes)
        device, model = device_of(grid), self.build()
        dtype = dtype or next(model.parameters()).dtype
        options: dict[str, Any] = {"seed": seed, "dtype": dtype, "device": device}
        model = compile_with(
            parallelize(model, grid, plan, **options, materialize=room is None), compiled
        )
        parallel = get_parallel_model(model)
        if room is not None:
            materialize_parameters(
                parallel.bucket_scheduler, parallel.layers, **options, host_bytes=room
            )
        parallel.step_context.overlapped_autograd = self.fast
        parallel.step_context.save_policy.collectives = self.collectives  # type: ignore[assignment]
        if self.delay >= 0:
            drawn = random.Random(self.delay * 64 + grid.rank)
            executor = parallel.pipeline.executor
            executor.delay = lambda key, number: drawn.choice((0.0, 0.0, 0.002, 0.01))
        return model


ModelT = TypeVar("ModelT", bound=nn.Module)


def compile_with(model: ModelT, backend: str) -> ModelT:
    """The model, whose compiled blocks, if it has any, are compiled with another backend."""
    blocks = get_parallel_model(model).compiled_blocks
    if blocks is not None:
        blocks.backend = backend
    return model


def _deep(**changes: Any) -> Callable[[], nn.Module]:
    shape = {"embed": 16, "heads": 8, "kv_heads": 2, "head_dim": 4, "mlp": 24, "vocab": 29}
    config: dict[str, Any] = {"layers": 6, "max_seq": 16, **shape, **changes}
    return lambda: Decoder(DecoderConfig(**config))


DEEP: dict[str, Callable[[], nn.Module]] = {
    "deep": _deep(),
    "deep tied": _deep(tie_embeddings=True),
    "deep learned": _deep(position_embedding="learned", norm="layer", activation="gelu", bias=True),
}
"""Models with parts for many stages."""


def _adapted(residual: Any = "serial", **lora: Any) -> nn.Module:
    shape = DecoderConfig(
        layers=2, embed=16, heads=4, kv_heads=2, head_dim=4, mlp=24, vocab=29, residual=residual
    )
    return build_decoder(shape, AdapterConfig(**{"rank": 2, "dora": True, **lora}))


def _recurrent(**changes: Any) -> Callable[[], nn.Module]:
    """A model with recurrent depth: 2 iterations without and 2 with gradients."""
    shape = {"embed": 16, "heads": 8, "kv_heads": 8, "head_dim": 4, "mlp": 24, "vocab": 29}
    depth = {"layers": 4, "prelude_layers": 1, "core_layers": 2, "coda_layers": 1}
    depth |= {"mean_recurrence": 4, "backprop_depth": 2}
    huginn = {"norm_position": "sandwich", "qk_bias": True, "tie_embeddings": True}
    config: dict[str, Any] = {"max_seq": 16, "embed_scale": 4.0}
    return lambda: RecurrentDecoder(DecoderConfig(**config | shape | depth | huginn | changes))


def _adapted_streams() -> nn.Module:
    shape = DecoderConfig(
        layers=2,
        embed=16,
        heads=4,
        kv_heads=2,
        head_dim=4,
        mlp=24,
        vocab=29,
        parscale_streams=2,
        parscale_prefix_tokens=3,
    )
    return build_decoder(shape, AdapterConfig(rank=2))


def _mixture(top: int, experts: int, *words: str, **others: Any) -> Callable[[], nn.Module]:
    """A model with experts: words and others say what is not as usual."""
    changes: dict[str, Any] = {"layers": 2, "mlp": 24, "heads": 8, "aux_loss_coeff": 0.05}
    changes |= {
        "z_loss_coeff": 0.01,
        "experts": experts,
        "experts_per_token": top,
        "expert_mlp": 16,
    }
    more: dict[str, dict[str, Any]] = {
        "capacity": {"capacity_factor": 0.75},
        "shared": {"shared_expert_mlp": 8},
        "sigmoid": {"router": "sigmoid", "router_scale": 2.5, "expert_bias_update_rate": 0.02},
        "every": {"moe_layer_interval": 2, "layers": 3},
        "raw": {
            "router_norm": False,
            "dense_first_layers": 1,
            "activation": "gelu",
            "router_logit_scale": 0.5,
        },
        "deep": {"layers": 6},
        "jitter": {"router_jitter": 0.3},
        "no aux": {"aux_loss_coeff": 0.0},
        "no loss": {"aux_loss_coeff": 0.0, "z_loss_coeff": 0.0},
    }
    for word in words:
        changes |= more[word]
    return _deep(**changes | others)


def _lopsided() -> nn.Module:
    """All tokens go to two experts of eight: the others get none."""
    model = _mixture(2, 8, "shared", "sigmoid")()
    assert isinstance(model, Decoder)
    for mixture in model.moe_layers:
        assert mixture.bias is not None
        mixture.bias[3], mixture.bias[6] = 100.0, 50.0
    return model


MIXTURES: dict[str, Callable[[], nn.Module]] = {
    f"moe {top} of {experts}{''.join(f' {word}' for word in words)}": _mixture(top, experts, *words)
    for top, experts in ((1, 8), (2, 8), (8, 16))
    for words in itertools.chain.from_iterable(
        itertools.combinations(("capacity", "shared", "sigmoid", "every", "raw", "deep"), n)
        for n in range(4)
    )
}


def sized(**changes: Any) -> str:
    """The name of a small model with some settings of the decoder."""
    return " ".join(["sized", *(f"{name}={value}" for name, value in changes.items())])


def _build_sized(name: str) -> nn.Module:
    changes = {key: ast.literal_eval(value) for key, value in map(_pair, name.split()[1:])}
    if "experts" in changes:
        top, experts = changes.pop("experts_per_token"), changes.pop("experts")
        return _mixture(top, experts, **changes)()
    return _deep(**changes)()


def _pair(word: str) -> tuple[str, str]:
    key, _, value = word.partition("=")
    return key, value


def build(name: str) -> nn.Module:
    """A model by name, ours or Hugging Face's, in float64."""
    if name.startswith("sized "):
        return _build_sized(name).double()
    more = {"lopsided": _lopsided, "four": _deep(layers=4), "adapted": _adapted}
    more["streams lora"] = _adapted_streams
    more["jitter"] = _mixture(2, 8, "jitter", "capacity")
    more["recurrent"] = _recurrent()
    more["recurrent untied"] = _recurrent(
        kv_heads=2, tie_embeddings=False, norm_position="pre", qk_bias=False
    )
    more["sandwich"] = _deep(layers=2, norm_position="sandwich", qk_bias=True)
    more["same dim"] = build_same_dim_model
    more["same dim deep"] = partial(build_same_dim_model, layers=6)
    more["same dim lora"] = partial(
        build_same_dim_model,
        lora=AdapterConfig(rank=2, target_modules=("mix", "pair", "a", "b", "down", "last")),
    )
    # Adapters of o and down read their outputs at once; those of q and v do not.
    more["ladder dora"] = partial(_adapted, "ladder")
    more["ladder lora"] = partial(_adapted, "ladder", dora=False, target_modules=("q", "v"))
    more["one kv head"] = _deep(layers=2, kv_heads=1)
    more["windows"] = _deep(layers=2, sliding_window=3)
    # Documents of more than 4 tokens have other frequencies.
    more["longrope"] = _deep(
        layers=2,
        rope="longrope",
        rope_short=(1.0, 2.0),
        rope_long=(3.0, 7.0),
        original_max_position=4,
        attention_factor=1.2,
    )
    # Every token sees itself only, so that attention needs no keys of other ranks of context.
    more["local"] = _deep(layers=2, sliding_window=1)
    more["local tied"] = _deep(layers=2, sliding_window=1, tie_embeddings=True, norm="layer")
    more["moe without loss"] = _mixture(2, 8, "no loss")
    more["local moe"] = _mixture(2, 8, "shared", "no aux", sliding_window=1)
    return {**EXAMPLES, **HF_MODELS, **DEEP, **MIXTURES, **more}[name]().double()


def batch_of(model: str, *, samples: int, packed: bool, seq: int = 8) -> Batch:
    """A batch of random tokens, the same on every rank; some targets are missing."""
    generator = torch.Generator().manual_seed(7)
    vocab = 29
    tokens = torch.randint(0, vocab, (samples, seq), generator=generator)
    targets = torch.randint(0, vocab, (samples, seq), generator=generator)
    targets[torch.rand(samples, seq, generator=generator) < 0.2] = -100
    documents = positions = None
    if packed:
        starts = torch.rand(samples, seq, generator=generator) < 0.2
        starts[:, 0] = True
        documents = starts.long().cumsum(1)
        index = torch.arange(seq).expand(samples, seq)
        positions = index - torch.where(starts, index, 0).cummax(1).values
    return Batch(tokens, targets, positions, documents, samples=torch.arange(samples))


def batch_with(lengths: Sequence[Sequence[int]]) -> Batch:
    """A batch of random tokens, whose samples have documents of these lengths."""
    seq = sum(lengths[0])
    batch = batch_of("", samples=len(lengths), packed=False, seq=seq)
    documents = [[i for i, n in enumerate(some) for _ in range(n)] for some in lengths]
    positions = [[i for n in some for i in range(n)] for some in lengths]
    return replace(batch, documents=torch.tensor(documents) + 1, positions=torch.tensor(positions))


def worst(name: str, have: Tensor, want: Tensor, limit: float, floor: float = 0.0) -> list[str]:
    """A line if two tensors differ by more than `limit` times the largest magnitude of the second.

    floor: magnitude below which a tensor is rounding noise of the model (its true value is zero).
    """
    if not want.numel():  # none of it is on this rank
        return [] if not have.numel() else [f"{name}: has {have.numel()} elements instead of none"]
    scale = max(want.abs().max().item(), 1e-300)
    scale = scale if scale > floor * 1e-10 else floor
    error = (have.reshape(want.shape) - want).abs().max().item()
    good = error <= limit * scale  # False for NaN
    return [] if good else [f"{name}: differs by {error:.3e}, {error / scale:.3e} of its magnitude"]


class Serial:
    """The plain model: what one process computes in a few steps."""

    def __init__(
        self,
        name: str,
        batch: Batch,
        lr: float,
        clip: float,
        steps: int = 2,
        device: str = "cpu",
        rule: Rule | None = None,
    ) -> None:
        self.model, self.batch = Case(name).build().to(device), batch
        self.values = {name: p.detach().cpu().clone() for name, p in self.lasting()}
        inputs = batch.model_inputs()
        if device != "cpu":
            inputs = {key: x.to(device) for key, x in inputs.items()}
        self.grads: dict[str, Tensor] = {}
        self.losses: list[float] = []
        self.norms: list[float] = []
        self.extras: list[float] = []
        optimizer = serial_optimizer(name, self.named(), lr, rule)
        for step in range(steps):
            optimizer.zero_grad()
            count = (batch.targets != -100).sum()
            if isinstance(self.model, RecurrentDecoder):
                self.model.begin_step(0, step)
            loss = self.model(**inputs) / count
            loss.backward()
            extra = getattr(self.model, "aux_loss", None)
            self.extras.append(0.0 if extra is None else extra.item())
            self.losses.append(loss.item() - self.extras[-1] / count.item())
            if step == 0:
                named = [(n, p) for n, p in self.named() if p.grad is not None]
                self.grads = {n: p.grad.cpu().clone() for n, p in named}  # type: ignore[union-attr]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), clip)
            self.norms.append(norm.item())
            optimizer.step()
            for mixture in getattr(self.model, "moe_layers", ()):
                mixture.update_expert_bias()
        self.after = {name: p.detach().cpu().clone() for name, p in self.lasting()}

    def named(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.model.named_parameters())

    def lasting(self) -> list[tuple[str, Tensor]]:
        """Parameters, and the biases of routers."""
        more = [(n, x) for n, x in self.model.named_buffers() if n.endswith("mlp.bias")]
        return [*self.named(), *more]


def serial_optimizer(
    model: str, named: Sequence[tuple[str, nn.Parameter]], lr: float, rule: Rule | None
) -> torch.optim.Optimizer:
    """The optimizer of one process in plain PyTorch."""
    groups: list[dict[str, Any]] = [
        {"params": [p], "weight_decay": 0.1 if decays(n, p) else 0.0} for n, p in named
    ]
    if rule is not None:
        weights = get_parallel_model(Case(model).on(Grid({}))).weight_summaries
        for group, (name, _) in zip(groups, named, strict=True):
            if weights[name].is_hidden_matrix:
                group["dims"] = weights[name].dims
    return build_serial_optimizer(groups, rule, lr=lr, betas=(0.9, 0.95), eps=1e-8)


def decays(name: str, param: nn.Parameter) -> bool:
    """Matrices but embeddings (whatever their name) decay."""
    return param.dim() >= 2 and not any(w in name for w in ("embed", "position", "wte", "wpe"))


def gradients(parallel: ParallelModel) -> ShardedStateDict:
    """My part of every finished gradient, without the update."""
    return {
        weight.name: (part.clone(), bucket.state_shard(weight))
        for bucket, pieces in parallel.bucket_scheduler.finish_gradients()
        for weight, part in bucket.split_by_weight(pieces)
    }


def flow_of(batch: Batch, grid: Grid, micro_batches: int) -> ActivationShape:
    samples = batch.tokens.shape[0] // grid.axis("data", "expert", "depth").size // micro_batches
    return ActivationShape(
        samples=samples, seq=batch.tokens.shape[1], itemsize=8, statistics_itemsize=8
    )


def micros_of(
    batch: Batch, grid: Grid, micro_batches: int, model: str = "", token_order: str = "balanced"
) -> list[Batch]:
    """The micro-batches of a rank on its device; models of Hugging Face take documents as ids."""
    share = batch.tokens.shape[0] // grid.axis("data", "expert", "depth").size
    size, device = share // micro_batches, device_of(grid)
    if token_order == "random" and grid.degrees["context"] > 1:
        micros = _micros_in_random_order(batch, grid, size)
    else:
        order: Any = "contiguous" if token_order == "random" else token_order
        micros = batch.split_micro_batches(grid, size, order)
    if device == "cpu":
        return micros
    if model in HF_MODELS:
        return [micro.map_tensors(lambda x: x.to(device)) for micro in micros]
    return [micro.to(device) for micro in micros]


def _micros_in_random_order(batch: Batch, grid: Grid, size: int) -> list[Batch]:
    """The micro-batches of a rank, with tokens in any order over context."""
    replicas = grid.axis_without_group("data", "expert", "depth")
    mine = batch.select(local_rows(batch.num_samples, replicas.size, replicas.index))
    ids = mine.documents
    if isinstance(ids, Tensor):
        lengths = Documents.from_ids(ids).lengths
    else:
        lengths = ((mine.tokens.shape[1],),) * mine.num_samples
    drawn = random.Random(3)
    orders = [random_order(some, grid.degrees["context"], drawn) for some in lengths]
    mine = mine.shard_by_orders(orders, grid.index["context"])
    return [mine.select(slice(i, i + size)) for i in range(0, mine.num_samples, size)]


def local_rows(count: int, parts: int, part: int) -> slice:
    """Part `part` of `parts` of some rows."""
    return slice(part * count // parts, (part + 1) * count // parts)


def random_order(lengths: Sequence[int], ranks: int, drawn: random.Random) -> TokenOrder:
    """A random permutation of the tokens of a sample over context."""
    tokens = [TokenSegment(i, j, j + 1) for i, n in enumerate(lengths) for j in range(n)]
    drawn.shuffle(tokens)
    each = len(tokens) // ranks
    parts = (tuple(tokens[i * each : (i + 1) * each]) for i in range(ranks))
    return TokenOrder(tuple(lengths), tuple(parts))


def run_case(grid: Grid, case: Case, batch: Batch, lr: float, clip: float) -> dict[str, Any]:
    """A few steps on the grid: the state of this rank and what it saw."""
    model = case.on(grid)
    parallel: ParallelModel = model.parallel  # type: ignore[assignment]
    grads: ShardedStateDict = {}
    start, losses, norms, extras, lines = copied(parallel.sharded_state()), [], [], [], list[str]()
    micros = micros_of(batch, grid, case.micro_batches, case.model, case.token_order)
    optimizer = Optimizer(parallel.bucket_scheduler, lr=lr, clip=clip, rule=case.rule)
    for step in range(case.steps):
        begin_model_step(model, step)
        with grid.trace.record_events() as events:
            losses.append(forward_backward(model, micros).item())
            grads = grads if step else gradients(parallel)
            norms.append(optimizer.step().item())
        extras.append(
            0.0 if parallel.load_balancer is None else float(parallel.load_balancer.aux_loss_sum)
        )
        if case.fast:  # at step 0 the order of the gathers is not known, later it is
            flow = flow_of(batch, grid, case.micro_batches)
            orders = [
                micro.documents.orders
                for micro in micros
                if isinstance(micro.documents, ContextDocuments)
            ]
            cost = case.rule.cost(torch.float64) if isinstance(case.rule, Muon | Jorge) else None
            predicted = predict_events(parallel, flow, case.micro_batches, orders, cost)
            lines += diff_events(predicted, events, parallel.data_dependent_layers)
    if case.both:
        lines += without_overlap(grid, case, micros, grads)
    return {
        "lines": [f"rank {grid.rank}: {line}" for line in lines],
        "losses": losses,
        "norms": norms,
        "extras": extras,
        "grads": copied(grads),
        "start": start,
        "after": copied(parallel.sharded_state()),
        "optimizer": copied(optimizer.sharded_state()),
    }


def without_overlap(
    grid: Grid, case: Case, micros: list[Batch], grads: ShardedStateDict
) -> list[str]:
    """Gradients that change when all overlaps are switched off."""
    model = case.on(grid, overlap=())
    forward_backward(model, micros)
    plain = gradients(model.parallel)  # type: ignore[arg-type]
    return [
        f"gradient of {n} without overlap"
        for n, (g, _) in plain.items()
        if not torch.equal(g, grads[n][0])
    ]


def reload(
    grid: Grid, case: Case, weights: Mapping[str, Tensor], optimizer: Mapping[str, Tensor]
) -> list[str]:
    """What is not bit for bit there after loading a whole state."""
    model = case.on(grid, seed=5)
    parallel: ParallelModel = model.parallel  # type: ignore[assignment]
    loaded = Optimizer(parallel.bucket_scheduler, rule=case.rule)
    parallel.load_full_state(weights)
    loaded.load_full_state(optimizer, steps=case.steps)
    whole = {**weights, **optimizer}
    return [
        f"rank {grid.rank}: {name} changed by reloading"
        for name, (part, place) in {**parallel.sharded_state(), **loaded.sharded_state()}.items()
        if not torch.equal(part.cpu(), place.slice_from(whole[name]))
    ]


def switched(grid: Grid, case: Case) -> list[str]:
    """What differs in one bit when one overlap, or all, are switched off."""
    batch = batch_of(case.model, samples=16, packed=False)
    every = ("dx", "dw", "weight_gather", "residual")
    results = []
    for overlap in (every, (), *(tuple(o for o in every if o != one) for one in every)):
        model = case.on(grid, overlap=overlap)
        parallel: ParallelModel = model.parallel  # type: ignore[assignment]
        optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2)
        micros = micros_of(batch, grid, case.micro_batches)
        for _ in range(2):
            loss = forward_backward(model, micros)
            optimizer.step()
        results.append(
            (
                overlap,
                {"loss": loss} | {n: t for n, (t, _) in copied(parallel.sharded_state()).items()},
            )
        )
    _, first = results[0]
    return [
        f"rank {grid.rank}: {name} differs with overlap {overlap}"
        for overlap, other in results[1:]
        for name, value in other.items()
        if not torch.equal(value, first[name])
    ]


def copied(state: ShardedStateDict) -> ShardedStateDict:
    """A copy on the host."""
    return {name: (tensor.cpu().clone(), place) for name, (tensor, place) in state.items()}


def compare(serial: Serial, results: list[dict[str, Any]]) -> list[str]:
    """What differs between one process and the ranks of a grid."""
    lines = [line for result in results for line in result["lines"]]
    for rank, result in enumerate(results):
        sums = {"losses": serial.losses, "norms": serial.norms, "extras": serial.extras}
        for what, want in sums.items():
            for step, (a, b) in enumerate(zip(result[what], want, strict=True)):
                limit = ONE_PASS if step == 0 else STEPS
                if not abs(a - b) <= limit * abs(b):
                    lines.append(f"rank {rank}: {what} of step {step}: {a} instead of {b}")
    lines += [f"not bitwise the start: {n}" for n in not_equal(serial.values, results, "start")]
    floor = max(g.abs().max().item() for g in serial.grads.values())
    grads = assemble(result["grads"] for result in results)
    for name, want in serial.grads.items():
        lines += worst(f"gradient of {name}", grads[name], want, ONE_PASS, floor)
    after = assemble(result["after"] for result in results)
    for name, want in serial.after.items():
        noise = name in serial.grads and serial.grads[name].abs().max().item() < 1e-10 * floor
        if not noise:  # Adam makes full steps of rounding noise
            lines += worst(f"weight {name} after steps", after[name], want, STEPS)
    return lines + replicas(results)


def not_equal(values: Mapping[str, Tensor], results: list[dict[str, Any]], what: str) -> list[str]:
    """Names whose parts on some rank are not bitwise parts of the whole."""
    bad = []
    for result in results:
        for name, (part, place) in result[what].items():
            if not torch.equal(place.slice_from(values[name]), part):
                bad.append(name)
    return sorted(set(bad))


def replicas(results: list[dict[str, Any]]) -> list[str]:
    """Ranks that hold the same part must hold the same bits."""
    seen: dict[tuple[str, Shard], Tensor] = {}
    bad = []
    for result in results:
        for name, (part, place) in result["after"].items():
            first = seen.setdefault((name, place), part)
            if not torch.equal(first, part):
                bad.append(f"copies of {name} differ between ranks")
    return sorted(set(bad))
