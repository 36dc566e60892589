"""Options of the commands; the options of `plan` are in its own module."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ranvier.config.engine import EngineConfig
from ranvier.config.plan import Plan
from ranvier.config.run import RunConfig
from ranvier.setting import setting


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunConfig):
    """Verify a parallel layout: compare the configured grid with one process, in float64.

    The model is shrunk first. Both training steps and a run that is saved, reloaded and resumed are
    compared.
    """

    nproc: int = 0
    """Number of local ranks to start. 0 means as many as the plan needs; if a degree is inferred,
    train starts one per GPU, or one on a CPU."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """Train a model. Without arguments, a small model on the text of Python's standard library.

    Pass a TOML file with settings, or the directory of a run to resume it.
    """

    dry_run: bool = False
    """Print every setting that was resolved, with its value on this machine and the reason, and
    exit. `ranvier dry-run` shows what a rank of that run holds and communicates."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(RunConfig):
    """Profile the steps of a run on one rank, kernel by kernel.

    The model is built again and trained for a few steps on the data of the run. Its metrics and
    checkpoints are not changed. Settings of the run can be overridden.
    """

    steps: int = 2
    """Number of steps to profile."""
    warmup_steps: int = 3
    """Number of steps before profiling starts. The report shows the step time of the last one."""
    top: int = 15
    """Number of kernels in the table."""
    output: str = ""
    """Directory of profile.txt, profile.json and trace.json.gz. If empty, profile/ in the directory
    of the run, or NAME-profile/ next to NAME.toml."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(RunConfig):
    """Simulate a step of a run's pipeline with each schedule, without starting processes.

    Writes timeline.svg, timeline.html and timeline-trace.json (for Perfetto).
    """

    times: str = ""
    """Source of the job times: a RUN with measured times, or a TOML file with forward, backward and
    weight (seconds of each virtual stage), link, jitter and [stragglers]. If empty, the times of
    the given RUN, or times proportional to the FLOPs of the layers."""
    jitter: float | None = None
    """Variation of the times: standard deviation of their logarithm."""
    link: float | None = None
    """Seconds from the end of a job until the next stage receives its message."""
    straggler: tuple[str, ...] = ()
    """Stages that are slower, as STAGE=FACTOR."""
    seed: int = 0
    """Random seed of the jitter."""
    policies: tuple[str, ...] = ()
    """Schedules to compare with the schedule of the plan. If empty, all of them."""
    output: str = ""
    """Directory of the timelines. If empty, the directory of the run, or the current directory."""


@dataclass(frozen=True, kw_only=True)
class SimulateServingOptions(RunConfig):
    """Simulate serving a model with the scheduler of the engine, without devices.

    Predicts time to first token, inter-token latency, tokens per second and the use of the KV
    cache, for requests of a trace or of a generator. Of the settings of a run, only the model, the
    degrees of the plan and train.dtype are used.
    """

    trace: str = ""
    """JSONL file of requests: arrival (seconds), input_tokens, output_tokens and, optionally,
    prefix_group and prefix_tokens. If empty, requests are generated."""
    num_requests: int = 600
    """Number of generated requests."""
    input_tokens: str = "gamma:512"
    """Lengths of prompts: fixed:N, uniform:LOW:HIGH, gamma:MEAN, gamma:MEAN:SHAPE or
    exponential:MEAN."""
    output_tokens: str = "exponential:128"
    """Lengths of answers, in the same form."""
    prefix_groups: int = 0
    """Number of groups of requests that begin with the same tokens. 0 means no common prefixes."""
    prefix_tokens: int = 0
    """Number of tokens that the requests of a group have in common, before their own."""
    rate: float | None = None
    """Requests per second. 0 means all at once. If not given, --load, or the times of the trace."""
    load: float = 0.7
    """Rate relative to the throughput of all requests at once, if no rate is given."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests. 1 means Poisson; less is more
    bursty."""
    seed: int = 0
    """Random seed of the generator."""
    policies: tuple[str, ...] = ("decode_first",)
    """Scheduling policies to compare: decode_first, prefill_first, static."""
    max_num_batched_tokens: tuple[int, ...] = (1024,)
    """Budgets to compare: maximum number of tokens of a step."""
    target_itl_ms: float = 0.0
    """Inter-token latency to keep by steps with fewer tokens of prompts, as engine.target_itl_ms. 0
    means no target."""
    max_num_seqs: int = 256
    """Maximum number of running requests."""
    max_model_len: int = 0
    """Maximum number of tokens of a request. 0 means model.max_seq."""
    block_size: int = 64
    """Tokens of a block of the KV cache."""
    kv_cache_gib: float = 0.0
    """GiB of the KV cache of each device. 0 means what the weights leave of 90 % of its memory."""
    prefix_caching: bool = True
    """Reuse the blocks of common prefixes."""
    lookahead: bool = True
    """Schedule each step while the one before it runs."""
    cluster: str = ""
    """Name of a built-in cluster (such as dgx-h200), or a TOML file from `ranvier measure`. If
    empty, this machine as measured."""
    efficiency: float = 0.7
    """Share of the limits of the device that a step reaches."""
    host_ms: float = 0.4
    """Milliseconds of each step in which the device waits for the host."""
    request_overhead_ms: float = 3.0
    """Milliseconds of each request in the server and on its way, in addition to the engine. The
    default is that of a server with 30 requests per second; 0 for the engine alone."""
    steps: str = ""
    """JSON or JSONL file of measured steps (decode_tokens, mean_context, prompt_tokens, seconds),
    used instead of the cluster. It belongs to one model, device and grid."""
    find_rate: bool = False
    """Search for the largest rate at which --limits hold."""
    limits: tuple[str, ...] = ("ttft_p99=250", "itl_p99=40")
    """Limits for --find-rate in milliseconds, as NAME=VALUE. Names are ttft, itl, tpot and e2e,
    followed by _mean, _p50, _p90 or _p99."""
    json: str = ""
    """JSON file to write the result to. - prints it instead of the table."""
    html: str = ""
    """HTML file to write a page with plots to. - prints it."""


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(RunConfig):
    """Run the real code of one rank of many, without data, devices or other ranks.

    Shows its shards, what it communicates over each axis in a step (counted by torch's fake process
    group), and the peak memory of its tensors. If a run keeps tensors on the host, the memory of
    device and host is predicted instead.
    """

    world: int = 0
    """Number of ranks of the run. 0 means as many as the plan needs."""
    rank: int = 0
    """Rank to run, from 0."""
    expert_imbalance: float = 1.0
    """Tokens that the experts of this rank receive, relative to the mean over the ranks of the
    expert axis (max / mean, so this rank is the busiest). 1 means balanced experts."""
    longest_sequence: bool = False
    """Predict the longest data.seq_len that fits into memory.device_limit_gib and
    memory.host_limit_gib, and its memory by category. No code of the run is executed."""
    output: str = ""
    """JSON file for the results. If empty, none is written."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RunOptions):
    """Evaluate a model: lm-eval tasks, needles, perplexity, canaries, or code generation.

    Runs on one rank unless degrees are given. Of the settings of a run, only the model, plan,
    data.seq_len and train.device, dtype, backend and comm_timeout_seconds are used. With
    --canaries, several runs are compared.
    """

    tasks: str = ""
    """Comma-separated tasks of lm-evaluation-harness, which require the extra `eval`; or needle, to
    recall facts that are hidden in long texts."""
    include: str = ""
    """Directory with custom tasks (YAML)."""
    limit: int = 0
    """Maximum number of examples per task. 0 means all."""
    fewshot: int = -1
    """Number of few-shot examples. -1 uses the default of the task."""
    lengths: tuple[int, ...] = ()
    """Lengths of prompt and answer for the task needle, in tokens. If empty, model.max_seq."""
    depths: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75, 1.0)
    """Places of the needle: fractions of the text before it."""
    trials: int = 10
    """Number of needles for each length and depth."""
    haystack: tuple[str, ...] = ("stdlib",)
    """Texts to hide needles in, as in data.sources."""
    needle: str = "The magic number of {key} is {value}."
    """Sentence of a needle. {key} stands for two words, {value} for a number of 5 digits. The
    question is the sentence up to the value."""
    distractors: int = 0
    """Number of needles with other keys in the same text."""
    corpus: tuple[str, ...] = ()
    """Corpora to compute the perplexity of, as in data.sources. Windows have data.seq_len
    tokens."""
    stride: int = 0
    """Tokens between the starts of windows. 0 means data.seq_len. A smaller stride gives more
    context and takes longer."""
    held_out: bool = False
    """Use only the documents that data.validation_fraction holds out of training."""
    canaries: str = ""
    """JSONL file of canaries, as in data.canaries: how much of them the model repeats, by
    bucket."""
    suffix: int = 50
    """Number of last tokens of a canary that the model has to continue it with."""
    prefix: int = 0
    """Number of tokens before the suffix that the model is given. 0 means all."""
    code: str = ""
    """JSONL file of programming tasks (task, language, prompt, tests, baseline). The generated
    programs are run."""
    samples_per_task: int = 1
    """Number of programs per task."""
    max_new_tokens: int = 256
    """Maximum number of tokens per program."""
    temperature: float = 0.8
    """Sampling temperature for programs. 0 always takes the most likely token."""
    top_p: float = 0.95
    """Sample from the smallest set of tokens with this total probability."""
    seed: int = 0
    """Random seed of the sampling, of the few-shot examples and of needles."""
    samples_file: str = ""
    """JSONL file of programs that were run elsewhere (task, built, passed, seconds, baseline,
    processes, sample). Only the metrics are computed."""
    pass_at_k: str = ""
    """Comma-separated values of k for pass@k. If empty, 1."""
    recurrence: str = ""
    """Comma-separated numbers of iterations of a model with recurrent depth. Tasks and corpora are
    evaluated with each of them, for a table and a plot of scores against iterations. If empty,
    model.mean_recurrence."""
    exit: str = ""
    """When a token needs no further iterations, as engine.exit of `ranvier generate`. The mean
    number of iterations is part of the results."""
    kv_share: int = 0
    """Number of iterations whose keys and values are stored when texts are generated, as
    engine.kv_share of `ranvier generate`. 0 stores all."""
    batch: int = 8
    """Sequences per micro-batch."""
    max_length: int = 0
    """Maximum context length for tasks and programs. 0 means model.max_seq."""
    step: int = -1
    """Step of the checkpoint. -1 means the latest."""
    output: str = ""
    """JSON file of the results. If empty, eval-STEP.json in the directory of the run."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Tokenize corpora once, into memory-mapped shards (Megatron pairs) with a fingerprint."""

    output: str = ""
    """Directory to create. If empty, data/ followed by the name of the first file."""
    tokenizer: str = "standard"
    """Tokenizer: standard (byte-pair encoding trained on Python's standard library), bytes, train
    (train one on these files), or the path of a tokenizer.json."""
    vocab: int = 4096
    """Vocabulary size of a tokenizer that is trained."""
    text_field: str = "text"
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    format: Literal["auto", "text", "chat"] = "auto"
    """Format of the records: text or chat. auto detects it from the first record."""
    chat_template: str = ""
    """File with the chat template, in Jinja. If empty, the template next to tokenizer.json is used,
    or a simple one."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that count in the loss: the assistant's, or all."""


