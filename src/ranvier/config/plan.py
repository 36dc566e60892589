"""Plan: the number of ranks on each axis of the grid, and how the batch is split.

A plan is immutable data without processes. It is validated as a whole against the sizes of a model
before any process group exists. Derived numbers are properties here and nowhere else.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from ranvier.errors import PlanError
from ranvier.setting import setting

AXES = ("pipe", "data", "expert", "context", "depth", "row", "col")
"""All axes of the grid, from the outermost (slowest links) to the innermost (fastest)."""

SETTING_NAMES = {"expert": "experts", "shared_mlp": "shared_expert_mlp"}
"""Names of settings that differ from the name of their dim."""

USUAL_TOKEN_CHUNK = 16384
MAX_WHOLE_TOKENS = 65536
"""Tokens of a chunk with token_chunk = -1, and tokens of a sample up to which there are none."""

InnerSplit = Literal["samples", "features"]
RowSplit = Literal["tokens", "none"]
RowSplitChoice = Literal["auto", "tokens", "none"]
Overlap = Literal["dx", "dw", "weight_gather", "moe_dispatch", "context_keys", "residual"]
Dispatch = Literal["model", "bf16", "fp8"]
Compile = Literal["auto", "on", "off"]
CompileErrors = Literal["auto", "fallback", "raise"]
ContextOrder = Literal["contiguous", "zigzag", "balanced"]
ContextOrderChoice = Literal["auto", "contiguous", "zigzag", "balanced"]
ContextAttention = Literal["kv_gather", "ring", "ulysses"]
ContextAttentionChoice = Literal["auto", "kv_gather", "ring", "ulysses"]
WeightSplit = Literal["depth", "depth_context"]
ReshardAfter = Literal["micro_batch", "step"]
PolicyName = Literal["message_driven", "gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full", "memory_budget"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of the seven axes, batch, and options that change speed but not results."""

    auto: bool = True
    """Let the planner choose the degrees if none is given and there are several ranks. It also
    chooses micro_batch, rank_order and recompute if they have their default values. False uses the
    given degrees, and `data` takes the remaining ranks. `plan = "auto"` and `--plan auto` mean
    True."""
    pipe: int = setting(1, maximum=10**6, unit="ranks")
    """Pipeline parallelism: number of stages."""
    data: int = setting(-1, maximum=10**6, unit="ranks")
    """Data parallelism with sharded optimizer states (ZeRO-1). -1 takes the remaining ranks."""
    expert: int = setting(1, maximum=10**6, unit="ranks")
    """Expert parallelism: splits experts in MoE layers, and samples in dense layers."""
    context: int = setting(1, maximum=10**6, unit="ranks")
    """Context parallelism: splits the tokens of a sample, also in attention. For long sequences."""
    depth: int = setting(1, maximum=10**6, unit="ranks")
    """Sharded data parallelism (ZeRO-3, FSDP): splits samples and weights, which are gathered
    before use."""
    row: int = setting(1, maximum=10**6, unit="ranks")
    """Tensor parallelism (Megatron): splits heads and hidden features. Outside attention and MLP it
    splits tokens (sequence parallelism)."""
    col: int = setting(1, maximum=10**6, unit="ranks")
    """Second dimension of tensor parallelism: splits the features of the residual stream outside
    attention and MLP. See `col_splits` for the inside."""
    col_splits: InnerSplit = "samples"
    """What col splits inside attention and MLP: samples (cheapest), or features (works with any
    micro-batch)."""
    row_splits: RowSplitChoice = "auto"
    """What row splits outside attention and MLP in a step of the inference engine: tokens, none
    (each rank of row has all tokens, and one all-reduce replaces an all-gather and a
    reduce-scatter), or auto (none for steps of few tokens). Training always splits tokens."""
    context_order: ContextOrderChoice = "auto"
    """Which tokens of a sample a rank of context gets. contiguous: part c of C. zigzag: parts c and
    2 C - 1 - c of 2 C, which balances the attention of one document. balanced: documents are on as
    few ranks as the balance of attention allows. auto means balanced."""
    context_attention: ContextAttentionChoice = "auto"
    """How attention gets keys of other ranks of context. kv_gather: a rank fetches the keys that
    its queries see. ring: keys travel around the ranks, which bounds memory; not with a sliding
    window. ulysses: an all-to-all exchanges tokens for heads, whose number context must divide.
    auto chooses by predicted cost for each kind of layer and micro-batch."""
    rank_order: tuple[str, ...] = ()
    """Axes whose ranks are placed closest together, innermost last, such as `row pipe`. The other
    axes are placed outside of them in the default order. If empty, the default order is used:
    `pipe` outermost, `col` innermost."""
    global_batch: int = setting(8, maximum=2**31, unit="sequences")
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int = setting(-1, unit="sequences")
    """Sequences per forward pass on each (data, expert, depth) coordinate. -1 means all at once.
    With recompute = memory_budget or memory.auto, -1 means the fastest that fits; with a pipeline,
    a size that gives up to four micro-batches per stage."""
    schedule: PolicyName = "message_driven"
    """Pipeline schedule. message_driven: a stage runs what has arrived, within max_in_flight and
    with priorities from a simulation; never slower than 1f1b. The others have a fixed order: gpipe,
    1f1b, interleaved (requires virtual_stages of at least 2), zero-bubble (weight gradients fill
    the bubbles)."""
    virtual_stages: int = 1
    """Model chunks per stage. More chunks fill the pipeline faster but communicate more."""
    stage_starts: tuple[int, ...] = ()
    """First part of each stage except the first. Parts are 0 (embedding), 1, 2, ... (blocks) and
    the head. If empty, stages are balanced by the FLOPs of the layers, or by stage_profile."""
    stage_profile: str = ""
    """Source of measured times to balance the stages with: a run directory (its timeline.json)
    or a TOML file (forward = [seconds of each part, ...]). If empty, the FLOPs of the layers are
    used."""
    max_in_flight: int = setting(0, unit="micro-batches")
    """Maximum number of micro-batches whose activations a stage holds. 0 means as many as are
    useful, or as fit into memory.device_limit_gib if it is set."""
    stage_time_jitter: float = 0.1
    """Variation of job times that the message_driven schedule expects (standard deviation of their
    logarithm)."""
    vocab_over_pipe: bool = False
    """Split the vocabulary (embedding and head) over all stages, instead of placing it on the first
    and the last stage."""
    shard_weights_over: WeightSplit = "depth"
    """Ranks over which matrices are split and gathered before use (ZeRO-3): depth, or
    depth_context (depth and context together), for samples so long that few ranks are on depth."""
    reshard_after: ReshardAfter = "micro_batch"
    """When to free the weights that were gathered over depth: after each micro-batch (they are
    gathered again for the next one), or at the end of the step."""
    recompute: Recompute = "none"
    """Activation checkpointing: none; selective (save the results of matrix products and attention,
    recompute the rest); full (save only the inputs of blocks); memory_budget (each block saves what
    fits into memory.device_limit_gib, with as little recomputation as possible)."""
    token_chunk: int = setting(-1, minimum=-1, unit="tokens")
    """Tokens of a rank that norms, projections and the MLP of a block process at a time (sequence
    tiling, the tiled MLP of ALST); they are recomputed in the backward pass. This bounds the memory
    of very long samples. Blocks in chunks are not compiled. -1 means 16,384 if a rank has more than
    65,536 tokens of a sample and row and col are 1; 0 disables it."""
    compile: Compile = "auto"
    """Compile each block with torch.compile: on, off or auto. Equal blocks share one graph without
    graph breaks; with expert > 1 a graph ends at the experts of its block. auto compiles on CUDA
    with Triton if context, depth, row and col are 1, because a graph does not overlap their
    communication. The first run takes longer to start; later runs use the compile cache."""
    compile_errors: CompileErrors = "auto"
    """What happens if a block cannot be compiled, or a step cannot be captured as a CUDA graph, in
    training and in an engine: fallback (a warning; the block or the step runs without a graph, with
    the same numbers) or raise (an error). auto takes the value of the environment variable
    RANVIER_COMPILE_ERRORS, or fallback if it is not set."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph, for models so small that kernel launches dominate.
    Requires one rank and data.document_mask=False."""
    overlap: tuple[Overlap, ...] = (
        *("dx", "dw", "weight_gather", "moe_dispatch", "context_keys"),
        "residual",
    )
    """Communication to overlap with compute: dx (input gradients), dw (weight gradients, over
    depth, data, context and expert), weight_gather (all-gather of weights), moe_dispatch (tokens to
    experts and back, behind the shared expert), context_keys (keys and values of other ranks of
    context), residual (outputs of attention and MLP of ladder layers, behind the next module)."""
    moe_dispatch_dtype: Dispatch = "model"
    """Data type in which tokens are sent to experts: model (the type of the activations), bf16, or
    fp8 (e4m3 with one scale per row: half the bytes of bf16, 4 significant bits). Expert outputs
    and gradients keep the type of the activations."""

    @property
    def token_order(self) -> ContextOrder:
        """The order of tokens over context."""
        if self.context_order == "auto":
            return "balanced"
        return self.context_order

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks on each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def axis_order(self) -> tuple[str, ...]:
        """All axes in the order in which ranks are placed, outermost first."""
        # Axes that are not named keep their usual order outside of the named ones.
        return (*(axis for axis in AXES if axis not in self.rank_order), *self.rank_order)

    @property
    def ranks_per_copy(self) -> int:
        """Number of ranks that hold one copy of the weights: pipe · row · col · `gather_ranks`."""
        return self.pipe * self.gather_ranks * self.row * self.col

    @property
    def gather_ranks(self) -> int:
        """Number of ranks over which matrices are gathered before use."""
        if self.shard_weights_over == "depth_context":
            return self.context * self.depth
        return self.depth

    @property
    def has_whole_blocks(self) -> bool:
        """Whether each block is on one rank, so that it computes without communication."""
        return self.ranks_per_copy == self.pipe and self.context == 1

    @property
    def num_replicas(self) -> int:
        """Number of coordinates that read different samples: data · expert · depth."""
        return self.data * self.expert * self.depth

    @property
    def num_micro_batches(self) -> int:
        """Number of forward passes per optimizer step."""
        assert self.micro_batch > 0, f"micro_batch={self.micro_batch} is not resolved yet"
        return self.global_batch // (self.num_replicas * self.micro_batch)

    def tokens_per_chunk(self, samples: int, tokens: int) -> int:
        """Returns the tokens of a chunk of a block; 0 if the block runs as a whole.

        samples, tokens: of a micro-batch on a rank, and of each of its samples.
        """
        # Chunks with communication inside are not supported.
        if self.token_chunk == 0 or self.row * self.col > 1:
            return 0
        if self.token_chunk > 0:
            return self.token_chunk if samples * tokens > self.token_chunk else 0
        # Many short samples need no chunks: a smaller micro-batch has the same effect.
        return USUAL_TOKEN_CHUNK if tokens > MAX_WHOLE_TOKENS else 0

    def chunk_of_samples(self, samples: int, seq_len: int) -> int:
        """Returns `tokens_per_chunk` for whole samples of `seq_len` tokens."""
        return self.tokens_per_chunk(samples, seq_len // max(self.context, 1))

    @property
    def without_measuring(self) -> Plan:
        """The plan for callers that do not measure memory: unset values get their defaults."""
        if self.recompute == "memory_budget":
            kind: Recompute = "selective"
        else:
            kind = self.recompute
        return replace(self, recompute=kind).with_degrees({})

    def resolve(self, world: int) -> Plan:
        """Replaces -1 by the degree that fills `world` and by the micro-batch that fills the
        batch."""
        unknown = [axis for axis, size in self.degrees.items() if size == -1]
        known = math.prod(size for size in self.degrees.values() if size > 0)
        problems = [
            f"{axis}={size} is not a number of ranks. A degree is at least 1, or -1 to infer "
            f"it. Use {axis}=1."
            for axis, size in self.degrees.items()
            if size < 1 and size != -1
        ]
        if len(unknown) > 1:
            problems.append(
                f"{' and '.join(f'{axis}=-1' for axis in unknown)} cannot both be inferred. "
                f"At most one degree may be -1. Set the others to a number, such as "
                f"{' or '.join(f'{axis}=1' for axis in unknown)}."
            )
        if problems:
            raise PlanError(problems)
        if unknown and world % known:
            raise PlanError(_world_problem(self.degrees, world))
        return self.with_degrees(dict.fromkeys(unknown, world // known))

    def with_degrees(self, degrees: Mapping[str, int]) -> Plan:
        """Returns the plan with these degrees, and with the default micro-batch if it is -1."""
        plan = replace(self, **dict[str, Any](degrees))
        if (
            plan.micro_batch == -1
            and plan.num_replicas > 0
            and plan.global_batch % plan.num_replicas == 0
        ):
            plan = replace(
                plan, micro_batch=plan._default_micro_batch(plan.global_batch // plan.num_replicas)
            )
        return plan

    def _default_micro_batch(self, share: int) -> int:
        """Returns the default micro-batch: the whole share of a rank, or a part that keeps stages
        busy."""
        if self.pipe == 1:
            return share
        if self.col_splits == "samples":
            multiple = self.col
        else:
            multiple = 1
        # The smallest size with at most 4 · pipe micro-batches. With col_splits='samples' it must
        # be a multiple of col.
        fits = [n for n in divisors(share) if n % multiple == 0 and share // n <= 4 * self.pipe]
        if fits:
            return fits[0]
        return share

    def check_and_resolve(
        self, sizes: Mapping[str, int], world: int, *, fitted: bool = False
    ) -> Plan:
        """Returns the resolved plan; raises a PlanError with every problem.

        `sizes` has the number of units of each named dim of the model, and `seq`, the tokens per
        sample. If the micro-batch is searched later, for a memory budget or by `memory.auto`
        (`fitted`), it stays -1; the micro-batch of the whole share is validated instead.
        """
        problems = list[str]()
        try:
            plan = self.resolve(world)
        except PlanError as error:
            problems += error.problems
            plan = self
        # Set unknown degrees to 1 to find further problems, and report all at once.
        if problems:
            plan = self.with_degrees({axis: max(size, 1) for axis, size in self.degrees.items()})
        problems += plan.find_problems(sizes, None if problems else world)
        if problems:
            raise PlanError(problems)
        # The search for the micro-batch runs later, with measured memory.
        left_open = (fitted or self.recompute == "memory_budget") and self.micro_batch == -1
        if left_open:
            return replace(plan, micro_batch=-1)
        return plan

    def find_problems(self, sizes: Mapping[str, int], world: int | None = None) -> Iterator[str]:
        """Yields every reason why this plan, with all degrees known, cannot run: values, rule,
        remedy."""
        yield from self._word_problems()
        if world is not None and self.world_size != world:
            yield _world_problem(self.degrees, world)
        yield from self._pipe_problems(sizes)
        if self.cuda_graph and self.world_size > 1:
            yield (
                f"cuda_graph=True on {self.world_size} ranks. CUDA graphs support only one rank. "
                "Use cuda_graph=False or one rank."
            )
        if self.token_chunk > 0 and self.row * self.col > 1:
            yield (
                f"token_chunk={self.token_chunk} with row={self.row} and col={self.col}. A chunk "
                "of tokens must not communicate activations inside of a block. Use row=1 and "
                "col=1, or token_chunk=0."
            )
        if self.token_chunk > 0 and self.compile == "on":
            yield (
                f"compile='on' with token_chunk={self.token_chunk}. A block in chunks of tokens is "
                "not compiled. Use compile='off', or token_chunk=0."
            )
        yield from self._batch_problems()
        yield from self._sample_problems(sizes)
        yield from self._split_problems(sizes)
        yield from self._kv_problems(sizes)
        yield from self._ulysses_problems(sizes)

    def _pipe_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yields problems of the pipeline settings."""
        problems = []
        if self.virtual_stages < 1:
            problems.append(
                f"virtual_stages={self.virtual_stages} is too small. It must be at least 1. Use "
                "virtual_stages=1."
            )
        if self.max_in_flight < 0:
            problems.append(
                f"max_in_flight={self.max_in_flight} is too small. It must be at least 0, which "
                "means as many as are useful. Use max_in_flight=0."
            )
        if not 0.0 <= self.stage_time_jitter <= 2.0:
            problems.append(
                f"stage_time_jitter={self.stage_time_jitter} is out of range. It must be in "
                "[0, 2]. Use stage_time_jitter=0.1."
            )
        yield from problems
        # The checks below assume values in range.
        if problems:
            return
        if self.pipe == 1:
            odd = [f"virtual_stages={self.virtual_stages}"] * (self.virtual_stages > 1) + [
                "vocab_over_pipe=True"
            ] * self.vocab_over_pipe
            odd += [f"stage_starts={list(self.stage_starts)}"] * bool(self.stage_starts)
            for one in odd:
                yield f"{one} with pipe=1. Stages require a pipeline. Use pipe=2 or remove it."
            return
        virtual = self.pipe * self.virtual_stages
        # Embedding and head count as parts.
        parts = sizes.get("layers", 0) + 2
        if "layers" in sizes and virtual > parts:
            yield (
                f"pipe={self.pipe} with virtual_stages={self.virtual_stages} gives {virtual} "
                f"virtual stages, but {sizes['layers']} layers, embedding and head are {parts} "
                f"parts. Each stage needs a part. Use pipe·virtual_stages of at most {parts}."
            )
        if self.schedule in ("1f1b", "gpipe", "zero-bubble") and self.virtual_stages > 1:
            yield (
                f"schedule={self.schedule!r} with virtual_stages={self.virtual_stages}. This "
                "schedule supports one chunk per stage. Use 'interleaved' or 'message_driven', or "
                "virtual_stages=1."
            )
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            yield (
                "schedule='interleaved' with virtual_stages=1. Interleaving needs 2 or more "
                "chunks per stage. Use virtual_stages=2 or schedule='1f1b'."
            )

    def _word_problems(self) -> Iterator[str]:
        words: list[tuple[str, str, tuple[str, ...]]]
        words = [("col_splits", self.col_splits, get_args(InnerSplit))]
        words += [("row_splits", self.row_splits, get_args(RowSplitChoice))]
        words += [("recompute", self.recompute, get_args(Recompute))]
        words += [("compile", self.compile, get_args(Compile))]
        words += [("compile_errors", self.compile_errors, get_args(CompileErrors))]
        words += [("context_order", self.context_order, get_args(ContextOrderChoice))]
        words += [("context_attention", self.context_attention, get_args(ContextAttentionChoice))]
        words += [("schedule", self.schedule, get_args(PolicyName))]
        words += [("shard_weights_over", self.shard_weights_over, get_args(WeightSplit))]
        words += [("reshard_after", self.reshard_after, get_args(ReshardAfter))]
        words += [("overlap", word, get_args(Overlap)) for word in self.overlap]
        words += [("moe_dispatch_dtype", self.moe_dispatch_dtype, get_args(Dispatch))]
        words += [("rank_order", word, AXES) for word in self.rank_order]
        for name, word, known in words:
            if word not in known:
                # cutoff=0: always name the nearest known word.
                near = difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
                yield (
                    f"{name}={word!r} is unknown. Known values are {', '.join(known)}. "
                    f"Use {near!r}."
                )

        if len(set(self.rank_order)) < len(self.rank_order):
            yield f"rank_order={list(self.rank_order)} names an axis twice. Name each axis once."

    def _batch_problems(self) -> Iterator[str]:
        shares = self.num_replicas
        if self.global_batch < 1 or self.global_batch % shares:
            yield (
                f"global_batch={self.global_batch} cannot be split over data·expert·depth={shares} "
                "ranks. It must be a positive multiple of that number. Use "
                f"global_batch={nearest_multiple(self.global_batch, shares)}."
            )
        elif self.micro_batch < 1 or (self.global_batch // shares) % self.micro_batch:
            share = self.global_batch // shares
            yield (
                f"micro_batch={self.micro_batch} does not divide the {share} sequences of a rank "
                f"(global_batch={self.global_batch} over {shares}). The micro-batch must divide "
                f"the sequences of a rank. Use micro_batch={_format_choice(divisors(share))}."
            )

    def _sample_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Yields problems of col with the micro-batch."""
        if (
            self.col_splits == "features"
            or self.micro_batch < 1
            or self.micro_batch % self.col == 0
        ):
            return
        share = self.global_batch // self.num_replicas
        fits = [n for n in divisors(share) if n % self.col == 0]
        near = min(fits, key=lambda n: abs(n - self.micro_batch), default=0)
        batch = nearest_multiple(self.global_batch, self.num_replicas * self.col)
        remedies = [
            f"micro_batch={near}" if near else f"global_batch={batch} and micro_batch={self.col}"
        ]
        remedies += [f"col={_format_choice(divisors(self.micro_batch))}"]
        # Do not suggest features if the dims cannot be split either.
        features = replace(self, col_splits="features")
        if not [*features._split_problems(sizes), *features._kv_problems(sizes)]:
            remedies += ["col_splits='features'"]
        yield (
            f"col={self.col} does not divide micro_batch={self.micro_batch}. With "
            "col_splits='samples' col splits the samples of a micro-batch. Use "
            f"{', or '.join(remedies)}."
        )

    @property
    def _inner_ranks(self) -> tuple[int, str]:
        """Ranks that split heads and hidden features, and their name."""
        samples = self.col_splits == "samples"
        if samples:
            return (self.row, "row")
        return (self.row * self.col, "row·col")

    def _split_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        # Dim -> (number of ranks that split it, their name in messages).
        splits = {
            "seq": (self.context * self.row, "context·row" if self.context > 1 else "row"),
            "embed": (self.col, "col"),
            "heads": self._inner_ranks,
            "mlp": self._inner_ranks,
            "shared_mlp": self._inner_ranks,
            "expert": (self.expert, "expert"),
            "expert_mlp": (self.row * self.col, "row·col"),
        }
        for dim, (ranks, axis) in splits.items():
            if dim in sizes and sizes[dim] % ranks:
                name = SETTING_NAMES.get(dim, dim)
                yield (
                    f"{axis}={ranks} does not divide {name}={sizes[dim]}. A sharded dimension must "
                    f"be a multiple of its axis size. Use "
                    f"{axis}={_format_choice(divisors(sizes[dim]))}, "
                    f"or {name}={nearest_multiple(sizes[dim], ranks)}."
                )

    def _ulysses_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        if self.context_attention != "ulysses" or self.context == 1 or "heads" not in sizes:
            return
        ranks, axis = self._inner_ranks
        heads = max(sizes["heads"] // ranks, 1)
        kv_heads = max(sizes.get("kv_heads", sizes["heads"]) // ranks, 1)

        def can_split(context: int) -> bool:
            return heads % context == 0 and (kv_heads % context == 0 or context % kv_heads == 0)

        if not can_split(self.context):
            valid = [n for n in range(1, heads + 1) if can_split(n)]
            yield (
                f"context_attention='ulysses' with context={self.context} and {axis}={ranks}, for "
                f"{sizes['heads']} heads and {sizes.get('kv_heads', sizes['heads'])} kv heads. "
                "Context must divide the heads of a rank, and divide or be a multiple of its kv "
                f"heads. Use context={_format_choice(valid)}, or context_attention='kv_gather'."
            )

    def _kv_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        heads = sizes.get("kv_heads", 1)
        # Key/value heads are either split over the ranks, or each is shared by equally many ranks.
        for ranks, axis in dict.fromkeys([(self.row, "row"), self._inner_ranks]):
            if heads % ranks and ranks % heads:
                fits = {*divisors(heads), *(heads * (ranks // heads + i) for i in (0, 1, 2))} - {0}
                near = sorted(sorted(fits, key=lambda n: abs(n - ranks))[:3])
                yield (
                    f"{axis}={ranks} neither divides kv_heads={heads} nor is a multiple of it. "
                    "Key/value heads must be split or replicated evenly. Use "
                    f"{axis}={_format_choice(near)}."
                )


def divisors(number: int) -> list[int]:
    """Returns all divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def nearest_multiple(number: int, of: int) -> int:
    """Returns the multiple of `of`, at least `of`, that is nearest to `number`."""
    return max((2 * number + of) // (2 * of), 1) * of


def _format_choice(numbers: Iterable[int]) -> str:
    """Numbers to choose from, such as `1, 2 or 4`."""
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


def _world_problem(degrees: Mapping[str, int], world: int) -> str:
    known = math.prod(size for size in degrees.values() if size > 0)
    shape = " · ".join(f"{a}={n}" for a, n in degrees.items() if n > 1) or "all degrees 1"
    inferred = -1 in degrees.values()
    # Ranks of all axes but data: if they divide `world`, another data degree is a remedy.
    others = known // max(degrees["data"], 1)
    if inferred or world % others:
        data = ""
    else:
        data = f" or use data={world // others}"
    return (
        f"{shape} needs {'a multiple of ' if inferred else ''}{known} ranks, but there "
        f"{'is' if world == 1 else 'are'} {world}. The product of the degrees must equal the "
        f"number of ranks. Start {nearest_multiple(world, known) if inferred else known} ranks"
        f"{data or ' or change a degree'}."
    )
