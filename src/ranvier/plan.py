"""Plan: how many ranks lie on each axis of the grid, and how the batch is cut.

A plan is data: frozen, without processes, checked as a whole against the sizes of a model before any
process group exists. Derived numbers are properties here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ranvier.errors import PlanError

AXES = ("pipe", "data", "expert", "context", "depth", "row", "col")
"""All axes of the grid, from the outermost (slowest links) to the innermost (fastest)."""

RUNTIME = ("data", "depth", "row", "col")
"""Axes that a run can use today; the others must have degree 1."""

Inner = Literal["samples", "features"]
Overlap = Literal["dx", "dw", "gather"]
Recompute = Literal["none", "full", "reentrant"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Degrees of the seven axes, batch, and the switches that change speed but not results."""

    pipe: int = 1
    """Ranks on the pipe axis: pipeline stages."""
    data: int = -1
    """Ranks on the data axis: copies of the model, optimizer sharded (ZeRO-1). -1: the remaining ranks."""
    expert: int = 1
    """Ranks on the expert axis: samples for dense layers, experts for expert layers."""
    context: int = 1
    """Ranks on the context axis: parts of the sequence in attention."""
    depth: int = 1
    """Ranks on the depth axis: samples, and weights gathered just before use (ZeRO-3, FSDP)."""
    row: int = 1
    """Ranks on the row axis: tokens outside, heads and hidden features inside (Megatron tensor parallelism)."""
    col: int = 1
    """Ranks on the col axis: features of the residual stream outside, `inner` says what inside."""
    inner: Inner = "samples"
    """What col splits inside attention and MLP: samples (cheapest) or features (any micro-batch)."""
    batch: int = 8
    """Sequences of one optimizer step on the whole machine."""
    micro_batch: int = -1
    """Sequences of one forward pass on each (data, expert, depth) coordinate. -1: the whole share at once."""
    recompute: Recompute = "none"
    """Activations computed again in backward: none, full (each block keeps only its input), reentrant."""
    overlap: tuple[Overlap, ...] = ("dx", "dw", "gather")
    """Communication hidden behind compute: of dX, of dW (depth and data), of gathered weights."""

    @property
    def degrees(self) -> dict[str, int]:
        """Ranks on each axis, outermost first."""
        return {axis: getattr(self, axis) for axis in AXES}

    @property
    def world(self) -> int:
        """Number of ranks."""
        return math.prod(self.degrees.values())

    @property
    def replicas(self) -> int:
        """Coordinates that read different samples: data · expert · depth."""
        return self.data * self.expert * self.depth

    @property
    def micro_batches(self) -> int:
        """Forward passes of one optimizer step."""
        return self.batch // (self.replicas * self.micro_batch)

    def resolve(self, world: int) -> Plan:
        """Replace -1 by the degree that fills `world` ranks and by the micro-batch that fills the batch."""
        unknown = [axis for axis, size in self.degrees.items() if size == -1]
        known = math.prod(size for size in self.degrees.values() if size > 0)
        if len(unknown) > 1:
            raise PlanError(
                f"{' and '.join(f'{axis}=-1' for axis in unknown)} cannot both be inferred. "
                "At most one degree may be -1. Give the others a number."
            )
        if unknown and world % known:
            raise PlanError(_world_problem(self.degrees, world))
        plan = replace(self, **dict.fromkeys(unknown, world // known)) if unknown else self
        if plan.micro_batch == -1 and plan.replicas > 0 and plan.batch % plan.replicas == 0:
            plan = replace(plan, micro_batch=plan.batch // plan.replicas)
        return plan

    def check(self, sizes: Mapping[str, int], world: int) -> Plan:
        """The resolved plan, or a PlanError with every problem.

        `sizes` gives the number of units of each named dim of the model and `seq`, the tokens of a sample.
        """
        bad = [
            f"{axis}={size} is not a number of ranks. A degree is at least 1 (or -1 once: inferred). "
            f"Use {axis}=1."
            for axis, size in self.degrees.items()
            if size < 1 and size != -1
        ]
        if bad:
            raise PlanError(bad)
        try:
            plan = self.resolve(world)
        except PlanError as error:
            known = {axis: max(size, 1) for axis, size in self.degrees.items()}
            plan = replace(self, **known)
            problems = [*error.problems, *plan._problems(sizes, None)]
        else:
            problems = list(plan._problems(sizes, world))
        if problems:
            raise PlanError(problems)
        return plan

    def _problems(self, sizes: Mapping[str, int], world: int | None) -> Iterator[str]:
        """Every reason why this plan cannot run: values, rule, remedy."""
        for axis, size in self.degrees.items():
            if size > 1 and axis not in RUNTIME:
                yield (
                    f"{axis}={size}: the {axis} axis has no runtime yet. "
                    f"Axes that run today are {', '.join(RUNTIME)}. Use {axis}=1."
                )
        if world is not None and self.world != world:
            yield _world_problem(self.degrees, world)
        yield from self._batch_problems()
        yield from self._split_problems(sizes)

    def _batch_problems(self) -> Iterator[str]:
        shares = self.replicas
        if self.batch < 1 or self.batch % shares:
            yield (
                f"batch={self.batch} cannot be shared by data·expert·depth={shares} ranks. "
                f"The batch must be a multiple of it. Use batch={nearest_multiple(self.batch, shares)}."
            )
        elif self.micro_batch < 1 or (self.batch // shares) % self.micro_batch:
            share = self.batch // shares
            yield (
                f"micro_batch={self.micro_batch} does not divide the {share} sequences of a rank "
                f"(batch={self.batch} over {shares}). A rank's share must be a multiple of the "
                f"micro-batch. Use micro_batch in {', '.join(map(str, divisors(share)))}."
            )
        elif self.inner == "samples" and self.micro_batch % self.col:
            yield (
                f"col={self.col} does not divide micro_batch={self.micro_batch}. With "
                f"inner='samples' col splits the samples of a micro-batch. "
                f"Use micro_batch={nearest_multiple(self.micro_batch, self.col)}, a col in "
                f"{', '.join(map(str, divisors(self.micro_batch)))}, or inner='features'."
            )

    def _split_problems(self, sizes: Mapping[str, int]) -> Iterator[str]:
        inside = self.row if self.inner == "samples" else self.row * self.col
        name = "row" if self.inner == "samples" else "row·col"
        splits = {
            "seq": (self.context * self.row, "context·row" if self.context > 1 else "row"),
            "embed": (self.col, "col"),
            "heads": (inside, name),
            "mlp": (inside, name),
        }
        for dim, (ranks, axis) in splits.items():
            if dim in sizes and sizes[dim] % ranks:
                yield (
                    f"{axis}={ranks} does not divide {dim}={sizes[dim]}. A split dimension must be a "
                    f"multiple of its axis. Use {axis} in {', '.join(map(str, divisors(sizes[dim])))}"
                    f" or {dim}={nearest_multiple(sizes[dim], ranks)}."
                )
        heads = sizes.get("kv_heads", inside)
        for ranks, axis in dict.fromkeys([(self.row, "row"), (inside, name)]):
            if heads % ranks and ranks % heads:
                fits = [
                    n for n in range(1, 4 * max(heads, ranks)) if heads % n == 0 or n % heads == 0
                ]
                near = sorted(fits, key=lambda n: abs(n - ranks))[:3]
                yield (
                    f"{axis}={ranks} neither divides nor is a multiple of kv_heads={heads}. Key and value "
                    f"heads are split evenly or shared evenly. Use {axis} in {', '.join(map(str, sorted(near)))}."
                )


def divisors(number: int) -> list[int]:
    """All divisors, ascending."""
    return [n for n in range(1, number + 1) if number % n == 0]


def nearest_multiple(number: int, of: int) -> int:
    """The multiple of `of`, at least `of`, that is nearest to `number`."""
    return max(round(number / of), 1) * of


def _world_problem(degrees: Mapping[str, int], world: int) -> str:
    known = math.prod(size for size in degrees.values() if size > 0)
    shape = " · ".join(f"{a}={n}" for a, n in degrees.items() if n > 1) or "all degrees 1"
    return (
        f"{shape} needs {'a multiple of ' if -1 in degrees.values() else ''}{known} ranks, but {world} "
        f"{'is' if world == 1 else 'are'} there. The degrees must multiply to the number of ranks. "
        f"Start {nearest_multiple(world, known)} ranks or change a degree."
    )