@dataclass(frozen=True, kw_only=True)
class NeedleCorpusOptions:
    """Write a training corpus with needles: facts hidden in long texts, and recalled at their end.

    FILE ... are the texts, as in data.sources, and the standard library of Python if none is given.
    A model that is trained on the corpus can be evaluated with `ranvier eval RUN --tasks needle`.
    """

    output: str = ""
    """Directory to create. If empty, data/needles."""
    lengths: tuple[int, ...] = (1024,)
    """Lengths of the documents in tokens, each with the same share of the tokens. They must divide
    the largest one, which is the data.seq_len to train with."""
    tokens: int = 50_000_000
    """Total number of tokens."""
    needle: str = "The magic number of {key} is {value}."
    """Sentence of a needle. {key} stands for two words, {value} for a number of 5 digits."""
    max_needles: int = 0
    """Maximum number of needles per document; small numbers are drawn more often. 0 means as many
    as take half of the tokens, together with their questions."""
    tokenizer: str = "standard"
    """Tokenizer: standard (byte-pair encoding trained on Python's standard library), bytes, or the
    path of a tokenizer.json, such as that of a run."""
    text_field: str = "text"
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    max_bytes: int = 16_000_000
    """Maximum number of bytes to read from the standard library."""
    seed: int = 0
    """Random seed of texts, needles and depths."""


