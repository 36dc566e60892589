"""Messages that stages agree on, over Gloo: the same results, on a device that blocks too.

The device is a fake that does what a GPU was seen to do: while a transfer is posted and not
complete, loading a module (the first launch of a kernel, an allocation that frees memory) waits for
it, and holds up every other launch of the process. Transfers of one communicator run one after the
other, in the order in which the rank has posted them, as NCCL runs them.
"""

from __future__ import annotations

import functools
import itertools
import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch

from equivalence import Case, Serial, batch_of, compare, run_case
from pool import Pool, RankError
from ranvier.comm.p2p import (
    RendezvousLinks,
    RendezvousTransport,
    Transfer,
    _Link,
    decode_form,
    encode_form,
)
from ranvier.grid import Grid
from ranvier.pipeline.step import PipelineStep
from ranvier.pipeline.traffic import (
    MESSAGE_KINDS,
    StageSpec,
    channel_links,
    count_orders,
    link_channel,
    micro_batch_events,
)

LR, CLIP = 1e-2, 0.5
PATIENCE_SECONDS = 5.0
"""How long a load may wait before that is a deadlock."""


class BlockingDevice:
    """Knows which transfers of this process are posted, and lets nothing pass a load that waits."""

    def __init__(self) -> None:
        self._change = threading.Condition()
        self._posted: set[Any] = set()
        self._loading = False
        self.loads = 0
        self.waits = 0

    def launch(self, transfer: Any) -> None:
        """Post a transfer, after any load that is under way."""
        with self._change:
            if not self._change.wait_for(lambda: not self._loading, PATIENCE_SECONDS):
                raise TimeoutError(f"{transfer} cannot be posted: a load waits for {self._posted}")
            self._posted.add(transfer)

    def complete(self, transfer: Any) -> None:
        """Note that a transfer is over."""
        with self._change:
            self._posted.discard(transfer)
            self._change.notify_all()

    def load(self) -> None:
        """Load a module, or free memory: wait for all that is posted."""
        with self._change:
            self._loading = True
            self.loads += 1
            self.waits += bool(self._posted)
            try:
                if not self._change.wait_for(lambda: not self._posted, PATIENCE_SECONDS):
                    raise TimeoutError(f"a load waits for ever for {self._posted}")
            finally:
                self._loading = False
                self._change.notify_all()


class OrderedTransfer:
    """A transfer in the queue of its communicator."""

    def __init__(self, name: Any, run: Callable[[], None]) -> None:
        self.name, self.run, self.done = name, run, threading.Event()

    def wait(self) -> None:
        """Wait until it is complete."""
        self.done.wait()


@contextmanager
def blocking_device(device: BlockingDevice) -> Iterator[None]:
    """Have transfers run in order on a device, and each job load modules before and after."""
    queues: dict[_Link, queue.SimpleQueue[OrderedTransfer]] = {}
    launch, do, names = _Link.launch_transfer, PipelineStep._run_job, itertools.count()

    def work(waiting: queue.SimpleQueue[OrderedTransfer]) -> None:
        while True:
            transfer = waiting.get()
            transfer.run()
            device.complete(transfer.name)
            transfer.done.set()

    def launched(self: _Link, op: str, value: Any, peer: int, after: Any, tag: int) -> Any:
        name = (op, peer, tag, next(names))
        device.launch(name)
        if self not in queues:
            queues[self] = queue.SimpleQueue()
            threading.Thread(target=work, args=(queues[self],), daemon=True).start()
        run = functools.partial(launch, self, op, value, peer, after, tag)
        transfer = OrderedTransfer(name, lambda: run().wait())
        queues[self].put(transfer)
        return transfer

    def done(self: PipelineStep, job: Any) -> None:
        device.load()
        do(self, job)
        device.load()

    with (
        mock.patch.object(_Link, "launch_transfer", launched),
        mock.patch.object(PipelineStep, "_run_job", done),
    ):
        yield


def run_on_blocking_device(grid: Grid, case: Case, batch: Any) -> dict[str, Any]:
    device = BlockingDevice()
    with blocking_device(device):
        found = run_case(grid, case, batch, LR, CLIP)
    return {**found, "loads": device.loads}


@functools.cache
def serial(model: str) -> Serial:
    return Serial(model, batch_of(model, samples=16, packed=False), LR, CLIP, 2)


def full(degrees: dict[str, int], how: dict[str, Any]) -> Any:
    """A case that only the whole product has."""
    return pytest.param(degrees, how, marks=pytest.mark.full)


