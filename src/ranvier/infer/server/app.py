"""The HTTP application: endpoints, errors, keys, and logs.

Everything of a request that can be checked is checked here, before an engine sees it. Status and
headers of a stream are sent with its first token, so that a request that fails in the queue still
gets its status code.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import re
import secrets
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request as HttpRequest
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ranvier import __version__
from ranvier.errors import RanvierError
from ranvier.infer.request import Request, TokenOutput
from ranvier.infer.sampling_params import SamplingParams, StructuredOutput
from ranvier.infer.server.answers import (
    Answer,
    ChatAnswer,
    Choice,
    CompletionAnswer,
    end_events,
    error_event,
)
from ranvier.infer.server.api_errors import ApiError, invalid_request, unavailable
from ranvier.infer.server.authentication import ApiKeys
from ranvier.infer.server.chat_page import read_chat_page
from ranvier.infer.server.config import ServeConfig
from ranvier.infer.server.engine_client import EngineClient, Generation
from ranvier.infer.server.metrics import CONTENT_TYPE, ServerMetrics
from ranvier.infer.server.openapi import build_openapi
from ranvier.infer.server.parameters import RequestSeeds, build_params
from ranvier.infer.server.protocol import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    TemplateBody,
    TokenizeBody,
    parse_body,
)
from ranvier.infer.server.request_log import SCOPE_KEY, HttpRecord, RequestLog
from ranvier.infer.server.served_model import ServedModel, too_long_error, tool_objects

STREAM_KEY = "ranvier.stream"
"""Key in the scope of a request whose answer is a stream, for `http_protocol`."""
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
IGNORED_HEADER = "x-ranvier-ignored-parameters"
OPEN_PATHS = ("/", "/health", "/ready", "/version", "/metrics", "/openapi.json")
"""Paths that need no key."""
INLINE_CHARACTERS = 8192
"""Texts, bodies and answers up to this size are handled without a thread."""
MAX_BATCH = 2048
"""Maximum number of choices of an HTTP request, over all its prompts."""
COMPLETION_TOKENS = 16
"""Tokens of a completion that does not ask for a number, as in OpenAI's API."""
Parsed = TypeVar("Parsed")
Result = TypeVar("Result")
Endpoint = Callable[[HttpRequest], Awaitable[Response]]


class ClientGoneError(ApiError):
    """The client has closed its connection."""

    def __init__(self) -> None:
        super().__init__(499, "The client has closed the connection.")


class JsonResponse(Response):
    """A JSON answer without spaces."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Returns the content as JSON."""
        return encode_json(content)


def encode_json(content: Any) -> bytes:
    """Returns the content as JSON without spaces."""
    return json.dumps(content, allow_nan=False, separators=(",", ":")).encode()