@dataclass(frozen=True, kw_only=True)
class CanaryFileOptions:
    """Write a file of canaries: documents of a corpus, to measure what a run memorizes of them.

    FILE ... are the texts, as in data.sources, and the standard library of Python if none is given.
    Use texts that are not in the data.sources of the run, which would read them more often. Then
    train with --data.canaries, and evaluate with `ranvier eval RUN --canaries`.
    """

    output: str = ""
    """JSONL file to write. If empty, data/canaries.jsonl."""
    buckets: tuple[int, ...] = (0, 1, 4, 6, 50)
    """How often a run reads the documents of each bucket. Bucket 0 is the control."""
    documents: int = 100
    """Number of documents per bucket."""
    length: int = 95
    """Number of tokens of each document, which is the beginning of a longer one. With its end
    token it must fit into data.seq_len."""
    tokenizer: str = "standard"
    """Tokenizer that counts tokens: standard, bytes, or the path of a tokenizer.json, such as that
    of a run. Corpora that are already tokenized keep their own."""
    text_field: str = "text"
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    max_bytes: int = 16_000_000
    """Maximum number of bytes to read from the standard library."""
    seed: int = 0
    """Random seed of the documents."""


@dataclass(frozen=True, kw_only=True)
class InferenceOptions:
    """Options of commands that run a model with the inference engine.

    Of the plan, only the degrees, col_splits, row_splits, stage_starts, virtual_stages and
    rank_order are used.
    """

    nproc: int = setting(0, minimum=0, maximum=256)
    """Number of local ranks to start. 0 means as many as the plan needs."""
    step: int = -1
    """Step of the checkpoint of a run. -1 means the latest."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device of the engine; auto means a GPU if there is one."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Data type of the weights; auto means as stored, and fp32 on a CPU."""
    algorithm: str = "auto"
    """Algorithm of collectives, as comm.algorithm of a run."""
    timeout_seconds: float = setting(60.0, minimum=1.0, unit="seconds")
    """Time after which a step whose ranks do not answer has failed."""
    share_gpu: bool = False
    """Whether several ranks may share a GPU over NCCL; only for tests."""
    plan: Plan = field(default_factory=Plan)
    engine: EngineConfig = field(default_factory=EngineConfig)


