"""`ranvier bench`: sends a workload to a server and reports latencies, throughput and goodput."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ranvier.config.arguments import BenchOptions
from ranvier.errors import DataError, PlanError, WriteError
from ranvier.infer.bench_client import BenchClient, RequestFailedError, RequestRecord
from ranvier.infer.bench_report import (
    parse_limits,
    print_summary,
    record_rows,
    render_page,
    summarize,
)
from ranvier.infer.bench_workload import BenchRequest, build_workload, option_problems
from ranvier.system.terminal import print

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
INTERRUPTED_EXIT_CODE = 130


@dataclass
class BenchResult:
    """What a benchmark has measured."""

    model: str
    records: list[RequestRecord] = field(default_factory=list)
    """Requests that have ended, in the order in which they were sent."""
    seconds: float = 0.0
    is_interrupted: bool = False


def run_benchmark(url: str, options: BenchOptions) -> int:
    """Runs a benchmark, prints its results and writes its files. Returns the exit code."""
    if problems := option_problems(options):
        raise PlanError(problems)
    limits = parse_limits(options.goodput)
    client = BenchClient(url, _read_key(options.api_key_file))
    workload = build_workload(options)
    result = asyncio.run(_measure(client, options, workload, show=sys.stderr.isatty()))
    summary = summarize(result.records, result.seconds, limits)
    title = f"{len(result.records)} of {len(workload)} requests to {result.model} at {url}"
    if result.is_interrupted:
        title += " (interrupted)"
    print_summary(title, summary)
    if options.output:
        content = {
            "url": url,
            "model": result.model,
            "interrupted": result.is_interrupted,
            # The file may be published; it does not name where the key is.
            "options": dataclasses.asdict(dataclasses.replace(options, api_key_file="")),
            **summary,
            "requests": record_rows(result.records),
        }
        _write(Path(options.output), json.dumps(content, indent=1) + "\n")
    if options.html:
        text = render_page(title, summary, result.records, result.seconds)
        _write(Path(options.html), text)
    if result.is_interrupted:
        return INTERRUPTED_EXIT_CODE
    return 0 if summary["completed"] else 1


def _read_key(path: str) -> str:
    if not path:
        return ""
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise DataError(
            f"{path} cannot be read: {reason}. --api-key-file is a file with the API key. Check "
            "the path."
        ) from None


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise WriteError(
            f"{path} cannot be written: {error.strerror}. The results are stored there. Use "
            "another path."
        ) from None
    print(f"written: {path}")


async def _measure(
    client: BenchClient, options: BenchOptions, workload: Sequence[BenchRequest], *, show: bool
) -> BenchResult:
    """Sends all requests; the first Ctrl-C ends the benchmark with what has been measured."""
    model = options.model or await _find_model(client)
    result = BenchResult(model)
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    handles_signals = threading.current_thread() is threading.main_thread()
    if handles_signals:
        loop.add_signal_handler(signal.SIGINT, stopped.set)
    try:
        for request in workload[: options.warmup]:
            with contextlib.suppress(RequestFailedError, TimeoutError):
                record = RequestRecord(-1, 0.0)
                body = {**request.body, "model": model}
                await asyncio.wait_for(
                    client.stream(PATHS[options.endpoint], body, record, 0.0), options.timeout
                )
        sender = asyncio.create_task(_send_all(client, options, workload, result))
        waiter = asyncio.create_task(stopped.wait())
        while not sender.done() and not waiter.done():
            await asyncio.wait({sender, waiter}, timeout=1.0, return_when="FIRST_COMPLETED")
            if show:
                print(f"\r{len(result.records)} of {len(workload)}", end="", file=sys.stderr)
        result.is_interrupted = not sender.done()
        waiter.cancel()
        sender.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sender
    finally:
        if handles_signals:
            loop.remove_signal_handler(signal.SIGINT)
        await client.close()
    if show:
        print("\r", end="", file=sys.stderr)
    result.records.sort(key=lambda record: record.index)
    return result


async def _find_model(client: BenchClient) -> str:
    """Returns the name of the first model of a server."""
    try:
        found = await client.get_json("/v1/models")
        return str(found["data"][0]["id"])
    except RequestFailedError as error:
        raise PlanError(
            f"The server does not answer: {error.kind}: {error}. `ranvier bench` asks for "
            "/v1/models first. Check the URL and the key, or pass --model."
        ) from None
    except (LookupError, TypeError):
        raise PlanError(
            "The server names no model. /v1/models must list at least one. Pass --model."
        ) from None


async def _send_all(
    client: BenchClient,
    options: BenchOptions,
    workload: Sequence[BenchRequest],
    result: BenchResult,
) -> None:
    """Sends requests at their times, and waits for their answers."""
    origin = time.perf_counter()
    slots = asyncio.Semaphore(options.concurrency or len(workload))
    tasks = []

    async def send(index: int, request: BenchRequest) -> None:
        async with slots:
            record = await _send_one(client, options, index, request, result.model, origin)
        result.records.append(record)

    try:
        for index, request in enumerate(workload):
            delay = origin + request.start_seconds - time.perf_counter()
            if delay > 0:
                await asyncio.sleep(delay)
            tasks.append(asyncio.create_task(send(index, request)))
        await asyncio.gather(*tasks)
    finally:
        result.seconds = time.perf_counter() - origin
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _send_one(
    client: BenchClient,
    options: BenchOptions,
    index: int,
    request: BenchRequest,
    model: str,
    origin: float,
) -> RequestRecord:
    """Returns what was measured of one request."""
    record = RequestRecord(index, time.perf_counter() - origin)
    body = {**request.body, "model": model}
    try:
        await asyncio.wait_for(
            client.stream(PATHS[options.endpoint], body, record, origin), options.timeout
        )
    except RequestFailedError as error:
        record.error = error.kind
        record.message = str(error)
    except TimeoutError:
        record.error = "timeout"
        record.message = f"no complete answer within {options.timeout:g} s"
    except (OSError, ValueError) as error:
        record.error = "protocol"
        record.message = str(error)[:500]
    record.end = time.perf_counter() - origin
    return record