class Front:
    """The state of the front, and its endpoints."""

    def __init__(
        self,
        config: ServeConfig,
        model: ServedModel,
        client: EngineClient,
        metrics: ServerMetrics,
        *,
        keys: ApiKeys | None = None,
        log: RequestLog | None = None,
        seed: int = 0,
    ) -> None:
        self.config = config
        self._seeds = RequestSeeds(seed)
        self.model = model
        self.client = client
        self.metrics = metrics
        self.keys = keys or ApiKeys()
        self.log = log or RequestLog(config.usage_log)
        self.is_draining = False
        self.num_open = 0
        """HTTP requests that are being answered."""
        self._openapi = build_openapi()
        self._page = read_chat_page()
        # The tokenizer of chat templates is not safe for several threads.
        self._chat_thread = ThreadPoolExecutor(1, "chat")
        self._text_threads = ThreadPoolExecutor(2, "tokenize")
        # A grammar may take seconds to compile, and must not delay other requests.
        self._grammar_thread = ThreadPoolExecutor(1, "grammar")

    def close(self) -> None:
        """Ends threads and logs."""
        self._chat_thread.shutdown(wait=False, cancel_futures=True)
        self._text_threads.shutdown(wait=False, cancel_futures=True)
        self._grammar_thread.shutdown(wait=False, cancel_futures=True)
        if self.model.structures is not None:
            self.model.structures.close()
        self.log.close()

    @property
    def is_ready(self) -> bool:
        """Whether new requests are accepted."""
        return bool(self.client.ready_replicas) and not self.is_draining

    # ---- endpoints without a model -------------------------------------------------------------

    async def chat_page(self, request: HttpRequest) -> Response:
        """Serves the chat page."""
        headers = {"content-security-policy": self._page.policy}
        return HTMLResponse(self._page.content, headers=headers)

    async def health(self, request: HttpRequest) -> Response:
        """Reports whether this process and the engines answer."""
        states = [one.state for one in self.client.replicas]
        if "ready" not in states:
            status = "down" if "down" in states else "loading"
        else:
            status = "degraded" if "down" in states else "ok"
        if any(one.cause for one in self.client.replicas) and status == "loading":
            status = "down"
        replicas = [
            {
                "replica": one.index,
                "state": one.state,
                "cause": one.cause or None,
                "progress": one.progress or None,
                "restarts": one.num_restarts,
                "compile_failure": one.stats.compile_failure or None,
            }
            for one in self.client.replicas
        ]
        content = {"status": status, "draining": self.is_draining, "replicas": replicas}
        return JsonResponse(content, 503 if status == "down" else 200)

    async def ready(self, request: HttpRequest) -> Response:
        """Answers 200 between loaded and draining."""
        self._check_ready()
        return JsonResponse({"status": "ready"})

    async def version(self, request: HttpRequest) -> Response:
        """Returns the version of the server."""
        return JsonResponse({"version": __version__})

    async def show_metrics(self, request: HttpRequest) -> Response:
        """Returns the metrics."""
        return Response(self.metrics.render(), media_type=CONTENT_TYPE)

    async def openapi(self, request: HttpRequest) -> Response:
        """Returns the description of the API."""
        return JsonResponse(self._openapi)

    async def list_models(self, request: HttpRequest) -> Response:
        """Lists the model and its adapters."""
        data = [self._model_object(name) for name in self.model.names]
        return JsonResponse({"object": "list", "data": data})

    async def show_model(self, request: HttpRequest) -> Response:
        """Returns one model."""
        name = request.path_params["name"]
        self.model.adapter_of(name or " ")
        return JsonResponse(self._model_object(name))

    def _model_object(self, name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": self.model.created,
            "owned_by": "ranvier",
            "root": self.model.name,
            "parent": None if name == self.model.name else self.model.name,
            "max_model_len": self.client.max_model_len,
        }

    # ---- endpoints of text ---------------------------------------------------------------------

    async def tokenize(self, request: HttpRequest) -> Response:
        """Returns the tokens of a text or a conversation."""
        body, headers = await self._read_body(request, TokenizeBody)
        self.model.adapter_of(body.model)
        if body.prompt is not None:
            text = body.prompt
            tokens = await self._in_text_thread(lambda: self.model.encode_text(text, 0), len(text))
            tokens = tokens if text else []
        else:
            tokens = await self._in_chat_thread(lambda: self.model.encode_chat(body, 0))
        content: dict[str, Any] = {
            "count": len(tokens),
            "max_model_len": self.client.max_model_len,
            "tokens": tokens,
            "token_strs": None,
        }
        if body.return_token_strs:
            content["token_strs"] = [self.model.token_text(token) for token in tokens]
        return JsonResponse(content, headers=headers)

    async def detokenize(self, request: HttpRequest) -> Response:
        """Returns the text of tokens, with special tokens."""
        body, headers = await self._read_body(request, DetokenizeBody)
        self.model.adapter_of(body.model)
        self._check_tokens(body.tokens, "tokens", self.model.tokenizer.vocab_size)
        text = await self._in_text_thread(
            lambda: self.model.tokenizer.decode_with_specials(body.tokens), len(body.tokens)
        )
        return JsonResponse({"prompt": text}, headers=headers)

    async def apply_template(self, request: HttpRequest) -> Response:
        """Returns the text of a conversation."""
        body, headers = await self._read_body(request, TemplateBody)
        self.model.adapter_of(body.model)
        text = await self._in_chat_thread(lambda: self.model.render_chat(body))
        return JsonResponse({"prompt": text}, headers=headers)

    async def chat_completions(self, request: HttpRequest) -> Response:
        """Answers a conversation."""
        self._check_ready()
        body, headers = await self._read_body(request, ChatBody)
        self.model.adapter_of(body.model)
        # A full queue is reported before any work for the request.
        self.client.check_capacity()
        most = 0 if body.truncate_prompt_tokens else self.client.max_model_len
        prompt = await self._in_chat_thread(lambda: self.model.encode_chat(body, most))
        structure = body.read_structure() or self._tool_structure(body)
        logprobs = (body.top_logprobs or 0) if body.logprobs else None
        params = build_params(
            body,
            self.model,
            self.client.vocab_size,
            self._seeds,
            structure=structure,
            logprobs=logprobs,
        )
        tool_calls = self.model.tool_calls if body.choice_of_tool != "none" else None
        if tool_calls is not None and tool_calls.needs_special_tokens:
            params = dataclasses.replace(params, skip_special_tokens=False)
        await self._check_structure(params.structured_output)
        limit = body.max_completion_tokens or body.max_tokens
        requests = self._build_requests(request, body, "chatcmpl", [prompt], params, limit)
        choices = [
            Choice(
                index=one.stream,
                request_id=one.request_id,
                prompt=one.prompt_token_ids,
                params=one.params,
                stream=self.model.make_text_stream(
                    self.model.tokenizer, one.prompt_token_ids, one.params
                ),
                parser=None if tool_calls is None else tool_calls.make_parser(),
                max_calls=None if body.parallel_tool_calls else 1,
                is_first=one.stream == 0,
            )
            for one in requests
        ]
        answer = self._build_answer(ChatAnswer, body, requests, choices)
        self._note_prompt(request, [one.to_template("messages") for one in body.messages])
        return await self._respond(request, body, answer, requests, headers)

    async def completions(self, request: HttpRequest) -> Response:
        """Continues one or several prompts."""
        self._check_ready()
        body, headers = await self._read_body(request, CompletionBody)
        self.model.adapter_of(body.model)
        self.client.check_capacity()
        prompts = await self._encode_prompts(body)
        wanted = body.prompt_logprobs
        if body.echo and body.logprobs is not None:
            wanted = max(wanted or 0, body.logprobs)
        params = build_params(
            body,
            self.model,
            self.client.vocab_size,
            self._seeds,
            structure=body.read_structure(),
            logprobs=body.logprobs,
            prompt_logprobs=wanted,
        )
        await self._check_structure(params.structured_output)
        drops = body.max_tokens == 0
        limit = 1 if drops else body.max_tokens
        requests = self._build_requests(
            request, body, "cmpl", prompts, params, limit, default=COMPLETION_TOKENS
        )
        choices = [
            Choice(
                index=one.stream,
                request_id=one.request_id,
                prompt=one.prompt_token_ids,
                params=one.params,
                stream=self.model.make_text_stream(
                    self.model.tokenizer, one.prompt_token_ids, one.params
                ),
                echo=self._echo_text(body, one) if body.echo else None,
                drops_tokens=drops,
                is_first=one.stream % body.n == 0,
            )
            for one in requests
        ]
        answer = self._build_answer(CompletionAnswer, body, requests, choices)
        self._note_prompt(request, body.prompt)
        return await self._respond(request, body, answer, requests, headers)

    # ---- requests ------------------------------------------------------------------------------

    async def _read_body(
        self, request: HttpRequest, cls: type[Parsed]
    ) -> tuple[Parsed, dict[str, str]]:
        """Returns the checked body, and headers that name ignored parameters."""
        data = await read_limited_body(request, self.config.max_body_bytes)
        body, ignored = await self._in_text_thread(
            lambda: parse_body(cls, data, strict=self.config.strict_parameters), len(data)
        )
        if not ignored:
            return body, {}
        names = [re.sub(r"[^A-Za-z0-9_.-]", "?", name)[:64] for name in ignored[:32]]
        return body, {IGNORED_HEADER: ",".join(names)}

    async def _in_chat_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._chat_thread, work)

    async def _in_text_thread(self, work: Callable[[], Result], size: int) -> Result:
        if size <= INLINE_CHARACTERS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._text_threads, work)

    def _check_ready(self) -> None:
        if self.is_draining:
            raise unavailable(
                "The server is shutting down. Send the request to another server.", "draining"
            )
        if not self.client.ready_replicas:
            self.client.check_capacity()

    def _check_tokens(self, tokens: Sequence[int], name: str, vocab: int) -> None:
        if tokens and not 0 <= min(tokens) <= max(tokens) < vocab:
            wrong = next(one for one in tokens if not 0 <= one < vocab)
            raise invalid_request(
                f"{name} has the token {str(wrong)[:30]}. Tokens must be in [0, {vocab}). Remove "
                "it.",
                param=name,
                code="invalid_value",
            )

    async def _encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        """Returns the tokens of each prompt, from any of the four forms."""
        given = body.prompt
        if isinstance(given, str):
            prompts: list[Any] = [given]
        elif isinstance(given[0], int):
            prompts = [given]
        else:
            prompts = list(given)
        if len(prompts) * body.n > MAX_BATCH:
            raise invalid_request(
                f"prompt has {len(prompts)} entries, and n={body.n}. A request may have at most "
                f"{MAX_BATCH} choices. Send several requests.",
                param="prompt",
                code="invalid_value",
            )
        most = 0 if body.truncate_prompt_tokens else self.client.max_model_len
        found = []
        for prompt in prompts:
            if isinstance(prompt, str):
                text = prompt
                tokens = await self._in_text_thread(
                    lambda text=text: self.model.encode_text(text, most),  # type: ignore[misc]
                    len(text),
                )
            else:
                tokens = prompt
                self._check_tokens(tokens, "prompt", self.client.vocab_size)
            if not tokens:
                raise invalid_request(
                    "A prompt has no tokens. At least one is needed. Add one, or send a text.",
                    param="prompt",
                    code="invalid_value",
                )
            found.append(tokens)
        return found

    def _echo_text(self, body: CompletionBody, request: Request) -> str:
        if isinstance(body.prompt, str) and not body.truncate_prompt_tokens:
            return body.prompt
        texts = body.prompt
        if (
            isinstance(texts, list)
            and isinstance(texts[0], str)
            and not body.truncate_prompt_tokens
        ):
            return str(texts[request.stream // body.n])
        tokenizer = self.model.tokenizer
        if body.skip_special_tokens:
            return tokenizer.decode(request.prompt_token_ids)
        return tokenizer.decode_with_specials(request.prompt_token_ids)

    async def _check_structure(self, structure: StructuredOutput | None) -> None:
        if structure is None:
            return
        if self.model.structures is None:
            raise invalid_request(
                "Structured output is not available on this server. It needs the extra `grammar`. "
                "Install it there: pip install 'ranvier[grammar]'.",
                param="response_format",
                code="unsupported_parameter",
            )
        try:
            await asyncio.get_running_loop().run_in_executor(
                self._grammar_thread, self.model.structures.check, structure
            )
        except RanvierError as error:
            raise invalid_request(
                str(error), param="response_format", code="invalid_value"
            ) from None

    def _tool_structure(self, body: ChatBody) -> StructuredOutput | None:
        """Returns the language that makes the model call a tool, if the client requires it."""
        choice = body.choice_of_tool
        if choice in ("none", "auto"):
            return None
        if self.model.tool_calls is None:
            raise invalid_request(
                f"tool_choice={choice.lstrip('=')!r} is not available: the format of the model's "
                "tool calls is not known. Use tool_choice='auto', or set serve.tool_call_parser on "
                "the server.",
                param="tool_choice",
                code="unsupported_value",
            )
        name = "" if choice == "required" else choice.removeprefix("=")
        try:
            return self.model.tool_calls.build_structure(
                tool_objects(body) or [], name, several=body.parallel_tool_calls
            )
        except RanvierError as error:
            raise invalid_request(str(error), param="tools", code="invalid_value") from None

    def _build_requests(
        self,
        request: HttpRequest,
        body: GenerationBody,
        prefix: str,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        limit: int | None,
        *,
        default: int | None = None,
    ) -> list[Request]:
        """Returns one engine request per prompt and choice.

        limit: tokens that the client asks for; default: those without a limit, None for as many as
        fit.
        """
        record: HttpRecord = request.scope[SCOPE_KEY]
        name = f"{prefix}-{secrets.token_hex(16)}"
        salt = ""
        if record.owner or body.cache_salt:
            # A hit is visible in the time to the first token, so keys do not share prefixes.
            text = json.dumps([record.owner, body.cache_salt])
            salt = hashlib.sha256(text.encode()).hexdigest()
        found: list[Request] = []
        for prompt in prompts:
            tokens = tuple(prompt[-(body.truncate_prompt_tokens or 0) :])
            fitted = self._limit_tokens(params, tokens, limit, default)
            parent = ""
            for _ in range(body.n):
                one = Request(
                    request_id=f"{name}-{len(found)}",
                    prompt_token_ids=tokens,
                    params=fitted,
                    stream=len(found),
                    parent_id=parent,
                    priority=body.priority,
                    cache_salt=salt,
                    adapter=self.model.adapter_of(body.model),
                )
                found.append(one)
                # Log-probabilities of the prompt are computed for each choice on its own.
                if params.prompt_logprobs is None:
                    parent = parent or one.request_id
        return found

    def _limit_tokens(
        self, params: SamplingParams, tokens: Sequence[int], limit: int | None, default: int | None
    ) -> SamplingParams:
        most = self.client.max_model_len
        room = most - len(tokens)
        if room < 1:
            raise too_long_error(len(tokens), most)
        if limit is not None and limit > room:
            raise invalid_request(
                f"The prompt has {len(tokens)} tokens and max_tokens={limit}, together "
                f"{len(tokens) + limit}. The model has {most} positions. Use max_tokens={room} or "
                "less.",
                param="max_tokens",
                code="context_length_exceeded",
            )
        count = limit or min(room, default or room)
        if params.min_tokens > count:
            raise invalid_request(
                f"min_tokens={params.min_tokens} is larger than the {count} tokens of the answer. "
                "It must be at most max_tokens. Use a smaller one.",
                param="min_tokens",
                code="invalid_value",
            )
        return dataclasses.replace(params, max_tokens=count)

    def _build_answer(
        self,
        cls: type[Answer],
        body: GenerationBody,
        requests: Sequence[Request],
        choices: Sequence[Choice],
    ) -> Answer:
        info = self.client.ready_replicas[0].info if self.client.ready_replicas else None
        plan = info.plan if info is not None and info.plan else "single"
        return cls(
            requests[0].request_id.rpartition("-")[0],
            self.model,
            body.model or self.model.name,
            f"ranvier-{__version__}-{plan}-{requests[0].params.seed}",
            choices,
            returns_tokens=body.return_token_ids,
        )

    def _note_prompt(self, request: HttpRequest, prompt: Any) -> None:
        if self.config.log_prompts:
            request.scope[SCOPE_KEY].prompt = prompt

    # ---- answers -------------------------------------------------------------------------------

    async def _respond(
        self,
        request: HttpRequest,
        body: GenerationBody,
        answer: Answer,
        requests: Sequence[Request],
        headers: dict[str, str],
    ) -> Response:
        """Generates an answer, and ends its requests when the client leaves."""
        record: HttpRecord = request.scope[SCOPE_KEY]
        record.model = body.model or self.model.name
        record.stream = body.stream
        generation = self.client.submit(requests)
        watcher = asyncio.create_task(watch_disconnect(request.receive, generation))
        try:
            outputs = await generation.next_outputs()
            record.first_token_time = time.monotonic()
            if body.stream:
                stream = EventStream(self, generation, watcher, answer, body.includes_usage)
                stream.add(outputs)
                stream.headers.update(headers)
                return stream
            await collect(answer, generation, outputs)
        except BaseException:
            watcher.cancel()
            generation.abort()
            raise
        watcher.cancel()
        generation.abort()
        note_answer(record, answer)
        # Log-probabilities of a long prompt are megabytes.
        content = await self._in_text_thread(
            lambda: encode_json(answer.to_object()), answer.num_logprobs
        )
        return Response(content, headers=headers, media_type="application/json")


class EventStream(Response):
    """An answer as server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self,
        front: Front,
        generation: Generation,
        watcher: asyncio.Task[None],
        answer: Answer,
        includes_usage: bool,
    ) -> None:
        super().__init__(headers={"cache-control": "no-cache", "x-accel-buffering": "no"})
        # The length is not known when the headers are sent.
        del self.headers["content-length"]
        self._front = front
        self._generation = generation
        self._watcher = watcher
        self._answer = answer
        self._includes_usage = includes_usage

    def add(self, outputs: Sequence[TokenOutput]) -> None:
        """Adds outputs to the answer, and ends what a stop string has ended."""
        for request_id in self._answer.add(outputs):
            self._generation.abort_one(request_id, "stop")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends the events."""
        record: HttpRecord = scope[SCOPE_KEY]
        scope[STREAM_KEY] = True
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            data = self._answer.start_chunks() + self._answer.take_chunks()
            try:
                while not self._answer.is_finished:
                    if data:
                        await send({"type": "http.response.body", "body": data, "more_body": True})
                    self.add(await self._generation.next_outputs())
                    data = self._answer.take_chunks()
                data += end_events(self._answer, includes_usage=self._includes_usage)
            except ClientGoneError:
                record.error = "the client has closed the connection"
                record.status = 499
                data = b""
            except ApiError as error:
                record.error = error.message
                data += error_event(error)
            except Exception as error:
                data += error_event(unexpected_error(error, record))
            await send({"type": "http.response.body", "body": data, "more_body": False})
        finally:
            self._watcher.cancel()
            self._generation.abort()
            note_answer(record, self._answer)


def unexpected_error(error: Exception, record: HttpRecord) -> ApiError:
    """Returns the error that a client sees if the server fails; the log has the cause."""
    traceback.print_exc()
    found = ApiError(
        500,
        f"The server has failed: {type(error).__name__}. The log of the server has the cause. "
        "Report it with the request id.",
        code="internal_error",
    )
    record.error = found.message
    return found


async def collect(answer: Answer, generation: Generation, outputs: Sequence[TokenOutput]) -> None:
    """Adds all outputs of a generation to an answer."""
    while True:
        for request_id in answer.add(outputs):
            generation.abort_one(request_id, "stop")
        if answer.is_finished:
            return
        outputs = await generation.next_outputs()


def note_answer(record: HttpRecord, answer: Answer) -> None:
    """Notes the usage of an answer for the logs."""
    record.usage = answer.usage()
    record.finish_reasons = [one.finish_reason or "abort" for one in answer.choices.values()]
    if record.prompt is not None:
        record.texts = [one.text for one in answer.choices.values()]


async def watch_disconnect(receive: Receive, generation: Generation) -> None:
    """Ends a generation when its client closes the connection."""
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            generation.fail(ClientGoneError())
            return


async def read_limited_body(request: HttpRequest, limit: int) -> bytes:
    """Reads a JSON body; refuses one that is too large before and while it is read."""
    kind = request.headers.get("content-type", "")
    if kind.partition(";")[0].strip().lower() != "application/json":
        raise ApiError(
            415,
            f"The content type is {kind[:60]!r}. A body must be JSON. Add the header "
            "'Content-Type: application/json'.",
            code="unsupported_media_type",
        )
    length = request.headers.get("content-length", "0")
    size = int(length) if length.isdecimal() and len(length) < 20 else 0
    if size > limit:
        raise _too_large_error(size, limit)
    data = bytearray()
    while True:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        data += message.get("body", b"")
        if len(data) > limit:
            raise _too_large_error(len(data), limit)
        if not message.get("more_body", False):
            return bytes(data)


def _too_large_error(size: int, limit: int) -> ApiError:
    return ApiError(
        413,
        f"The body has at least {size} bytes. It may have at most {limit} (serve.max_body_mib). "
        "Shorten it, or send several requests.",
        code="body_too_large",
        headers={"connection": "close"},
    )


# ---- application -------------------------------------------------------------------------------


def build_app(front: Front) -> ASGIApp:
    """Returns the application of a front."""
    table: tuple[tuple[str, str, Endpoint], ...] = (
        ("GET", "/", front.chat_page),
        ("GET", "/health", front.health),
        ("GET", "/ready", front.ready),
        ("GET", "/version", front.version),
        ("GET", "/metrics", front.show_metrics),
        ("GET", "/openapi.json", front.openapi),
        ("GET", "/v1/models", front.list_models),
        ("GET", "/v1/models/{name:path}", front.show_model),
        ("POST", "/v1/chat/completions", front.chat_completions),
        ("POST", "/v1/completions", front.completions),
        ("POST", "/tokenize", front.tokenize),
        ("POST", "/detokenize", front.detokenize),
        ("POST", "/apply-template", front.apply_template),
    )
    paths = ", ".join(path.replace(":path", "") for _, path, _ in table)

    async def show_http_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException), error
        allowed = Headers(dict(error.headers or {})).get("allow", "")
        if error.status_code == 405:
            shown = ApiError(
                405,
                f"The method {request.method[:20]} is not possible here. {request.url.path[:80]} "
                f"accepts {allowed}. Use that.",
                code="method_not_allowed",
                headers={"allow": allowed},
            )
        elif error.status_code == 404:
            shown = ApiError(
                404,
                f"{request.url.path[:80]!r} does not exist on this server. There are: {paths}. Use "
                "one of these.",
                code="not_found",
            )
        else:
            shown = ApiError(error.status_code, str(error.detail))
        return show_error(request, shown)

    def show_error(request: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError), error
        record: HttpRecord = request.scope[SCOPE_KEY]
        record.error = error.message
        return Response(error.to_json(), error.status, error.headers, media_type="application/json")

    def guard(endpoint: Endpoint) -> Endpoint:
        """Answers errors of an endpoint, also those that should not happen."""

        async def guarded(request: HttpRequest) -> Response:
            try:
                return await endpoint(request)
            except ApiError as error:
                return show_error(request, error)
            except (HTTPException, asyncio.CancelledError):
                raise
            except Exception as error:
                return show_error(request, unexpected_error(error, request.scope[SCOPE_KEY]))

        return guarded

    middleware = []
    if front.config.allowed_origins:
        middleware.append(
            Middleware(
                CORSMiddleware,
                allow_origins=list(front.config.allowed_origins),
                allow_methods=["GET", "POST"],
                allow_headers=["authorization", "content-type", "x-request-id"],
                expose_headers=["x-request-id", IGNORED_HEADER],
            )
        )
    app = Starlette(
        routes=[Route(path, guard(endpoint), methods=[method]) for method, path, endpoint in table],
        exception_handlers={HTTPException: show_http_error},
        middleware=middleware,
    )
    app.router.redirect_slashes = False
    return RequestMiddleware(app, front)


class RequestMiddleware:
    """Names every request, checks its key, and logs its answer."""

    def __init__(self, app: ASGIApp, front: Front) -> None:
        self.app = app
        self.front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers a request."""
        assert scope["type"] == "http", scope["type"]
        headers = dict(scope["headers"])
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        # Only a harmless id of the client is used.
        name = given if REQUEST_ID.fullmatch(given) else f"req-{secrets.token_hex(12)}"
        client = scope.get("client")
        record = HttpRecord(name, scope["method"], scope["path"], client[0] if client else "-")
        scope[SCOPE_KEY] = record

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = record.status or message["status"]
                message["headers"] = [
                    *message.get("headers", ()),
                    (b"x-request-id", name.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        self.front.num_open += 1
        try:
            owner = self.front.keys.find_owner(headers.get(b"authorization", b""))
            if owner is None and scope["path"] not in OPEN_PATHS and scope["method"] != "OPTIONS":
                await send_error(send_named, _key_error())
                return
            record.owner = owner or ""
            await self.app(scope, receive, send_named)
        finally:
            self.front.num_open -= 1
            self.front.metrics.observe_answer(record.status)
            self.front.log.write(record)


def _key_error() -> ApiError:
    return ApiError(
        401,
        "The API key is missing or not valid. This server needs a key. Send the header "
        "'Authorization: Bearer KEY'.",
        code="invalid_api_key",
        headers={"www-authenticate": "Bearer"},
    )


async def send_error(send: Send, error: ApiError) -> None:
    """Sends an error as the whole answer."""
    body = error.to_json()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *((name.encode(), value.encode()) for name, value in error.headers.items()),
    ]
    await send({"type": "http.response.start", "status": error.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