@dataclass(frozen=True, kw_only=True)
class GenerateOptions(InferenceOptions):
    """Generate text with a model: continue a prompt, chat, or answer a file of prompts.

    The path is the directory of a run, or of a model in Hugging Face format. Without a prompt, the
    text is a new document. --recurrence, --exit and --kv-share are short for --engine.recurrence,
    --engine.exit and --engine.kv-share.
    """

    prompt: str = ""
    """Text to continue."""
    chat: str = ""
    """Question to answer with the chat template of the model, instead of a prompt. --chat without a
    question, or with -, starts a conversation in the terminal."""
    input: str = ""
    """JSONL file of prompts. Each line has prompt (a text), messages (a conversation) or tokens
    (token ids); optionally id, and parameters as in requests to `ranvier serve`."""
    output: str = ""
    """JSONL file for the answers to --input, in the order in which they are finished. Lines that it
    already answers are skipped, so that the same command continues after an interruption."""
    max_new_tokens: int = setting(100, minimum=0, maximum=10**6, usual=100, unit="tokens")
    """Maximum number of tokens to generate. 0 means up to the context length of the model."""
    temperature: float = setting(0.8, minimum=0.0, maximum=2.0, usual=0.8)
    """Sampling temperature. 0 always takes the most likely token; higher values give more varied
    text."""
    top_k: int = setting(50, minimum=0, usual=50)
    """Sample from this many most likely tokens. 0 means all."""
    top_p: float = setting(1.0, minimum=1e-9, maximum=1.0, usual=1.0)
    """Sample from the fewest most likely tokens whose probabilities sum to at least this."""
    min_p: float = setting(0.0, minimum=0.0, maximum=1.0)
    """Drop tokens whose probability is below this fraction of the most likely one's."""
    presence_penalty: float = setting(0.0, minimum=-2.0, maximum=2.0)
    """Subtracted from the logits of tokens that were generated before."""
    frequency_penalty: float = setting(0.0, minimum=-2.0, maximum=2.0)
    """Subtracted from the logits of generated tokens, once for each time."""
    repetition_penalty: float = setting(1.0, minimum=1e-3, maximum=1e3, usual=1.0)
    """Divides positive and multiplies negative logits of tokens in the prompt or the output."""
    seed: int = setting(0, minimum=0, maximum=2**63 - 1)
    """Random seed of the sampling."""
    stop: tuple[str, ...] = ()
    """Texts that end the generated text."""
    ignore_eos: bool = False
    """Whether the end tokens of the model do not end the text."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Create a run from a pretrained model.

    SRC is a directory (or one file) of safetensors with config.json, or the name of a model on the
    Hugging Face Hub (requires network access). Pickled weights are rejected, and code in the
    repository of a model is never executed.
    """

    output: str = ""
    """Directory of the run. If empty, runs/ followed by the name of the model."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights of a run in Hugging Face format: safetensors, config, tokenizer.

    RUN is the directory of a trained or imported run.
    """

    output: str = ""
    """Directory to create. If empty, the name of the run followed by -export."""
    step: int = -1
    """Step of the checkpoint. -1 means the latest."""
    dtype: str = ""
    """Data type of the weights: fp64, fp32, bf16 or fp16. If empty, the type of the imported model,
    or of the checkpoint."""
    family: str = ""
    """Model family: llama, mistral, qwen2, qwen2_parscale, qwen3, olmo2, gemma2, phi3, mixtral,
    qwen3_moe, olmoe, gpt2 or huginn_raven. If empty, the family of the imported model, or the first
    that supports the model."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of a file, in bytes."""
    adapter: bool = False
    """Write only the adapters of a run, in PEFT format. False merges them into the weights."""


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """Create a mixture of experts, a ladder residual, or several streams from a dense model.

    SRC is the directory of a run, or a pretrained model as for `import`. With --experts each expert
    is a copy of the MLP of its layer, and the routers are new; the mixture initially computes the
    same logits. With --ladder-layers the last layers get a ladder residual and keep their weights.
    With --parscale-streams the prefixes of streams and their average are new. In both cases the
    held-out loss is printed next to that of the run.
    """

    experts: int = 0
    """Number of experts per layer."""
    ladder_layers: int = 0
    """Number of layers, the last ones, that get a ladder residual."""
    parscale_streams: int = 0
    """Number of streams of each sample (ParScale)."""
    output: str = ""
    """Directory of the run. If empty, runs/ followed by the name of the model and -moe, -ladder or
    -streams.
    """
    experts_per_token: int = 2
    """Number of experts per token."""
    shared_expert_mlp: int = 0
    """Hidden units of the MLP that become a shared expert. The other units become the experts."""
    moe_layer_interval: int = 1
    """Every n-th layer becomes a MoE layer. 1 means all layers."""
    seed: int = 0
    """Random seed of the new weights."""
    step: int = -1
    """Step of the checkpoint of a run. -1 means the latest."""


