"""Pipeline: a runtime, and the policy that suits the number of micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ranvier.cost.layers import Flow, Ground
from ranvier.pipeline import traffic
from ranvier.pipeline.executor import Runtime
from ranvier.pipeline.partition import Cut
from ranvier.pipeline.policy import Job, Order, Policy, Shape
from ranvier.pipeline.policy_search import expected, policy_for
from ranvier.pipeline.simulator import Times
from ranvier.pipeline.traffic import Seat
from ranvier.sharding import Table
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
        return expected(self.runtime.stage.costs, self.how.jitter)

    @property
    def seat(self) -> Seat:
        """My place among the stages."""
        stage = self.runtime.stage
        return Seat(stage.index, stage.count, len(stage.chunks), bool(stage.vocabulary))

    def events(self, flow: Flow) -> list[Event]:
        """Messages of a micro-batch in the outer layout `[b, s/row, d/col]`."""
        ground = Ground(self.runtime.grid.degrees, Table(), {"embed": self.embed})
        return traffic.messages(self.seat, traffic.message_bytes(ground, flow))

    def step_events(self, micro_batches: int, itemsize: int) -> list[Event]:
        """Orders inside the stage and the loss of a step."""
        policy, seat = self.policy(micro_batches), self.seat
        count = traffic.orders(
            seat,
            micro_batches,
            dynamic=policy.dynamic,
            split=policy.split,
            rendezvous=bool(self.runtime.grid.rendezvous),
        )
        return traffic.step(seat, self.runtime.inside.names, itemsize, orders=count)


def accumulating(micro_batches: int) -> Order:
    """One stage: forward and backward of one micro-batch after the other."""
    jobs = [job for m in range(micro_batches) for job in (Job("F", m), Job("B", m))]
    return Order("accumulation", (tuple(jobs),))
