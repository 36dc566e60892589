"""States and weights on the host or in a file: to the bit what they are on the device."""

from __future__ import annotations

import os
import resource
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from equivalence import Case, batch_of, micros_of
from pool import Pool
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.memory import host
from ranvier.memory.host import Arena, check_disk_space, check_host_memory
from ranvier.optim import fused_adamw
from ranvier.optim.optimizer import Optimizer
from ranvier.optim.state_tiles import StatePlacement
from ranvier.train.step import forward_backward

TILE = 768
"""Small: every bucket has several, and some end in the middle of a weight."""
HOMES = (
    StatePlacement("host", tile_elements=TILE),
    StatePlacement("split", device_bytes=40_000, tile_elements=TILE),
    StatePlacement("host", tile_elements=2**20),
    StatePlacement(tile_elements=256),
)
GRIDS = [{}, {"depth": 2, "row": 2}, {"data": 2, "col": 2}]
Options = dict[str, Any]


def trained(grid: Grid, options: Options, steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    """Losses and norms of steps, and the state that they leave on this rank."""
    options = dict(options)
    model, dtype = options.pop("model", "llama"), options.pop("dtype", torch.float64)
    micro_batches, room = options.pop("micro_batches", 1), options.pop("room", None)
    case, batch = (
        Case(model, micro_batches=micro_batches),
        batch_of(model, samples=16, packed=False),
    )
    built = case.on(grid, dtype=dtype, room=room, **options.pop("how", {}))
    optimizer = Optimizer(built.parallel.bucket_scheduler, lr=1e-2, clip=0.5, **options)  # type: ignore[arg-type,union-attr]
    numbers = []
    for _ in range(steps):
        loss = forward_backward(built, micros_of(batch, grid, case.micro_batches))
        numbers += [loss.item(), optimizer.step().item()]
    state = {**optimizer.sharded_state(), **built.parallel.sharded_state()}  # type: ignore[union-attr]
    return numbers, {name: x.clone() for name, (x, _) in state.items()}


def differing(grid: Grid, plain: Options, *others: Options) -> list[str]:
    """What other ways of keeping states leave differently."""
    (numbers, state), odd = trained(grid, plain), []
    for number, options in enumerate(others):
        found, rest = trained(grid, options)
        odd += [] if numbers == found else [f"{number}: losses {numbers} {found}"]
        odd += [f"{number}: {n}" for n, x in state.items() if not torch.equal(x, rest[n])]
    return odd


@pytest.mark.sample(1)
@pytest.mark.parametrize("degrees", GRIDS, ids=str)
def test_states_elsewhere_change_no_bit(pool: Pool, degrees: dict[str, int]) -> None:
    ranks = pool.on_grid(degrees, differing, {}, *({"home": home} for home in HOMES))
    assert ranks == [[]] * len(ranks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_narrow_moments_elsewhere_change_no_bit(pool: Pool, moments: str) -> None:
    how = {"dtype": torch.bfloat16, "moments": moments}
    ranks = pool.on_grid({"depth": 2}, differing, how, *({**how, "home": h} for h in HOMES[:2]))
    assert ranks == [[]] * 2


def test_a_file_holds_states_and_is_gone_at_the_end(pool: Pool, tmp_path: Path) -> None:
    home = StatePlacement("disk", path=str(tmp_path / "new"), tile_elements=TILE)
    assert pool.on_grid({}, differing, {}, {"home": home}) == [[]]
    assert os.listdir(tmp_path / "new") == []


WEIGHTS = [
    pytest.param({}, {}, id="one", marks=pytest.mark.full),
    pytest.param({}, {"micro_batches": 2, "how": {"recompute": "full"}}, id="full"),
    pytest.param({"depth": 2, "row": 2}, {"micro_batches": 2}, id="depth"),
    pytest.param({"data": 2}, {"home": HOMES[0], "dtype": torch.bfloat16}, id="data"),
    pytest.param({"pipe": 2}, {"micro_batches": 2}, id="pipe"),
]


@pytest.mark.sample(2)
@pytest.mark.parametrize(("degrees", "options"), WEIGHTS)
def test_weights_on_the_host_change_no_bit(
    pool: Pool, degrees: dict[str, int], options: Options
) -> None:
    ranks = pool.on_grid(degrees, differing, options, {**options, "room": 2**30})
    assert ranks == [[]] * len(ranks)


def resident(grid: Grid) -> tuple[int, int, int]:
    """Bytes of weights on the device after a step, of all blocks, and most at once in a step."""
    case, batch = Case("llama"), batch_of("llama", samples=16, packed=False)
    model = case.on(grid, room=2**30)
    queue, most = model.parallel.bucket_scheduler, 0  # type: ignore[union-attr]
    homes = [b for b in queue.buckets if b.host_data is not None]  # type: ignore[union-attr]
    enter = queue._unshard_block  # type: ignore[union-attr]

    def watched(block: str) -> None:
        nonlocal most
        enter(block)
        most = max(most, sum(b.data.untyped_storage().nbytes() for b in homes))

    queue._unshard_block = watched  # type: ignore[union-attr,method-assign]
    for _ in range(2):
        forward_backward(model, micros_of(batch, grid, 1))
        Optimizer(queue).step()  # type: ignore[arg-type]
    left = sum(b.data.untyped_storage().nbytes() for b in homes)
    return left, sum(b.host_data.nbytes for b in homes if b.host_data is not None), most


def test_weights_on_the_host_are_not_on_the_device(pool: Pool) -> None:
    ((left, whole, most),) = pool.on_grid({}, resident)
    assert left == 0
    assert 0 < most < whole  # the block that computes and the next


def close(grid: Grid, options: Options) -> list[float]:
    """Largest difference of torch's kernel for CPUs to the plain rule, in units of the last place.

    Of what is added up: of a sum that is near zero the last place says nothing.
    """
    _, before = trained(grid, options, steps=0)
    with patch.object(fused_adamw, "can_use_cpu_kernel", return_value=False):
        _, plain = trained(grid, options, steps=1)
    _, hosted = trained(
        grid,
        {**options, "home": StatePlacement("host", update_device="cpu", tile_elements=TILE)},
        steps=1,
    )
    worst = []
    for name, x in plain.items():
        size = torch.maximum(x.abs(), before[name].abs())
        unit = torch.nextafter(size, size.new_tensor(torch.inf)) - size
        worst.append(float(((x - hosted[name]).abs() / unit).max()) if x.numel() else 0.0)
    return worst


@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float64, marks=pytest.mark.full), torch.float32], ids=str
)
def test_an_update_by_the_cpu_is_within_two_units_of_the_last_place(
    pool: Pool, dtype: torch.dtype
) -> None:
    for worst in pool.on_grid({"data": 2}, close, {"dtype": dtype}):
        assert max(worst) <= 2.0


