"""Adapter that lets lm-evaluation-harness evaluate a model on a grid.

Contexts, prefixes and truncation are as in its own Hugging Face model, so that both give the same
scores. The package (extra `eval`) is imported on use, on rank 0 only.
"""

from __future__ import annotations

import importlib.util
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from ranvier.config.arguments import EvalOptions
from ranvier.config.sections import suggest_nearest
from ranvier.errors import DataError, PlanError
from ranvier.eval.model_server import GenerationConfig, ModelServer

MAX_TOKENS_KEYS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the maximum number of new tokens, in order of precedence."""
DEFAULT_MAX_TOKENS = 256
"""Maximum number of new tokens if a task does not set it."""
BOOTSTRAP_ITERS = 1000
"""Bootstrap resamples for the standard error of metrics without a closed formula."""


def evaluate_tasks(
    served: ModelServer, wanted: EvalOptions, length: int, *, manager: Any | None = None
) -> dict[str, Any]:
    """Returns the results of tasks by task and metric; length: maximum context of the model.

    manager: the result of `build_task_manager`, if it was already called.
    """
    check_installed()
    from lm_eval import evaluator

    try:
        with _bootstrap_in_process():
            found = evaluator.simple_evaluate(
                model=build_harness_model(served, length),
                tasks=list(task_names(wanted)),
                task_manager=build_task_manager(wanted) if manager is None else manager,
                limit=wanted.limit or None,
                num_fewshot=None if wanted.fewshot < 0 else wanted.fewshot,
                bootstrap_iters=BOOTSTRAP_ITERS,
                log_samples=False,
                random_seed=wanted.seed,
                numpy_random_seed=wanted.seed,
                torch_random_seed=wanted.seed,
                fewshot_random_seed=1234 + wanted.seed,
            )
    except OSError as error:
        raise _data_error(wanted, error) from error
    except Exception as error:
        # Failed downloads raise exceptions of these packages, which are not imported here to catch
        # them.
        if type(error).__module__.partition(".")[0] in ("datasets", "huggingface_hub", "httpx"):
            raise _data_error(wanted, error) from error
        raise
    return {
        name: {
            # Metric names end with the name of a filter, mostly "none".
            key.removesuffix(",none"): value
            for key, value in table.items()
            if isinstance(value, (int, float)) and key != "sample_len"
        }
        for name, table in found["results"].items()
    }


@contextmanager
def _bootstrap_in_process() -> Iterator[None]:
    """Makes the package compute bootstrap errors in this process.

    By default it forks a process per core, but a rank must not have children (it is a daemon), and
    forks of it would handle signals meant for the run.
    """
    from lm_eval.api import metrics

    usual = metrics.bootstrap_stderr
    metrics.bootstrap_stderr = _bootstrap_stderr
    try:
        yield
    finally:
        metrics.bootstrap_stderr = usual


def _bootstrap_stderr(
    metric: Callable[[Sequence[Any]], float], values: Sequence[Any], iters: int
) -> float:
    """Returns the standard deviation of a metric over resamples, with the seed of the package."""
    from lm_eval.api.metrics import sample_stddev

    draw = random.Random(0)
    with warnings.catch_warnings():
        # A resample may lack a class, which f1 warns about.
        warnings.simplefilter("ignore")
        found = [metric(draw.choices(values, k=len(values))) for _ in range(iters)]
    return float(sample_stddev(found))


def check_installed() -> None:
    """Raise if the package is not installed."""
    if importlib.util.find_spec("lm_eval") is None:
        raise PlanError(
            "lm_eval is not installed. All --tasks but needle need lm-evaluation-harness. Install "
            "it with the extra eval: pip install 'ranvier[eval]'."
        )


def task_names(wanted: EvalOptions) -> tuple[str, ...]:
    """Returns the names of the requested tasks."""
    return tuple(filter(None, (name.strip() for name in wanted.tasks.split(","))))


def build_task_manager(wanted: EvalOptions) -> Any:
    """Returns the task manager; indexes the many tasks of the package only if they are needed."""
    check_installed()
    from lm_eval.tasks import TaskManager

    # Indexing all tasks of the package takes a while, so try the user's own tasks alone first.
    if wanted.include:
        own = TaskManager(include_path=wanted.include, include_defaults=False)
        if all(own.match_tasks([name]) for name in task_names(wanted)):
            return own
    manager = TaskManager(include_path=wanted.include or None)
    unknown = [name for name in task_names(wanted) if not manager.match_tasks([name])]
    if unknown:
        known = manager.all_tasks
        if wanted.include:
            where = f" or {wanted.include}"
        else:
            where = ""
        raise PlanError(
            [
                f"tasks: {name!r} is unknown.{suggest_nearest(name, [*known, 'needle'])} A task is "
                f"needle, or one of the {len(known)} of lm-evaluation-harness{where}. Use one of "
                "them, or pass --include DIR with your own tasks."
                for name in unknown
            ]
        )
    return manager


def _data_error(wanted: EvalOptions, error: Exception) -> DataError:
    reason = (str(error).strip().splitlines() or [""])[0][:300]
    return DataError(
        f"The data of {', '.join(task_names(wanted))} cannot be loaded: {type(error).__name__}: "
        f"{reason}. Most tasks download their data on first use. Run once with network access, or "
        "pass --include DIR with tasks that use local files."
    )


def build_harness_model(served: ModelServer, length: int) -> Any:
    """Returns the model as a class of the harness."""
    from lm_eval.api.model import TemplateLM

    class Model(HarnessModel, TemplateLM):  # type: ignore[misc]
        """Our methods on the harness's base class, which splits contexts and continuations."""

    return Model(served, length)


