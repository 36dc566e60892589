"""Pipeline executor: runs the jobs of a stage as messages arrive, in the order its policy chooses.

No global schedule exists. Each stage knows which messages have arrived and asks its policy, the
same object that the simulator runs. Ranks that share collectives inside a stage follow the first of
them (the leader). One stage is gradient accumulation without messages, in the order
F(0) B(0) F(1) B(1) ...

With rendezvous transfers (NCCL, see `comm.p2p`) the leader also decides when the other ranks post
them, so that all ranks of a stage launch collectives and transfers in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from ranvier.buckets.scheduler import BucketScheduler
from ranvier.comm.p2p import (
    Delay,
    EagerTransport,
    Form,
    Key,
    RendezvousLinks,
    RendezvousTransport,
    Transport,
)
from ranvier.errors import CommunicationError
from ranvier.grid import HOST_CHANNEL, Axis, Grid
from ranvier.nn.layer import StepContext
from ranvier.pipeline.partition import ModelStage
from ranvier.pipeline.policy import Job, PipelineShape, SchedulingPolicy
from ranvier.pipeline.step import ForwardOnlyPolicy, JobRecord, MicroBatch, PipelineStep
from ranvier.pipeline.traffic import (
    MESSAGE_KINDS,
    STAGE_AXES,
    channel_links,
    link_channel,
)


@dataclass
class PipelineExecutor:
    """Runs the jobs of this rank's stage."""

    grid: Grid
    stage: ModelStage
    bucket_scheduler: BucketScheduler
    step_context: StepContext
    device: torch.device
    delay: Delay | None = None
    """Artificial delay of messages, for tests."""
    record_times: bool = False
    """Whether to record start and end of each job of a training step, which synchronizes the device
    after each job."""
    job_records: list[JobRecord] = field(default_factory=list)
    """Jobs and waits of the last step, if `record_times` is set."""
    start_time: float = 0.0
    """Start time of the last recorded step."""
    message_form: Callable[[Key], Form] | None = None
    """Shape and dtype of a received message; set in dry runs, where no sender announces it."""
    arrival_log: list[tuple[Key, int, float]] = field(default_factory=list)
    """Messages of the last recorded step and their arrival times."""
    policy_choices: list[tuple[Job, int]] = field(default_factory=list)
    """Jobs that the policy chose, on the leader, with the number of messages that had arrived."""

    def __post_init__(self) -> None:
        self.stage_axis: Axis = self.grid.axis_without_group(*STAGE_AXES)
        """Ranks of this stage, which share its collectives; carries the orders of the leader."""
        if self.stage.num_stages > 1:
            # Orders are host tensors, which NCCL cannot broadcast.
            if self.grid.backend == "nccl":
                channel = HOST_CHANNEL
            else:
                channel = ""
            self.stage_axis = self.grid.axis(*STAGE_AXES, channel=channel)
        self.is_leader = self.stage_axis.index == 0
        """Whether this rank decides the next job of its stage."""
        self.rendezvous_links: RendezvousLinks | None = None
        """Communicators, streams and buffers of rendezvous transfers; None with eager transfers."""
        if self.stage.num_stages > 1 and self.grid.rendezvous:
            count = self.stage.num_stages
            spread = bool(self.stage.vocab_layers)
            channels = channel_links(count, len(self.stage.chunks), spread=spread)
            self.rendezvous_links = RendezvousLinks(
                self.grid, self.device, [*channels], partial(link_channel, count)
            )

    def open_transport(self, ahead: int) -> Transport:
        """Returns the transport for the messages of one step."""
        # The threads of a failed step may still receive messages of the next one, so do not
        # continue.
        if self.rendezvous_links is not None and self.rendezvous_links.is_broken:
            raise CommunicationError(
                "An earlier step of this pipeline failed, and its messages may still be in flight. "
                "A pipeline cannot continue after a failed step. Build the model again, or restart "
                "the run."
            )
        if self.rendezvous_links is None:
            return EagerTransport(
                self.grid,
                self.device,
                MESSAGE_KINDS,
                delay=self.delay,
                ahead=ahead,
                form=self.message_form,
            )
        return RendezvousTransport(
            self.grid,
            self.device,
            MESSAGE_KINDS,
            delay=self.delay,
            ahead=ahead,
            links=self.rendezvous_links,
            leads=self.is_leader,
        )

    # ---- steps --------------------------------------------------------------------------

    def forward_backward(
        self,
        micros: Sequence[MicroBatch],
        policy: SchedulingPolicy,
        *,
        scored: Callable[[Tensor], None],
        factor: Tensor,
        plain: bool = False,
    ) -> None:
        """Runs forward and backward of all micro-batches.

        scored: called with the loss of each micro-batch, on the last stage. factor: the loss scale.
        plain: whether the head may apply `factor` itself.
        Communicates: messages over pipe, orders inside the stage, and what the layers communicate.
        """
        self._run_step(PipelineStep(self, micros, policy, scored, factor, plain))

    @torch.no_grad()
    def run_forward(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """Returns the outputs of all micro-batches, on the last stage.

        Communicates: as `forward_backward`.
        """
        shape = PipelineShape(
            self.stage.num_stages, len(micros), len(self.stage.chunks), forward_only=True
        )
        results: list[Tensor] = []
        none = torch.zeros((), device=self.device)
        self._run_step(
            PipelineStep(self, micros, ForwardOnlyPolicy(shape), results.append, none, False)
        )
        return results

    def _run_step(self, step: PipelineStep) -> None:
        try:
            step.run()
        except BaseException:
            # Also on KeyboardInterrupt: posted transfers cannot be withdrawn.
            if self.rendezvous_links is not None:
                self.rendezvous_links.is_broken = True
            raise