def failing(grid: Grid) -> str:
    """What a run says whose thread fails in an update."""
    case, batch = Case("llama"), batch_of("llama", samples=16, packed=False)
    model = case.on(grid)
    optimizer = Optimizer(
        model.parallel.bucket_scheduler, home=StatePlacement("host", update_device="cpu")
    )  # type: ignore[arg-type,union-attr]
    micros = micros_of(batch, grid, 1)
    forward_backward(model, micros)
    optimizer.lr_factors = {"matrix": "much"}  # type: ignore[dict-item]
    optimizer.step()
    try:
        forward_backward(model, micros)
    except TypeError as error:
        return str(error)
    return ""


def test_what_a_thread_fails_with_is_told(pool: Pool) -> None:
    (said,) = pool.on_grid({}, failing)
    assert "multiply sequence" in said


def hosted_weights(grid: Grid) -> list[str]:
    """What the CPU updates otherwise if weights are on the host, too."""
    home = {
        "home": StatePlacement("host", update_device="cpu", tile_elements=TILE),
        "dtype": torch.bfloat16,
    }
    return differing(grid, home, {**home, "room": 2**30})


def test_the_cpu_updates_weights_on_the_host(pool: Pool) -> None:
    assert pool.on_grid({}, hosted_weights) == [[]]


