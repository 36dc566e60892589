"""Pipeline: an executor, and the policy for each number of micro-batches of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from ranvier.cost.layers import ActivationShape, LayoutContext
from ranvier.pipeline import traffic
from ranvier.pipeline.executor import PipelineExecutor
from ranvier.pipeline.partition import PipelineConfig
from ranvier.pipeline.policy import FixedSchedule, Job, PipelineShape, SchedulingPolicy
from ranvier.pipeline.policy_search import choose_policy, expected_times
from ranvier.pipeline.simulator import JobTimes
from ranvier.pipeline.traffic import StageSpec
from ranvier.sharding import ShardingTable
from ranvier.trace import Event


@dataclass
class Pipeline:
    """The pipeline of a model: its stage on this rank and the scheduling policies."""

    executor: PipelineExecutor
    config: PipelineConfig
    embed: int = 0
    """Features of a message, over all ranks of col."""
    streams: int = 1
    """Samples of a message for each sample of a micro-batch (ParScale)."""
    can_split_backward: bool = True
    """Whether layers can defer their weight gradients; layers in compiled blocks cannot."""
    policies: dict[int, SchedulingPolicy] = field(default_factory=dict)
    """The policy for each number of micro-batches."""

    def step_shape(self, micro_batches: int) -> PipelineShape:
        """Returns the shape of a step of `micro_batches`."""
        stage = self.executor.stage
        return PipelineShape(stage.num_stages, micro_batches, len(stage.chunks))

    def policy_for_step(self, micro_batches: int) -> SchedulingPolicy:
        """Returns the policy for a step of `micro_batches`, the same on all ranks."""
        # The search takes a second or two, so its result is cached.
        if micro_batches not in self.policies:
            shape = self.step_shape(micro_batches)
            if shape.stages == 1:
                self.policies[micro_batches] = accumulation_schedule(micro_batches)
            else:
                self.policies[micro_batches] = self._choose_policy(shape)
        return self.policies[micro_batches]

    def _choose_policy(self, shape: PipelineShape) -> SchedulingPolicy:
        """Returns the policy that the plan selects; `message_driven` may split backward."""
        splits = (
            self.can_split_backward
            and self.executor.step_context.overlapped_autograd
            and not self.executor.stage.vocab_layers
        )
        return choose_policy(
            self.config.policy,
            shape,
            self.expected_times(),
            limit=self.config.max_in_flight,
            splits=splits,
        )

    def expected_times(self) -> JobTimes:
        """Returns the expected job times: backward takes twice as long as forward, half of it
        for dW.
        """
        return expected_times(self.executor.stage.stage_costs, self.config.jitter)

    @property
    def stage_spec(self) -> StageSpec:
        """Position of this stage in the pipeline."""
        stage = self.executor.stage
        return StageSpec.from_parts(
            stage.index,
            stage.num_stages,
            stage.chunks,
            stage.input_tensors,
            vocab_over_pipe=bool(stage.vocab_layers),
        )

    def micro_batch_events(self, flow: ActivationShape) -> list[Event]:
        """Returns the messages of a micro-batch in the outer layout `[b, s/row, d/col]`."""
        ground = LayoutContext(self.executor.grid.degrees, ShardingTable(), {"embed": self.embed})
        size = traffic.message_bytes(ground, flow)
        return traffic.micro_batch_events(self.stage_spec, size, self.streams)

    def step_events(self, micro_batches: int, itemsize: int) -> list[Event]:
        """Returns the orders inside the stage and the broadcast of the loss of a step."""
        policy = self.policy_for_step(micro_batches)
        seat = self.stage_spec
        count = traffic.count_orders(
            seat,
            micro_batches,
            dynamic=policy.is_dynamic,
            split=policy.split_backward,
            rendezvous=bool(self.executor.grid.rendezvous),
        )
        return traffic.step_events(seat, self.executor.stage_axis.names, itemsize, orders=count)


def accumulation_schedule(micro_batches: int) -> FixedSchedule:
    """Returns the schedule of one stage: forward and backward of each micro-batch, one by one."""
    jobs = [job for m in range(micro_batches) for job in (Job("F", m), Job("B", m))]
    return FixedSchedule("accumulation", (tuple(jobs),))