@dataclass(frozen=True, kw_only=True)
class ExtendContextOptions:
    """Create a run with a longer context from a run or a pretrained model, with the same weights.

    SRC is the directory of a run, or a pretrained model as for `import`. Only its rotary positions
    change, by YaRN or by a larger base. Train the result on long sequences with
    `ranvier train --train.init-from RUN --data.seq-len N`.
    """

    max_position: int = 0
    """New maximum position (model.max_seq), in tokens. It must be above the present one."""
    method: Literal["yarn", "theta"] = "yarn"
    """How rotary frequencies are reduced: yarn (low frequencies, by the ratio of the new to the
    original maximum position), or theta (all frequencies, by a larger model.rope_theta)."""
    rope_theta: float = 0.0
    """New base of the rotary frequencies for method theta. 0 means the smallest base that covers
    the new positions: theta · factor^(k/(k-2)), with k rotated elements per head."""
    original_max_position: int = 0
    """Sequence length that the model was trained with. 0 means its maximum position, or the
    original one of a model that was extended by YaRN before."""
    output: str = ""
    """Directory of the run. If empty, runs/ followed by the name of the model and the new maximum
    position."""
    step: int = -1
    """Step of the checkpoint of a run. -1 means the latest."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Rewrite a checkpoint, a few tensors at a time."""

    form: str = "checkpoint"
    """Output format. checkpoint: as saved by one process. weights: only the full weights, as
    safetensors with an index."""
    dtype: str = ""
    """Data type of the weights: fp64, fp32, bf16 or fp16. If empty, the type in the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(RunConfig):
    """Check what this machine has, what is missing and how to install it.

    It lists the algorithms of collectives that are available here, the state of the measurements of
    this machine, and what comm.algorithm=auto takes. With a run, or settings such as --plan.row 8,
    it also lists the algorithms of its axes, and the communicators that the ranks create on GPUs,
    with their device memory.
    """


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Benchmark this machine and write its cluster file, in less than two minutes.

    Measures matrix products, memory, attention, optimizer updates, and collectives in groups of
    each size, and compares the algorithms of collectives, of which runs use the fastest
    (comm.algorithm). Do not run anything else on the machine at the same time.
    """

    output: str = ""
    """TOML file to write. If empty, a file for this host and device in the user's cache, where plan
    and train find it."""
    nproc: int = 0
    """Number of local ranks to measure with. 0 means one per GPU, or 8 on a CPU."""