def poisoned(grid: Grid, options: Options) -> list[str]:
    """What a number that is none in the last bucket changes anywhere."""
    case, batch = Case("llama"), batch_of("llama", samples=16, packed=False)
    model = case.on(grid, room=options.get("room"), dtype=options.get("dtype"))
    parallel, micros = model.parallel, micros_of(batch, grid, 1)
    more = {k: x for k, x in options.items() if k in ("home", "moments")}
    optimizer = Optimizer(parallel.bucket_scheduler, lr=1e-2, **more)  # type: ignore[arg-type,union-attr]
    forward_backward(model, micros)
    optimizer.step()
    before = {
        n: x.clone()
        for n, (x, _) in {**optimizer.sharded_state(), **parallel.sharded_state()}.items()
    }  # type: ignore[union-attr]
    forward_backward(model, micros)
    last = [b for b in parallel.bucket_scheduler.buckets if b.grad is not None][-1]  # type: ignore[union-attr]
    next(iter(last.grad.parts.values())).view(-1)[-1] = torch.nan
    optimizer.step()
    after = {**optimizer.sharded_state(), **parallel.sharded_state()}  # type: ignore[union-attr]
    assert not optimizer.is_norm_finite
    return [name for name, x in before.items() if not torch.equal(x, after[name][0])]


@pytest.mark.parametrize(
    "options",
    [
        {"home": HOMES[0]},
        {"home": StatePlacement("host", update_device="cpu", tile_elements=TILE)},
        {"home": HOMES[1], "moments": "int8", "dtype": torch.bfloat16},
        {"home": HOMES[0], "room": 2**30},
    ],
    ids=["host", "cpu", "int8", "weights"],
)
def test_a_bad_number_in_a_late_bucket_changes_no_bit(pool: Pool, options: Options) -> None:
    assert pool.on_grid({}, poisoned, options) == [[]]


# ---- what there is room for -------------------------------------------------------------


def test_an_arena_has_exactly_the_size_asked_for() -> None:
    made = Arena(1000, torch.device("cpu"))
    part = made.allocate_tensor((3, 5), torch.float32)
    assert part.shape == (3, 5) and not part.any()
    assert made.buffer.numel() == 1000
    with pytest.raises(AssertionError):
        made.allocate_tensor((1000,), torch.uint8)


def test_what_exceeds_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PlanError, match=r"needs 4 GiB of host memory .* only 3 GiB are available"):
        check_host_memory(4 * 2**30, 3 * 2**30, torch.device("cpu"))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (8192, 8192))
    check_host_memory(2**20, 2**30, torch.device("cpu"))  # nothing is pinned there
    check_host_memory(2**20, 2**30, torch.device("cuda"), pinning=lambda _: None)  # not enforced

    def refused(_: Tensor) -> None:
        raise PlanError("no")

    with pytest.raises(PlanError, match=r"limit of locked memory is .* `ulimit -l unlimited`"):
        check_host_memory(2**20, 2**30, torch.device("cuda"), pinning=refused)


def test_what_exceeds_the_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"optimizer states need .*, but its disk has only"):
        check_disk_space(2**60, tmp_path / "not yet there")
    check_disk_space(2**20, tmp_path / "not yet there")


def test_a_container_is_a_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {
        "/proc/meminfo": ["MemTotal: 10 kB", "MemAvailable:    9000000 kB"],
        "/proc/self/cgroup": ["0::/here"],
        "/sys/fs/cgroup/here/memory.max": ["3000000"],
        "/sys/fs/cgroup/here/memory.current": ["2500000"],
        "/sys/fs/cgroup/here/memory.stat": ["anon 1", "inactive_file 1000", "active_file 10"],
    }
    monkeypatch.setattr(host, "_read_lines", lambda path: texts.get(str(path), []))
    assert host.available_host_bytes() == 501010
    texts["/sys/fs/cgroup/here/memory.max"] = ["max"]
    assert host.available_host_bytes() == 9_000_000 * 1024