CASES = [
    full({"pipe": 2}, {"policy": "1f1b", "micro_batches": 8}),
    full({"pipe": 4}, {"policy": "message_driven", "micro_batches": 8, "delay": 3}),
    full({"pipe": 2}, {"policy": "interleaved", "chunks": 2, "micro_batches": 4, "delay": 1}),
    ({"pipe": 2, "data": 2}, {"policy": "message_driven", "chunks": 2, "micro_batches": 4}),
    full({"pipe": 2, "row": 2}, {"policy": "zero-bubble", "micro_batches": 4}),
    full({"pipe": 2, "depth": 2}, {"policy": "message_driven", "spread": True, "micro_batches": 2}),
    full({"pipe": 3}, {"policy": "message_driven", "chunks": 2, "micro_batches": 8, "delay": 10}),
    full({"pipe": 3}, {"policy": "interleaved", "chunks": 2, "micro_batches": 8, "delay": 5}),
    ({"pipe": 4}, {"policy": "message_driven", "spread": True, "micro_batches": 4, "delay": 3}),
]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("degrees", "how"), CASES, ids=str)
def test_no_transfer_waits_for_what_its_rank_does_later(
    pool: Pool, degrees: dict[str, int], how: dict[str, Any]
) -> None:
    case, whole = Case("deep tied", **how), serial("deep tied")
    results = pool.on_grid(degrees, run_on_blocking_device, case, whole.batch, rendezvous=True)
    assert compare(whole, results) == []
    assert all(result["loads"] > 0 for result in results)


def exchange(grid: Grid, holds: bool) -> float:
    """Two stages have a message for each other, post it, and have a job to do.

    holds: whether they wait until it is taken, posting receives meanwhile; the job loads a module.
    """
    here, device = torch.device("cpu"), BlockingDevice()
    channels = RendezvousLinks(grid, here, ["up", "down"], functools.partial(link_channel, 2))
    transport = RendezvousTransport(grid, here, MESSAGE_KINDS, links=channels, leads=True)
    me, other = grid.index["pipe"], 1 - grid.index["pipe"]
    mine, theirs = ((MESSAGE_KINDS[stage], 0) for stage in (me, other))
    transport.expect_messages(theirs, other, 1)
    transport.promise_messages(mine, other, 1)
    transport.start_listening()
    with blocking_device(device):
        transport.send(mine, 0, torch.full((2,), float(me)), other)
        transport._made_messages.clear()
        transport.post_transfer(Transfer("send", mine, 0, other, ((2,), torch.float32)))
        while holds and not transport.can_compute:
            seen = transport.version
            transfer = transport.next_transfer()
            if transfer is None:
                transport.wait_for_change(seen, PATIENCE_SECONDS)
            else:
                transport.post_transfer(transfer)
        device.load()
        while transport.num_arrived[theirs] == 0:
            seen = transport.version
            transfer = transport.next_transfer()
            if transfer is not None:
                transport.post_transfer(transfer)
            elif transport.num_arrived[theirs] == 0:
                transport.wait_for_change(seen, PATIENCE_SECONDS)
    return transport.take_message(theirs)[0].item()


def test_stages_with_messages_for_each_other_go_on() -> None:
    """And two that do not wait for each other block for ever."""
    pool = Pool(size=2)
    try:
        assert pool.on_grid({"pipe": 2}, exchange, True, rendezvous=True) == [1.0, 0.0]
        with pytest.raises(RankError, match="a load waits for ever"):
            pool.on_grid({"pipe": 2}, exchange, False, rendezvous=True, timeout=60.0)
    finally:
        pool.stop()


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
@pytest.mark.parametrize("chunks", [1, 2])
@pytest.mark.parametrize("spread", [False, True])
def test_no_communicator_has_a_circle_of_stages(stages: int, chunks: int, spread: bool) -> None:
    """All messages of one go one way, and each joins two stages that nothing else joins."""
    found = channel_links(stages, chunks, spread=spread)
    for channel, pairs in found.items():
        assert len({sender < to for sender, to in pairs}) == 1, channel
        tree = {stage: {stage} for stage in range(stages)}
        for sender, to in pairs:
            assert tree[sender] is not tree[to], f"{channel} has a circle: {pairs}"
            joined = tree[sender] | tree[to]
            for stage in joined:
                tree[stage] = joined
    assert {"up", "down"} <= set(found)
    assert ("wrap up" in found) == (stages > 2 and chunks > 1)
    for stage in range(stages):
        sends = [
            e
            for e in micro_batch_events(StageSpec(stage, stages, chunks, spread), 1)
            if e.op == "send"
        ]
        mine = [pair for pairs in found.values() for pair in pairs if pair[0] == stage]
        assert bool(sends) == bool(mine)


def test_orders_count_jobs_and_transfers() -> None:
    """A stage in the middle sends and receives two messages of each micro-batch."""
    seat = StageSpec(1, 4, 1)
    assert count_orders(seat, 8, dynamic=False, split=False, rendezvous=False) == 0
    assert count_orders(seat, 8, dynamic=True, split=False, rendezvous=False) == 16
    assert count_orders(seat, 8, dynamic=False, split=False, rendezvous=True) == 16 + 32 + 1


def test_a_form_survives_its_numbers() -> None:
    form = ((2, 3, 5), torch.bfloat16)
    assert decode_form(encode_form(form)) == form
