"""Command-line options of the subcommands; those of `plan` are in its own module."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ranvier.config.run import RunConfig


@dataclass(frozen=True, kw_only=True)
class RunOptions(RunConfig):
    """What train and verify are given: a run, and how many local ranks to start."""

    nproc: int = 0
    """Local ranks to start; 0: as many as the plan needs, else one for each GPU, or one on a CPU
    with all its cores (train); one (verify)."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions(RunOptions):
    """What train is given."""

    dry_run: bool = False
    """Print every setting that was left open, with the value it gets on this machine and the
    reason, then stop. `ranvier dry-run` shows what a rank of that run holds and communicates."""


@dataclass(frozen=True, kw_only=True)
class ProfileOptions(RunConfig):
    """Where the time of a run's steps goes, kernel by kernel, on one rank.

    The run is put together anew and takes a few steps on its own data; its metrics and checkpoints
    are not touched. Settings of the run can be changed for it.
    """

    steps: int = 2
    """Steps that are profiled."""
    warmup_steps: int = 3
    """Steps taken before; the pace of the last is what the report tells."""
    top: int = 15
    """Kernels in the table."""
    output: str = ""
    """Directory of profile.txt, profile.json and trace.json.gz; empty: profile/ inside the run's,
    or NAME-profile/ next to NAME.toml."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(RunConfig):
    """A step of a run's pipeline, played without processes, with each policy.

    Writes timeline.svg, timeline.html and timeline-trace.json (for Perfetto).
    """

    times: str = ""
    """TOML table (forward, backward, weight: seconds of each virtual stage; link; jitter;
    [stragglers]) or RUN whose measured times are taken; empty: those of the given RUN, or times
    in proportion to the work of the layers."""
    jitter: float | None = None
    """How much times vary: the deviation of their logarithm."""
    link: float | None = None
    """Time from the end of a job until the next stage has its message."""
    straggler: tuple[str, ...] = ()
    """STAGE=FACTOR: stages that take longer."""
    seed: int = 0
    """Of the jitter."""
    policies: tuple[str, ...] = ()
    """Policies to compare with that of the plan; empty: all."""
    output: str = ""
    """Directory of the drawings; empty: the run's, or this one."""


@dataclass(frozen=True, kw_only=True)
class DryRunOptions(RunConfig):
    """The real code of one rank of many, without data, devices or other ranks.

    Its shards, what it says over each axis in a step (counted at torch's fake process group), and
    the most bytes that its tensors take at once.
    """

    world: int = 0
    """Ranks of the run; 0: as many as the plan needs."""
    rank: int = 0
    """The one that is played, from 0."""
    expert_imbalance: float = 1.0
    """Rows that the experts of this rank get, in means of all ranks of the expert axis (max / mean:
    the rank that is played is the busiest). 1: experts are balanced."""
    output: str = ""
    """File for all of it as JSON; empty: none."""


@dataclass(frozen=True, kw_only=True)
class EvalOptions(RunOptions):
    """Evaluate a model: lm-eval tasks, perplexity on a corpus, or code generation.

    One rank, if no degrees are given. Only the model, plan, data.seq_len and train.device, dtype,
    backend and comm_timeout_seconds of the settings of a run matter here.
    """

    tasks: str = ""
    """Tasks of lm-evaluation-harness, with commas between them; needs the extra `eval`."""
    include: str = ""
    """Directory with tasks of one's own (YAML)."""
    limit: int = 0
    """Examples of each task; 0: all."""
    fewshot: int = -1
    """Solved examples before each; -1: as the task says."""
    corpus: tuple[str, ...] = ()
    """Corpora whose perplexity is wanted, as in data.sources; windows have data.seq_len tokens."""
    stride: int = 0
    """Tokens by which windows move; 0: data.seq_len. Smaller: more context, more work."""
    held_out: bool = False
    """Only the documents that data.validation_fraction keeps from training."""
    code: str = ""
    """JSONL of programs to write (task, language, prompt, tests, baseline), which are then run."""
    samples_per_task: int = 1
    """Programs of each task."""
    max_new_tokens: int = 256
    """Most tokens of a program."""
    temperature: float = 0.8
    """Of programs; 0: always the likeliest token."""
    top_p: float = 0.95
    """Draw from the fewest tokens that together have this probability."""
    seed: int = 0
    """Of the draw, and of the examples before a task."""
    samples_file: str = ""
    """JSONL of programs that were run elsewhere (task, built, passed, seconds, baseline,
    processes, sample): only count."""
    pass_at_k: str = ""
    """Numbers of programs of which the best counts, with commas between them; empty: 1."""
    batch: int = 8
    """Sequences of a micro-batch."""
    max_length: int = 0
    """Most tokens the model looks at in tasks and programs; 0: model.max_seq."""
    step: int = -1
    """Checkpoint after this step; -1: the newest."""
    output: str = ""
    """File of the results; empty: eval-STEP.json inside the run's directory."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """Tokenize corpora once, into memory-mapped shards (Megatron pairs) with a fingerprint."""

    output: str = ""
    """Directory to make; empty: data/ and the name of the first file."""
    tokenizer: str = "standard"
    """standard: byte pairs learnt from Python's standard library; bytes; train: learn one from
    these files; or a tokenizer.json."""
    vocab: int = 4096
    """Tokens of a tokenizer that is trained."""
    text_field: str = "text"
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    format: Literal["auto", "text", "chat"] = "auto"
    """What records are: texts, or conversations. auto: as the first record looks."""
    chat_template: str = ""
    """File with the chat template, in Jinja; empty: that beside the tokenizer.json, else a simple
    one."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that are marked for the loss: the assistant's, or all."""