class HarnessModel:
    """Answers the requests of the harness with a `ModelServer`."""

    def __init__(self, served: ModelServer, length: int) -> None:
        super().__init__()
        self.server = served
        self.max_length = length

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.server.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context."""
        return self.server.tokenizer.prefix_token_id

    @property
    def tokenizer_name(self) -> str:
        """Identifies the tokenizer in caches of answers."""
        return self.server.tokenizer.run_tokenizer.fingerprint

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_more: Any
    ) -> list[int]:
        """Returns the tokens of a text; the prefix token is not added twice."""
        words = self.server.tokenizer
        begins = string.startswith(words.token_name(words.prefix_token_id))
        if add_special_tokens is None:
            special = not begins
        else:
            special = add_special_tokens
        return words.encode(string, special=special)

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_more: Any
    ) -> list[tuple[float, bool]]:
        """Returns the log-probability of each continuation, and whether it is the greedy one."""
        most = max((len(answer) for _, _, answer in requests), default=0)
        if most > self.max_length:
            raise PlanError(
                f"A continuation has {most} tokens, but the maximum length is {self.max_length}. A "
                "continuation must fit. Use a larger --max-length, or another task."
            )
        # Truncated from the left. One token more, because the last one is only predicted.
        wholes = [(known + answer)[-(self.max_length + 1) :] for _, known, answer in requests]
        found = []
        for (_, _, answer), one in zip(requests, self.server.score_sequences(wholes), strict=True):
            mine = slice(len(one.logprobs) - len(answer), None)
            found.append((float(one.logprobs[mine].sum()), bool(one.is_greedy[mine].all())))
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], **_more: Any) -> list[float]:
        """Returns the log-probability of each text, in windows that predict disjoint tokens."""
        from lm_eval import utils

        windows: list[tuple[int, list[int], list[int]]] = []
        for number, request in enumerate(requests):
            tokens = self.tok_encode(request.args[0])
            pairs = utils.get_rolling_token_windows(
                tokens, self.prefix_token_id, self.max_length, 1
            )
            windows += [(number, *utils.make_disjoint_window(pair)) for pair in pairs]
        totals = [0.0] * len(requests)
        for (number, _, _), (log, _) in zip(
            windows, self._loglikelihood_tokens(windows), strict=True
        ):
            totals[number] += log
        return totals

    def generate_until(self, requests: Sequence[Any], **_more: Any) -> list[str]:
        """Returns the text that follows each context, cut before the first stop string."""
        # Requests with the same settings are generated together.
        groups: dict[GenerationConfig, list[int]] = {}
        for number, request in enumerate(requests):
            groups.setdefault(self.parse_generation_kwargs(request.args[1]), []).append(number)
        found: dict[int, str] = {}
        for wish, numbers in groups.items():
            room = self.max_length - wish.max_new_tokens
            if room < 1:
                raise PlanError(
                    f"A task generates {wish.max_new_tokens} tokens, but the maximum length is "
                    f"{self.max_length}. Both the context and the new tokens must fit. Use a "
                    "larger --max-length, or a smaller max_gen_toks in the task."
                )
            prompts = [self.tok_encode(requests[i].args[0])[-room:] for i in numbers]
            prompts = [prompt or [self.prefix_token_id] for prompt in prompts]
            found |= zip(numbers, self.server.generate(prompts, wish), strict=True)
        return [found[number] for number in range(len(requests))]

    def parse_generation_kwargs(self, settings: Mapping[str, Any]) -> GenerationConfig:
        """Returns the generation settings of a task; raises if one is not supported."""
        rest = dict(settings)
        until = rest.pop("until", None) or []
        if isinstance(until, str):
            stops = [until]
        else:
            stops = list(until)
        # As in the harness's own model, the end-of-text token is always a stop string.
        end = self.server.tokenizer.token_name(self.eot_token_id)
        counts = [rest.pop(name, None) for name in MAX_TOKENS_KEYS]
        count = next((int(n) for n in counts if n is not None), DEFAULT_MAX_TOKENS)
        sampled = bool(rest.pop("do_sample", False))
        temperature = float(rest.pop("temperature", 1.0) or 0.0)
        top_k = int(rest.pop("top_k", 0) or 0)
        top_p = float(rest.pop("top_p", 1.0) or 1.0)
        # Anything left would change the texts, unless it is disabled.
        unknown = {key: value for key, value in rest.items() if value not in (None, False)}
        if unknown:
            raise PlanError(
                f"A task uses unsupported generation settings: {unknown}. Supported are until, "
                f"do_sample, temperature, top_k, top_p and {MAX_TOKENS_KEYS[0]}. Change the task."
            )
        return GenerationConfig(
            max_new_tokens=count,
            stops=(*stops, *([] if end in stops else [end])),
            temperature=temperature if sampled else 0.0,
            top_k=top_k,
            top_p=top_p,
        )
