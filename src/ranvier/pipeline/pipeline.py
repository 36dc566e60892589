"""Pipeline: a runtime, and the policy that suits the number of micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ranvier.layers import Flow
from ranvier.pipeline.choice import policy_for
from ranvier.pipeline.cut import Cut
from ranvier.pipeline.line import BACKWARD, FORWARD
from ranvier.pipeline.policy import Job, Order, Policy, Shape
from ranvier.pipeline.runtime import Runtime
from ranvier.pipeline.simulator import Times
from ranvier.pipeline.vocabulary import FINAL, PART, RETURN, ROWS
from ranvier.trace import Event


@dataclass
class Pipeline:
    """The stages of a model and their policy."""

    runtime: Runtime
    how: Cut
    embed: int = 0
    """Features of a message, all ranks of col together."""
    chosen: dict[int, Policy] = field(default_factory=dict)
    """The policy for each number of micro-batches."""

    def shape(self, micro_batches: int) -> Shape:
        """How many jobs a step has."""
        stage = self.runtime.stage
        return Shape(stage.count, micro_batches, len(stage.chunks))

    def policy(self, micro_batches: int) -> Policy:
        """The policy for a step of so many micro-batches; every rank comes to the same."""
        if micro_batches not in self.chosen:
            shape = self.shape(micro_batches)
            if shape.stages == 1:
                self.chosen[micro_batches] = accumulating(micro_batches)
            else:
                self.chosen[micro_batches] = self._best(shape)
        return self.chosen[micro_batches]

    def _best(self, shape: Shape) -> Policy:
        """The policy of the plan's name; `message` may split backward."""
        splits = self.how.splits and not self.runtime.stage.vocabulary
        return policy_for(
            self.how.policy, shape, self.expected(), limit=self.how.limit, splits=splits
        )

    def expected(self) -> Times:
        """Times of the jobs: backward takes twice as long as forward, half of it for weights."""
        costs = self.runtime.stage.costs
        unit = sum(costs) / len(costs)
        forward = tuple(cost / unit for cost in costs)
        return Times(forward, forward, forward, jitter=self.how.jitter)

    def events(self, flow: Flow) -> list[Event]:
        """Messages of a micro-batch in the outer layout `[b, s/row, d/col]`, and orders."""
        runtime, found = self.runtime, list[Event]()
        stage, degrees = runtime.stage, runtime.grid.degrees
        if stage.count == 1:
            return []
        tokens = flow.samples * flow.seq // (degrees["row"] * degrees["context"])
        size = tokens * (self.embed // degrees["col"]) * flow.itemsize
        for chunk in range(len(stage.chunks)):
            if not stage.enters(chunk):
                found.append(Event("receive", ("pipe",), size, f"pipeline.{FORWARD}"))
                found.append(Event("send", ("pipe",), size, f"pipeline.{BACKWARD}"))
            if not stage.leaves(chunk):
                found.append(Event("send", ("pipe",), size, f"pipeline.{FORWARD}"))
                found.append(Event("receive", ("pipe",), size, f"pipeline.{BACKWARD}"))
        if stage.vocabulary:
            others, first, last = stage.count - 1, stage.index == 0, stage.index == stage.count - 1
            for way, sender in ((ROWS, not first), (PART, not last)):
                op = "send" if sender else "receive"
                found += [Event(op, ("pipe",), size, f"pipeline.{way}")] * (1 if sender else others)
            for way, sender in ((FINAL, last), (RETURN, first)):
                op = "send" if sender else "receive"
                found += [Event(op, ("pipe",), size, f"pipeline.{way}")] * (others if sender else 1)
        return found

    def step_events(self, micro_batches: int, itemsize: int) -> list[Event]:
        """Orders inside the stage and the loss of a step."""
        runtime, shape = self.runtime, self.shape(micro_batches)
        policy, inside = self.policy(micro_batches), runtime.inside
        if shape.stages == 1:
            return []
        jobs = (3 if policy.split else 2) * shape.chunks * micro_batches
        spread = bool(runtime.stage.vocabulary)
        led = (policy.dynamic or spread) and inside.size > 1
        jobs += micro_batches * spread
        orders = [Event("broadcast", inside.names, 8, "pipeline.order")] * (jobs if led else 0)
        return [*orders, Event("broadcast", ("pipe",), itemsize, "pipeline.loss")]


def accumulating(micro_batches: int) -> Order:
    """One stage: forward and backward of one micro-batch after the other."""
    jobs = [job for m in range(micro_batches) for job in (Job("F", m), Job("B", m))]
    return Order("accumulation", (tuple(jobs),))