@dataclass(frozen=True, kw_only=True)
class GenerateOptions:
    """Text from a checkpoint of a run."""

    prompt: str = ""
    """What the text begins with."""
    chat: str = ""
    """In its place: a question, which the run answers by its chat template."""
    max_new_tokens: int = 100
    """Maximum number of tokens to generate."""
    temperature: float = 0.8
    """0: always the likeliest token; higher: more surprising."""
    top_k: int = 50
    """Draw from this many likeliest tokens; 0: from all."""
    seed: int = 0
    """Of the draw."""
    step: int = -1
    """Checkpoint after this step; -1: the newest."""
    device: str = "cpu"
    """cpu or cuda."""


@dataclass(frozen=True, kw_only=True)
class ImportOptions:
    """Make a run of a published model.

    SRC: a directory (or one file) of safetensors with config.json, or a name on the hub where there
    is a network. Pickled weights are refused; code that comes along is never run.
    """

    output: str = ""
    """Directory of the run; empty: runs/ and the name of the model."""


@dataclass(frozen=True, kw_only=True)
class ExportOptions:
    """Write the weights of a run as other engines read them: safetensors, config, tokenizer.

    RUN: the directory of a run, trained or imported.
    """

    output: str = ""
    """Directory to make; empty: the run's name with -export."""
    step: int = -1
    """Checkpoint after this step; -1: the newest."""
    dtype: str = ""
    """Of the weights: fp64, fp32, bf16 or fp16; empty: that of the model when it was imported, or
    of the checkpoint."""
    family: str = ""
    """llama, mistral, qwen2, qwen3, olmo2, gemma2, phi3, mixtral, qwen3_moe, olmoe or gpt2; empty:
    that of the model when it was imported, or the first that has such models."""
    max_shard_bytes: int = 5_000_000_000
    """Maximum size of a file, in bytes."""
    adapter: bool = False
    """Write only the adapters of a run, in PEFT's format; else they are merged into its weights."""


@dataclass(frozen=True, kw_only=True)
class UpcycleOptions:
    """Make a run of a mixture of experts from a dense model, which gives the same logits at first.

    SRC: the directory of a run, or a published model as for `import`. Every expert is a copy of the
    MLP of its layer, the router is new.
    """

    experts: int = 0
    """Experts of a layer."""
    output: str = ""
    """Directory of the run; empty: runs/ and the name of the model with -moe."""
    experts_per_token: int = 2
    """Experts that a token goes to."""
    shared_expert_mlp: int = 0
    """Hidden units of the MLP that become a shared expert; the others become the experts."""
    moe_layer_interval: int = 1
    """Of so many layers the last becomes a mixture: 1: all."""
    seed: int = 0
    """Of the routers."""
    step: int = -1
    """Checkpoint of a run after this step; -1: the newest."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """Write a checkpoint anew, a few tensors at a time."""

    form: str = "checkpoint"
    """checkpoint: as one process would have saved it; weights: only
    the weights, whole, as safetensors with an index."""
    dtype: str = ""
    """Type of weights: fp64, fp32, bf16 or fp16; empty: that of the checkpoint."""


@dataclass(frozen=True, kw_only=True)
class DoctorOptions(RunConfig):
    """What this machine has, what is missing and how to get it.

    With a run, or settings of one such as --plan.row 8: also the communicators that its ranks make
    on GPUs, and what these take of a device.
    """


@dataclass(frozen=True, kw_only=True)
class MeasureOptions:
    """Fill in the cluster file of this machine, in under a minute.

    Matrix products, memory, attention, updates, and collectives in groups of each size. Do nothing
    else on the machine meanwhile.
    """

    output: str = ""
    """TOML file to write; empty: one of this host and device in the user's cache, where plan and
    train look for it."""
    nproc: int = 0
    """Local ranks that measure; 0: one for each GPU, or 8 on a CPU."""
