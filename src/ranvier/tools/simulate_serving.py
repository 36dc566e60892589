"""`ranvier simulate serving`: latencies and throughput of serving a model, without devices.

Steps take the time of a roofline of the planner's cluster, or of a table of measured steps. Every
policy and budget is simulated with the same requests.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.config.arguments import SimulateServingOptions
from ranvier.config.plan import Plan
from ranvier.config.sections import suggest_nearest
from ranvier.errors import PlanError
from ranvier.html import page
from ranvier.html.plot import Series, line_plot
from ranvier.infer.arrivals import (
    RequestGenerator,
    SimulatedRequest,
    parse_lengths,
    read_trace,
    scale_arrivals,
)
from ranvier.infer.policy import POLICIES
from ranvier.infer.simulator import (
    LATENCIES,
    LIMIT_NAMES,
    PERCENTILES,
    RateTrial,
    ServingConfig,
    ServingResult,
    find_max_rate,
    percentile,
    simulate_serving,
)
from ranvier.infer.step_table import load_step_table
from ranvier.planner import cluster as clusters
from ranvier.planner.cluster import Cluster
from ranvier.planner.model_spec import resolve_model_spec
from ranvier.planner.output_files import check_outputs
from ranvier.planner.serving_layout import ServingLayout, serving_layout
from ranvier.planner.time.serving_step import StepCost
from ranvier.sharding import ShardingTable
from ranvier.system.terminal import print
from ranvier.train.resume.run_directory import write_text_atomically

RATE_PRECISION = 0.01
MAX_POINTS = 2000
"""Maximum number of points of a line in a plot."""
LATENCY_TITLES = {
    "ttft": "time to first token",
    "itl": "inter-token latency",
    "tpot": "time per output token",
    "e2e": "end to end",
}


@dataclass(frozen=True)
class Variant:
    """A policy and a budget, with what was simulated."""

    config: ServingConfig
    rate: float
    """Requests per second; infinity for all at once, NaN for the times of a trace."""
    result: ServingResult
    trials: tuple[RateTrial, ...] = ()
    """Rates that were simulated to find the largest one."""

    @property
    def name(self) -> str:
        """Policy and budget."""
        return f"{self.config.policy}, {self.config.max_num_batched_tokens:,}"


@dataclass(frozen=True)
class RequestSource:
    """Requests of a trace or a generator at any rate."""

    generator: RequestGenerator
    trace: tuple[SimulatedRequest, ...] = ()

    def requests(self, rate: float) -> list[SimulatedRequest]:
        """Returns the requests. rate: NaN keeps the times of a trace."""
        if not self.trace:
            return self.generator.generate(rate)
        if math.isnan(rate):
            return list(self.trace)
        first = self.trace[0].arrival
        span = self.trace[-1].arrival - first
        if span == 0.0:
            return list(self.trace)
        return scale_arrivals(self.trace, len(self.trace) / (span * rate))


def run_simulation(wanted: SimulateServingOptions) -> int:
    """Simulates every policy and budget, prints a table and writes the results."""
    problems = [*wanted.find_problems(), *_find_option_problems(wanted)]
    if problems:
        raise PlanError(problems)
    check_outputs(wanted.json, wanted.html)
    limits = parse_limits(wanted.limits)
    source = _request_source(wanted)
    layout, words = _layout(wanted)
    cost: StepCost = layout.cost
    if wanted.steps:
        cost = load_step_table(Path(wanted.steps))
        words.append(f"step times: {wanted.steps}")
    else:
        words.append(
            f"step times: {wanted.efficiency:.0%} of the limits of the device, and "
            f"{wanted.host_ms:g} ms for the host"
        )
    variants = []
    for policy in dict.fromkeys(wanted.policies):
        for budget in dict.fromkeys(wanted.max_num_batched_tokens):
            config = _serving_config(wanted, layout, policy, budget)
            variants.append(_simulate_variant(wanted, config, cost, source, limits))
    first = variants[0].config
    words.append(f"KV cache: {first.num_blocks:,} blocks of {first.block_size} tokens")
    if wanted.target_itl_ms:
        words.append(f"inter-token latency to keep: {wanted.target_itl_ms:g} ms")
    quiet = "-" in (wanted.json, wanted.html)
    if not quiet:
        print("\n".join(words))
        print(f"\n{comparison_table(variants)}")
        for variant in variants:
            print(f"\n{variant.name}\n{latency_table(variant.result)}")
            print(_describe_rates(variant, limits, wanted.find_rate))
    _write_results(wanted, words, variants, limits)
    return 0


def _find_option_problems(wanted: SimulateServingOptions) -> list[str]:
    """Returns all problems of the options."""
    problems = []
    for name, least in (
        ("num_requests", 1),
        ("max_num_seqs", 1),
        ("block_size", 1),
        ("max_model_len", 0),
        ("prefix_groups", 0),
        ("prefix_tokens", 0),
    ):
        value = getattr(wanted, name)
        if not least <= value <= 10**7:
            problems.append(
                f"{name}={value} is out of range. It must be between {least} and 10000000. Use "
                f"{max(least, getattr(SimulateServingOptions(), name))}."
            )
    for name, low, high in (
        ("load", 1e-6, 100.0),
        ("burstiness", 1e-3, 1e6),
        ("efficiency", 1e-3, 1.0),
        ("host_ms", 0.0, 1e6),
        ("request_overhead_ms", 0.0, 1e6),
        ("kv_cache_gib", 0.0, 1e6),
        ("target_itl_ms", 0.0, 6e4),
    ):
        value = getattr(wanted, name)
        if not low <= value <= high:
            problems.append(
                f"{name}={value} is out of range. It must be between {low:g} and {high:g}. Use "
                f"{getattr(SimulateServingOptions(), name)}."
            )
    if wanted.rate is not None and not 0.0 <= wanted.rate < math.inf:
        problems.append(
            f"rate={wanted.rate} is out of range. It must be at least 0, which means all at once. "
            "Use 10."
        )
    if not all(1 <= budget <= 10**7 for budget in wanted.max_num_batched_tokens):
        problems.append(
            f"max_num_batched_tokens={wanted.max_num_batched_tokens} is out of range. A step needs "
            "at least 1 token. Use 1024."
        )
    if not wanted.policies or not wanted.max_num_batched_tokens:
        problems.append(
            "policies or max_num_batched_tokens is empty. At least one of each is simulated. Use "
            "decode_first and 1024."
        )
    for name in wanted.policies:
        if name not in POLICIES:
            problems.append(
                f"policy {name!r} is not known.{suggest_nearest(name, POLICIES)} Known policies: "
                f"{', '.join(POLICIES)}. Use one of them."
            )
    return problems


def parse_limits(words: Sequence[str]) -> dict[str, float]:
    """Returns upper bounds in ms by name, from NAME=VALUE."""
    limits = {}
    for word in words:
        name, _, value = word.partition("=")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in LIMIT_NAMES or not limit > 0.0:
            raise PlanError(
                f"limit {word!r} is not valid.{suggest_nearest(name, LIMIT_NAMES)} It must be "
                "NAME=MILLISECONDS, with a name such as ttft_p99. Write for example ttft_p99=250."
            )
        limits[name] = limit
    return limits


def _request_source(wanted: SimulateServingOptions) -> RequestSource:
    """Returns the trace or the generator."""
    for name in ("input_tokens", "output_tokens"):
        parse_lengths(getattr(wanted, name), name)
    generator = RequestGenerator(
        num_requests=wanted.num_requests,
        input_tokens=wanted.input_tokens,
        output_tokens=wanted.output_tokens,
        burstiness=wanted.burstiness,
        prefix_groups=wanted.prefix_groups,
        prefix_tokens=wanted.prefix_tokens,
        seed=wanted.seed,
    )
    if wanted.trace:
        return RequestSource(generator, tuple(read_trace(Path(wanted.trace))))
    return RequestSource(generator)


def _layout(wanted: SimulateServingOptions) -> tuple[ServingLayout, list[str]]:
    """Returns what a rank computes, and lines that describe model, grid and cluster."""
    plan = wanted.plan.with_degrees(
        {axis: 1 for axis, size in wanted.plan.degrees.items() if size < 1}
    )
    cluster = _find_cluster(wanted.cluster)
    dtype = wanted.train.dtype
    if dtype == "auto":
        dtype = "fp32" if cluster.cores else "bf16"
    layout = serving_layout(
        resolve_model_spec(wanted.settings),
        plan,
        cluster,
        dtype=dtype,
        efficiency=wanted.efficiency,
        host_seconds=wanted.host_ms / 1e3,
    )
    words = [
        f"model: {wanted.model.size}, {dtype}, {layout.weight_bytes / 2**30:,.1f} GiB of weights "
        "per device",
        f"grid: {_describe_grid(plan)} on {cluster.name} ({cluster.device.name})",
    ]
    return layout, words


def _find_cluster(name: str) -> Cluster:
    """Returns the cluster with a name or from a file, or this machine as measured."""
    if name:
        return clusters.load_cluster(name)
    found = clusters.load_measured_cluster()
    if found is None:
        raise PlanError(
            "No cluster is given, and this machine has not been measured. The simulator needs the "
            f"speed of devices and links. Use --cluster with one of "
            f"{', '.join(clusters.cluster_names())} or a TOML file, or run `ranvier measure` first."
        )
    return found


def _describe_grid(plan: Plan) -> str:
    """Returns the degrees above 1 as text."""
    degrees = [f"{axis} {size}" for axis, size in plan.degrees.items() if size > 1]
    return ", ".join(degrees) or "one device"


def _serving_config(
    wanted: SimulateServingOptions, layout: ServingLayout, policy: str, budget: int
) -> ServingConfig:
    """Returns the simulated engine."""
    table = ShardingTable.from_plan(wanted.plan)
    block_size = table.tokens_per_block(wanted.block_size, wanted.plan.degrees)
    num_blocks = layout.num_blocks(block_size, wanted.kv_cache_gib)
    if num_blocks < 1:
        raise PlanError(
            f"The weights of a device have {layout.weight_bytes / 2**30:,.1f} GiB, which leaves no "
            "room for the KV cache. It needs at least one block. Use more devices, or set "
            "kv_cache_gib."
        )
    return ServingConfig(
        policy=policy,
        max_num_batched_tokens=budget,
        max_num_seqs=wanted.max_num_seqs,
        max_model_len=wanted.max_model_len or wanted.model.sequence_limit,
        block_size=block_size,
        num_blocks=num_blocks,
        num_homes=layout.num_homes,
        num_replicas=layout.num_replicas,
        num_stages=layout.num_stages,
        lookahead=wanted.lookahead,
        # Without common prefixes there is nothing to find, and naming blocks takes time.
        enable_prefix_caching=wanted.prefix_caching and bool(wanted.prefix_groups or wanted.trace),
        request_overhead_seconds=wanted.request_overhead_ms / 1e3,
        target_itl_seconds=wanted.target_itl_ms / 1e3,
    )


def _simulate_variant(
    wanted: SimulateServingOptions,
    config: ServingConfig,
    cost: StepCost,
    source: RequestSource,
    limits: Mapping[str, float],
) -> Variant:
    """Simulates one policy and budget at the rate of the options."""

    def simulate(rate: float) -> ServingResult:
        return simulate_serving(source.requests(rate), config, cost)

    if wanted.find_rate:
        trials = find_max_rate(simulate, limits, precision=RATE_PRECISION)
        holding = [trial.rate for trial in trials if trial.holds]
        rate = max(holding, default=trials[0].rate)
        return _check_served(Variant(config, rate, simulate(rate), tuple(trials)))
    if wanted.rate is not None:
        rate = wanted.rate or math.inf
    elif source.trace:
        rate = math.nan
    else:
        rate = wanted.load * simulate(math.inf).summary()["requests_per_second"]
        rate = rate or math.inf
    return _check_served(Variant(config, rate, simulate(rate)))


def _check_served(variant: Variant) -> Variant:
    """Returns the variant; raises if no request could be served."""
    if not variant.result.requests:
        raise PlanError(variant.result.refused[0])
    return variant


# ---- results --------------------------------------------------------------------------------


def comparison_table(variants: Sequence[Variant]) -> str:
    """Returns a line for each policy and budget."""
    lines = [
        f"{'policy':<14} {'budget':>7} {'requests/s':>11} {'TTFT p50/p99':>15} "
        f"{'ITL p50/p99':>15} {'tokens/s':>9} {'KV cache':>9} {'preempted':>10}"
    ]
    for one in variants:
        found = one.result.summary()
        ttft = f"{found['ttft_p50']:.0f} / {found['ttft_p99']:.0f} ms"
        itl = f"{found['itl_p50']:.1f} / {found['itl_p99']:.0f} ms"
        lines.append(
            f"{one.config.policy:<14} {one.config.max_num_batched_tokens:>7,} "
            f"{found['requests_per_second']:>11.2f} {ttft:>15} {itl:>15} "
            f"{found['output_tokens_per_second']:>9,.0f} {found['block_use_max']:>9.0%} "
            f"{found['num_preemptions']:>10,.0f}"
        )
    return "\n".join(lines)


def latency_table(result: ServingResult) -> str:
    """Returns a line for each latency: mean and percentiles, in ms."""
    found = result.summary()
    columns = ("mean", *PERCENTILES)
    lines = [f"{'latency, ms':<24}" + "".join(f"{name:>10}" for name in columns)]
    for name in LATENCIES:
        values = "".join(f"{found[f'{name}_{column}']:>10.1f}" for column in columns)
        lines.append(f"{LATENCY_TITLES[name]:<24}{values}")
    return "\n".join(lines)


def _describe_rates(variant: Variant, limits: Mapping[str, float], is_search: bool) -> str:
    """Returns counts of a variant, and the largest rate that holds the limits."""
    found = variant.result.summary()
    lines = [
        f"{found['num_requests']:,.0f} requests in {found['seconds']:.1f} s, "
        f"{found['num_steps']:,.0f} steps, {found['total_tokens_per_second']:,.0f} tokens/s with "
        f"prompts, prefix cache hits {found['prefix_hit_rate']:.0%}"
    ]
    refused = variant.result.refused
    if refused:
        lines.append(f"{len(refused):,} requests were refused, the first one because: {refused[0]}")
    if is_search:
        bounds = ", ".join(f"{name} <= {limit:g} ms" for name, limit in limits.items())
        if math.isinf(variant.rate):
            lines.append(f"{bounds} even with all requests at once")
        elif any(trial.holds for trial in variant.trials):
            lines.append(f"largest rate with {bounds}: {variant.rate:.2f} requests/s")
        else:
            lines.append(
                f"no rate holds {bounds}; the lowest tried was {variant.rate:.3g} requests/s"
            )
    return "\n".join(lines)


def _write_results(
    wanted: SimulateServingOptions,
    words: Sequence[str],
    variants: Sequence[Variant],
    limits: Mapping[str, float],
) -> None:
    """Writes the JSON file and the page."""
    outputs: list[tuple[str, Callable[[], str]]] = [
        (wanted.json, lambda: _to_json(words, variants, limits)),
        (wanted.html, lambda: render_page(words, variants)),
    ]
    for name, render in outputs:
        if name == "-":
            print(render(), end="")
        elif name:
            write_text_atomically(Path(name), render())
            # Standard output holds nothing but a result that is printed there.
            if "-" not in (wanted.json, wanted.html):
                print(f"written: {name}")


def _to_json(words: Sequence[str], variants: Sequence[Variant], limits: Mapping[str, float]) -> str:
    """Returns the results as text."""
    return json.dumps(to_record(words, variants, limits), indent=1, allow_nan=False) + "\n"


def to_record(
    words: Sequence[str], variants: Sequence[Variant], limits: Mapping[str, float]
) -> dict[str, Any]:
    """Returns the results as JSON values; latencies are in ms."""
    rows = []
    for one in variants:
        row: dict[str, Any] = {
            "policy": one.config.policy,
            "max_num_batched_tokens": one.config.max_num_batched_tokens,
            "rate": _finite_or_none(one.rate),
            "num_blocks": one.config.num_blocks,
            **one.result.summary(),
        }
        if one.trials:
            row["limits"] = dict(limits)
            row["holds"] = any(trial.holds for trial in one.trials)
            row["trials"] = [
                {"rate": _finite_or_none(trial.rate), "holds": trial.holds, **trial.summary}
                for trial in one.trials
            ]
        rows.append(row)
    return {"description": list(words), "variants": rows}


def _finite_or_none(rate: float) -> float | None:
    """Returns a rate as a value of JSON, which has no infinity: None means all at once."""
    if math.isfinite(rate):
        return rate
    return None


def render_page(words: Sequence[str], variants: Sequence[Variant]) -> str:
    """Returns a page with the table, the distributions and the state over time."""
    columns = (
        "requests_per_second",
        "ttft_p50",
        "ttft_p99",
        "itl_p50",
        "itl_p99",
        "output_tokens_per_second",
        "block_use_max",
        "num_preemptions",
    )
    rows = []
    for one in variants:
        found = one.result.summary()
        rows.append([one.name, *(f"{found[name]:,.4g}" for name in columns)])
    body = [
        "<h1>Simulated serving</h1>",
        page.render_list(list(words)),
        page.render_section(
            "Comparison",
            page.render_table(
                ["policy, budget", *(name.replace("_", " ") for name in columns)], rows
            ),
            "<p>Latencies are in milliseconds.</p>",
        ),
        page.render_section("Latencies", _wrap_plots(_latency_plots(variants))),
        page.render_section("Rates", _wrap_plots(_rate_plots(variants))),
        page.render_section("Over time", _wrap_plots(_time_plots(variants))),
    ]
    return page.render_document("Simulated serving", "\n".join(body))


def _wrap_plots(plots: Sequence[str]) -> str:
    """Returns plots side by side; empty if there are none."""
    if not plots:
        return ""
    figures = "".join(f"<figure>{plot}</figure>" for plot in plots)
    return f'<div class="plots">{figures}</div>'


def _latency_plots(variants: Sequence[Variant]) -> list[str]:
    """Returns the latency at each percentile."""
    shares = [i / 200 for i in range(200)] + [0.999]
    plots = []
    for name in LATENCIES:
        series = []
        for one in variants:
            ordered = sorted(one.result.latencies()[name])
            values = [1e3 * percentile(ordered, share) for share in shares]
            series.append(Series(one.name, [100 * share for share in shares], values))
        plots.append(
            line_plot(
                series,
                title=LATENCY_TITLES[name].capitalize(),
                x_label="percentile",
                y_label="ms",
                log=True,
            )
        )
    return plots


def _rate_plots(variants: Sequence[Variant]) -> list[str]:
    """Returns latencies over the rates that were tried."""
    tried = [one for one in variants if len(one.trials) > 1]
    if not tried:
        return []
    plots = []
    for name in ("ttft_p99", "itl_p99"):
        series = [
            Series(
                one.name,
                [trial.rate for trial in one.trials if math.isfinite(trial.rate)],
                [trial.summary[name] for trial in one.trials if math.isfinite(trial.rate)],
                style="dots",
            )
            for one in tried
        ]
        title = f"{LATENCY_TITLES[name[:-4]].capitalize()}, 99th percentile"
        plots.append(line_plot(series, title=title, x_label="requests/s", y_label="ms", log=True))
    return plots


def _time_plots(variants: Sequence[Variant]) -> list[str]:
    """Returns blocks, running and waiting requests of the first replica over time."""
    plots = []
    for title, name in (
        ("Blocks in use", "num_used_blocks"),
        ("Running requests", "num_running"),
        ("Waiting requests", "num_waiting"),
    ):
        series = []
        for one in variants:
            samples = one.result.samples[0]
            kept = samples[:: max(1, len(samples) // MAX_POINTS)]
            values = [float(getattr(sample, name)) for sample in kept]
            series.append(Series(one.name, [sample.seconds for sample in kept], values))
        plots.append(line_plot(series, title=title, x_label="seconds", y_label="", zero=True))
    return plots
