"""Plan: the number of ranks on each axis of the grid, and how the batch is split.

A plan is data: frozen, without processes, validated as a whole against the sizes of a model before
any process group exists. Derived numbers are properties here and nowhere else.
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

RUNNABLE_AXES = ("pipe", "data", "expert", "depth", "row", "col")
"""Axes that a run can use today; the others must have degree 1."""

SETTING_NAMES = {"expert": "experts", "shared_mlp": "shared_expert_mlp"}
"""What a setting is called where its dim is called otherwise."""

InnerSplit = Literal["samples", "features"]
Overlap = Literal["dx", "dw", "weight_gather", "moe_dispatch"]
Dispatch = Literal["model", "bf16", "fp8"]
Compile = Literal["auto", "on", "off"]
ReshardAfter = Literal["micro_batch", "step"]
PolicyName = Literal["message_driven", "gpipe", "1f1b", "interleaved", "zero-bubble"]
Recompute = Literal["none", "selective", "full", "memory_budget"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of the seven axes, batch, and the switches that change speed but not results."""

    auto: bool = True
    """On several ranks, where no degree is given, let the planner choose the degrees, and with them
    micro_batch, rank_order and recompute where those have their default values. False: degrees are
    as given, and `data` takes the rest. `plan = "auto"` and `--plan auto` mean True."""
    pipe: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the pipe axis: pipeline stages."""
    data: int = setting(-1, maximum=10**6, unit="ranks")
    """Ranks on the data axis: copies of the model, optimizer sharded (ZeRO-1). -1: the rest."""
    expert: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the expert axis: samples for dense layers, experts for expert layers."""
    context: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the context axis: parts of the sequence in attention."""
    depth: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the depth axis: samples, and weights gathered just before use (ZeRO-3, FSDP)."""
    row: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the row axis: tokens outside, heads and hidden features inside (Megatron)."""
    col: int = setting(1, maximum=10**6, unit="ranks")
    """Ranks on the col axis: features of the residual stream outside, `col_splits` says what
    inside."""
    col_splits: InnerSplit = "samples"
    """What col splits inside attention and MLP: samples (cheapest), features (any micro-batch)."""
    rank_order: tuple[str, ...] = ()
    """Axes whose ranks lie nearest to each other, the innermost last, such as `row pipe`; the
    others lie outside of them in the usual order. Empty: the usual order, in which `pipe` is
    outermost and `col` innermost."""
    global_batch: int = setting(8, maximum=2**31, unit="sequences")
    """Sequences per optimizer step, over all ranks."""
    micro_batch: int = setting(-1, unit="sequences")
    """Sequences of a forward pass on each (data, expert, depth) coordinate. -1: all at once; with
    recompute = memory_budget or memory.auto the fastest that fits; with a pipeline so few that each
    stage has up to four micro-batches to work on."""
    schedule: PolicyName = "message_driven"
    """Pipeline schedule: message_driven (a stage runs what has arrived, within max_in_flight and by
    priorities from simulation, never slower than 1f1b), or a fixed order: gpipe, 1f1b, interleaved
    (for virtual_stages of 2 or more), zero-bubble (weight gradients fill the bubbles)."""
    virtual_stages: int = 1
    """Model chunks per stage: with more the pipeline fills faster and communicates more."""
    stage_starts: tuple[int, ...] = ()
    """First part (0: embedding, 1, 2, ...: blocks, last: head) of each stage but the first. Empty:
    balanced by the work of the layers, or by stage_profile."""
    stage_profile: str = ""
    """Run folder (its timeline.json) or TOML file (forward = [seconds of each part, ...]) whose
    measured times decide where the model is cut. Empty: the work of the layers."""
    max_in_flight: int = setting(0, unit="micro-batches")
    """Micro-batches whose activations a stage may hold. 0: as many as are of use, or as fit into
    memory.device_limit_gib if that is given."""
    stage_time_jitter: float = 0.1
    """Variation of the times of jobs that the message_driven schedule expects (standard deviation
    of their logarithm)."""
    vocab_over_pipe: bool = False
    """Spread the vocabulary (embedding and head) over all stages instead of giving it to the first
    and the last."""
    reshard_after: ReshardAfter = "micro_batch"
    """When weights gathered over depth are freed: after each micro-batch (they are gathered again
    for the next), or at the end of the step."""
    recompute: Recompute = "none"
    """Activations computed again in backward: none; selective (blocks keep the results of matrix
    products and attention); full (blocks keep their input); memory_budget (each block keeps
    what fits into memory.device_limit_gib, as little as possible is computed again)."""
    compile: Compile = "auto"
    """Compile each block, without a break and one graph for all equal blocks: on, off, or auto: on
    CUDA with Triton where depth, row and col are 1 (a graph does not overlap their communication).
    The first run takes longer to start; later ones find what was compiled. With expert > 1 a graph
    ends at the experts of its block."""
    cuda_graph: bool = False
    """Replay the whole step as one CUDA graph, for models so small that launching kernels is what
    takes the time; one rank, samples without documents inside (data.document_mask=False)."""
    overlap: tuple[Overlap, ...] = ("dx", "dw", "weight_gather", "moe_dispatch")
    """Communication hidden behind compute: of dX, of dW (depth and data), of gathered weights, of
    tokens on their way to experts and back (behind the shared expert)."""
    moe_dispatch_dtype: Dispatch = "model"
    """Type in which tokens are sent to experts: model (that of the activations), bf16, or fp8 (e4m3
    with a scale per row: half the bytes of bf16, rounded to 4 digits). Outputs of experts and
    gradients keep the type of the activations."""

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
        """Ranks that split one copy of the weights: pipe · depth · row · col."""
        return self.pipe * self.depth * self.row * self.col

    @property
    def has_whole_blocks(self) -> bool:
        """Whether each block is on one rank, so that it computes without communication."""
        return self.ranks_per_copy == self.pipe

    @property
    def num_replicas(self) -> int:
        """Coordinates that read different samples: data · expert · depth."""
        return self.data * self.expert * self.depth

    @property
    def num_micro_batches(self) -> int:
        """Forward passes of one optimizer step."""
        assert self.micro_batch > 0, f"micro_batch={self.micro_batch} is not settled yet"
        return self.global_batch // (self.num_replicas * self.micro_batch)

    @property
    def without_measuring(self) -> Plan:
        """The plan for callers that do not measure memory: open values get their defaults."""
        if self.recompute == "memory_budget":
            kind: Recompute = "selective"
        else:
            kind = self.recompute
        return replace(self, recompute=kind).with_degrees({})

    def resolve(self, world: int) -> Plan:
        """Replace -1 by the degree that fills `world` and the micro-batch that fills the batch."""
        unknown = [axis for axis, size in self.degrees.items() if size == -1]
        known = math.prod(size for size in self.degrees.values() if size > 0)
        if len(unknown) > 1:
            raise PlanError(
                f"{' and '.join(f'{axis}=-1' for axis in unknown)} cannot both be inferred. "
                f"At most one degree may be -1. Give the others a number, "
                f"{' or '.join(f'{axis}=1' for axis in unknown)}."
            )
        if unknown and world % known:
            raise PlanError(_world_problem(self.degrees, world))
        return self.with_degrees(dict.fromkeys(unknown, world // known))

    def with_degrees(self, degrees: Mapping[str, int]) -> Plan:
        """The plan with these degrees, and the default micro-batch if it is to be inferred."""
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
        """Default micro-batch of a rank's share: all of it, or a part that keeps stages busy."""
        if self.pipe == 1:
            return share
        if self.col_splits == "samples":
            multiple = self.col
        else:
            multiple = 1
        # The smallest one with at most 4 · pipe micro-batches. With col_splits='samples' col has to
        # divide it.
        fits = [n for n in divisors(share) if n % multiple == 0 and share // n <= 4 * self.pipe]
        if fits:
            return fits[0]
        return share

    def check_and_resolve(
        self, sizes: Mapping[str, int], world: int, *, fitted: bool = False
    ) -> Plan:
        """The resolved plan, or a PlanError with every problem.

        `sizes` counts the units of each named dim of the model, and `seq`, the tokens of a sample.
        A micro-batch that is found by a memory budget or fit (`fitted`) stays -1; that of the whole
        share is validated in its place.
        """
        problems = [
            f"{axis}={size} is not a number of ranks. A degree is at least 1 (or -1 once: "
            f"inferred). Use {axis}=1."
            for axis, size in self.degrees.items()
            if size < 1 and size != -1
        ]
        try:
            plan = self.resolve(world)
        except PlanError as error:
            problems += error.problems
            plan = self
        # Look for further problems as if each unknown degree were 1, to report all at once.
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
        """Every reason why this plan, with all degrees known, cannot run: values, rule, remedy."""
        yield from self._word_problems()
        for axis, size in self.degrees.items():
            if size > 1 and axis not in RUNNABLE_AXES:
                yield (
                    f"{axis}={size}: the {axis} axis has no runtime yet. Axes that run today are "
                    f"{', '.join(RUNNABLE_AXES)}. Use {axis}=1."
                )
        if world is not None and self.world_size != world:
            yield _world_problem(self.degrees, world)
        yield from self._pipe_problems(sizes)
        if self.cuda_graph and self.world_size > 1:
            yield (
                f"cuda_graph=True on {self.world_size} ranks. A step is recorded on one rank only. "
                "Use cuda_graph=False or one rank."
            )
        yield from self._batch_problems()
        yield from self._sample_problems(sizes)
        yield from self._split_problems(sizes)
        yield from self._kv_problems(sizes)

    def _pipe_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Problems of the pipeline settings."""
        if (
            self.virtual_stages < 1
            or self.max_in_flight < 0
            or not 0.0 <= self.stage_time_jitter <= 2.0
        ):
            yield (
                f"virtual_stages={self.virtual_stages}, max_in_flight={self.max_in_flight} or "
                f"stage_time_jitter={self.stage_time_jitter} is out of range. They are 1 or more, "
                "0 or more, in [0, 2]. Use 1, 0 and 0.1."
            )
            # The checks below assume values in range.
            return
        if self.pipe == 1:
            odd = [f"virtual_stages={self.virtual_stages}"] * (self.virtual_stages > 1) + [
                "vocab_over_pipe=True"
            ] * self.vocab_over_pipe
            odd += [f"stage_starts={list(self.stage_starts)}"] * bool(self.stage_starts)
            for one in odd:
                yield f"{one} with pipe=1. Only a pipeline has stages. Use pipe=2 or leave it out."
            return
        virtual = self.pipe * self.virtual_stages
        # Embedding and head are parts of their own.
        parts = sizes.get("layers", 0) + 2
        if "layers" in sizes and virtual > parts:
            yield (
                f"pipe={self.pipe} with virtual_stages={self.virtual_stages} makes {virtual} "
                f"virtual stages, but {sizes['layers']} layers, embedding and head are {parts} "
                f"parts. Each stage needs one. Use pipe·virtual_stages of at most {parts}."
            )
        if self.schedule in ("1f1b", "gpipe", "zero-bubble") and self.virtual_stages > 1:
            yield (
                f"schedule={self.schedule!r} with virtual_stages={self.virtual_stages}. Its order "
                "is for one chunk. Use 'interleaved' or 'message_driven', or virtual_stages=1."
            )
        if self.schedule == "interleaved" and self.virtual_stages == 1:
            yield (
                "schedule='interleaved' with virtual_stages=1 is 1f1b. Use virtual_stages=2 or "
                "schedule='1f1b'."
            )

    def _word_problems(self) -> Iterator[str]:
        words: list[tuple[str, str, tuple[str, ...]]]
        words = [("col_splits", self.col_splits, get_args(InnerSplit))]
        words += [("recompute", self.recompute, get_args(Recompute))]
        words += [("compile", self.compile, get_args(Compile))]
        words += [("schedule", self.schedule, get_args(PolicyName))]
        words += [("reshard_after", self.reshard_after, get_args(ReshardAfter))]
        words += [("overlap", word, get_args(Overlap)) for word in self.overlap]
        words += [("moe_dispatch_dtype", self.moe_dispatch_dtype, get_args(Dispatch))]
        words += [("rank_order", word, AXES) for word in self.rank_order]
        for name, word, known in words:
            if word not in known:
                # cutoff=0: always name the nearest known word.
                near = difflib.get_close_matches(word, known, n=1, cutoff=0.0)[0]
                yield f"{name}={word!r} is not known. Known are {', '.join(known)}. Use {near!r}."

        if len(set(self.rank_order)) < len(self.rank_order):
            yield f"rank_order={list(self.rank_order)} names an axis twice. Name each once."

    def _batch_problems(self) -> Iterator[str]:
        shares = self.num_replicas
        if self.global_batch < 1 or self.global_batch % shares:
            yield (
                f"global_batch={self.global_batch} cannot be shared by data·expert·depth={shares} "
                "ranks. The batch must be a multiple of it. Use "
                f"global_batch={nearest_multiple(self.global_batch, shares)}."
            )
        elif self.micro_batch < 1 or (self.global_batch // shares) % self.micro_batch:
            share = self.global_batch // shares
            yield (
                f"micro_batch={self.micro_batch} does not divide the {share} sequences of a rank "
                f"(global_batch={self.global_batch} over {shares}). A rank's share must be a "
                "multiple of the micro-batch. Use micro_batch in "
                f"{_format_numbers(divisors(share))}."
            )

    def _sample_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        """Problems of col with the micro-batch; features are a remedy only where they divide."""
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
        remedies += [f"col in {_format_numbers(divisors(self.micro_batch))}"]
        # Do not suggest features where the dims do not divide either.
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
                    f"{axis}={ranks} does not divide {name}={sizes[dim]}. A split dimension must "
                    f"be a multiple of its axis. Use {axis} in "
                    f"{_format_numbers(divisors(sizes[dim]))}"
                    f" or {name}={nearest_multiple(sizes[dim], ranks)}."
                )

    def _kv_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        heads = sizes.get("kv_heads", 1)
        # Key and value heads are either split over the ranks or shared by equally many of them.
        for ranks, axis in dict.fromkeys([(self.row, "row"), self._inner_ranks]):
            if heads % ranks and ranks % heads:
                fits = {*divisors(heads), *(heads * (ranks // heads + i) for i in (0, 1, 2))} - {0}
                near = sorted(sorted(fits, key=lambda n: abs(n - ranks))[:3])
                yield (
                    f"{axis}={ranks} neither divides nor is a multiple of kv_heads={heads}. Key "
                    f"and value heads are split or shared evenly. Use {axis} in "
                    f"{_format_numbers(near)}."
                )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    low = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*low, *(number // n for n in low)})


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of `of`, at least `of`, that is nearest to `number`."""
    return max((2 * number + of) // (2 * of), 1) * of


def _format_numbers(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, numbers))


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
        f"{shape} needs {'a multiple of ' if inferred else ''}{known} ranks, but {world} "
        f"{'is' if world == 1 else 'are'} there. The degrees must multiply to the number of ranks. "
        f"Start {nearest_multiple(world, known) if inferred else known} ranks"
        f"{data or ' or change a degree'}."
    )