@dataclass(frozen=True, kw_only=True)
class BenchOptions:
    """Benchmark a server with the API of OpenAI: latencies, throughput and goodput of requests.

    Lengths are N, fixed:N, uniform:LOW:HIGH, gamma:MEAN:SHAPE or exponential:MEAN tokens. Ctrl-C
    ends the benchmark and reports what was measured.
    """

    requests: int = 100
    """Number of requests."""
    rate: float = 0.0
    """Requests per second, at random times. 0 sends all of them at once."""
    burstiness: float = 1.0
    """Shape of the gamma distribution of the times between requests. 1 is a Poisson process; with
    smaller values requests come in bursts."""
    concurrency: int = 0
    """Maximum number of requests at a time. 0 means no limit."""
    input_length: str = "512"
    """Length of the prompts in tokens."""
    output_length: str = "128"
    """Length of the answers in tokens."""
    dataset: str = ""
    """JSONL file of requests, used instead of random prompts: each line has prompt (a text or token
    ids) or messages, or input_length; and max_tokens, or output_length."""
    prefix_length: int = 0
    """Number of tokens at the beginning of each prompt that other prompts share, in addition to
    input_length."""
    num_prefixes: int = 1
    """Number of different prefixes."""
    prompts: Literal["words", "token_ids"] = "words"
    """Form of random prompts: common English words of one token each with most tokenizers, or token
    ids, which are exact but only accepted by the endpoint completions of some servers."""
    vocab: int = 1000
    """Token ids of prompts are below this number."""
    endpoint: Literal["completions", "chat"] = "completions"
    """Endpoint that is called: /v1/completions or /v1/chat/completions."""
    model: str = ""
    """Name of the model. If empty, the first one of /v1/models."""
    temperature: float = 0.0
    """Sampling temperature of the requests."""
    ignore_eos: bool = True
    """Whether to ask for answers of exactly the given length. Servers that do not know the
    parameter ignore_eos may refuse it."""
    warmup: int = 0
    """Number of requests before the measurement, one at a time."""
    seed: int = 0
    """Random seed of lengths, prompts and times."""
    goodput: tuple[str, ...] = ()
    """Limits in milliseconds, such as ttft=200 tpot=50 e2e=5000. Goodput is the number of requests
    per second that keep all of them."""
    timeout: float = 600.0
    """Seconds after which a request has failed."""
    api_key_file: str = ""
    """File with the API key."""
    output: str = ""
    """JSON file for the results. If empty, none is written."""
    html: str = ""
    """HTML file with a timeline of the requests. If empty, none is written."""


@dataclass(frozen=True, kw_only=True)
class ScalingLawsOptions:
    """Fit scaling laws to the held-out losses of runs, and prescribe shapes and tokens.

    Each path is the directory of a run, or a JSONL file with a loss per line: width, depth, tokens
    and loss and, optionally, run, parameters, flops_per_token, device_seconds_per_token and cooled.
    Losses along a run at the peak learning rate (hot) and after its cooldown are fitted separately.
    With --design, writes the settings of runs to train instead.
    """

    flops: float | None = None
    """Prescribe shape and tokens for this number of FLOPs, such as 1e21."""
    hours: float | None = None
    """Prescribe shape and tokens for this number of device hours."""
    cluster: str = ""
    """Cluster for --hours and --design: a built-in name (such as dgx-h100), or a TOML file from
    `ranvier measure`. If empty, --hours uses the times of the runs, and --design this machine."""
    resamples: int = setting(200, minimum=10, maximum=100_000)
    """Number of bootstrap resamples of the runs, for intervals that cover 90%."""
    seed: int = 0
    """Random seed of the starting points and of the bootstrap."""
    json: str = ""
    """JSON file to write all laws to. - prints it instead of the tables."""
    html: str = ""
    """HTML file to write a self-contained page with plots to."""
    rows: str = ""
    """JSONL file to write the collected losses to, to fit them again with others."""
    allow_data_mismatch: bool = False
    """Fit runs together although their data has different fingerprints."""
    design: int = 0
    """Number of runs to design. Writes one TOML file for each."""
    budget: float = 1e17
    """FLOPs of all designed runs together."""
    base: str = ""
    """TOML file with settings that all designed runs share, such as data and model.vocab."""
    output: str = "design"
    """Directory of the designed files."""
