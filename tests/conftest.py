"""Fixtures and options of the suite.

A seeded covering sample by default, `--full` for the whole product. `--nccl` runs the generic tests
of grids over NCCL, all ranks on one GPU, and what is special to it (tests/nccl). `--algorithm NAME`
runs the collectives of all grids by one algorithm.
"""

from __future__ import annotations

import gc
import secrets
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

from pool import NcclPools, Pool
from ranvier.comm.algorithm_table import AlgorithmTable
from ranvier.errors import PlanError
from ranvier.launch import use_deterministic_cublas, use_expandable_segments
from sampling import draw_samples, sort_by_grid, take_part

# Equal examples on every run, and no time limit: the machine may be busy.
settings.register_profile("ranvier", deadline=None, derandomize=True)
settings.load_profile("ranvier")
use_expandable_segments()
# cuBLAS reads its setting once, and some tests on a GPU compare bits.
use_deterministic_cublas()
# A shell starts its background jobs with SIGINT ignored, and nohup its command with SIGHUP ignored;
# the processes of tests inherit both.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--full", action="store_true", help="run every combination, not a covering sample"
    )
    parser.addoption(
        "--nccl", action="store_true", help="run grids over NCCL, with all ranks on the first GPU"
    )
    parser.addoption("--part", default="1/1", help="of n equal parts run the i-th, as i/n")
    parser.addoption(
        "--algorithm",
        default="auto",
        help="run the collectives of all grids by this algorithm where an axis can use it; "
        "hierarchical ones on pretended nodes of two ranks",
    )


def pytest_configure(config: pytest.Config) -> None:
    try:
        AlgorithmTable.parse(config.getoption("--algorithm"))
    except PlanError as error:
        raise pytest.UsageError(str(error)) from None
    if config.getoption("--nccl"):
        import torch

        if not torch.cuda.is_available():
            raise pytest.UsageError("--nccl needs a GPU, and torch sees none. Run without it.")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        items[:] = [item for item in items if item.get_closest_marker("full") is None]
        items[:] = draw_samples(items)
    if config.getoption("--nccl"):
        items[:] = [item for item in items if item.get_closest_marker("nccl") is not None]
        items[:] = sort_by_grid(items)
    try:
        items[:] = take_part(items, config.getoption("--part"), config.getoption("--nccl"))
    except ValueError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Tokenizer and tokenized corpora are made once in a session, not in the user's own cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RANVIER_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("TOKENIZERS_PARALLELISM", "false")
        patch.setenv("RANVIER_COMPILE_ERRORS", "raise")  # a slower run would pass unnoticed
        patch.setenv("RANVIER_KEY", secrets.token_hex(32))  # none is left in the user's home
        yield


@pytest.fixture
def deterministic() -> Iterator[None]:
    """The mode of a run with `train.deterministic`, which the command line enters."""
    from ranvier.train.health.determinism import deterministic_algorithms

    with deterministic_algorithms(True):
        yield


@pytest.fixture(scope="session", autouse=True)
def modules() -> None:
    """No run in this process has the collector look at all modules once more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def pool(request: pytest.FixtureRequest) -> Iterator[Pool | NcclPools]:
    """Workers shared by all tests."""
    algorithm = request.config.getoption("--algorithm")
    if request.config.getoption("--nccl"):
        pool: Pool | NcclPools = NcclPools(algorithm=algorithm)
    else:
        pool = Pool(algorithm=algorithm)
    yield pool
    pool.stop()
