"""Config sections: the sections of a run config."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ranvier.models.config import GATED_ACTIVATIONS, AdapterConfig, DecoderConfig
from ranvier.setting import setting

IMPORTED_SIZE = "imported"
"""The size of a model that was published by others: all its fields are given."""
LORA_TARGETS = ("heads", "kv_heads", "mlp", "q", "k", "v", "o", "gate", "up", "down")
"""Words of `lora.target_modules` for decoders."""
MEMORY_TRAITS = (
    "activation",
    "position_embedding",
    "dropout",
    "embed_scale",
    "norm_position",
    "qk_norm",
)
"""Settings of a decoder that affect what its blocks save."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model: what the section has for every kind of model."""

    kind: str
    """Name of its row in `config.kinds`."""
    size: str
    """One of its named sizes."""
    layers: int
    """Blocks."""
    embed: int
    """Width of the residual stream."""

    @property
    def num_parameters(self) -> int:
        """Parameters of all matrices and embeddings; vectors are too few to matter."""
        raise NotImplementedError

    @property
    def num_active_parameters(self) -> int:
        """Parameters that are active per token."""
        return self.num_parameters

    @property
    def dim_units(self) -> dict[str, int]:
        """Units of each named dim."""
        raise NotImplementedError

    @property
    def sequence_limit(self) -> int:
        """Largest `data.seq_len`."""
        return 2**31

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Words of `lora.target_modules`; empty: it has no adapters."""
        return ()

    @property
    def attention_heads(self) -> tuple[int, int, int] | None:
        """Query heads, kv heads and elements of a head; None without attention."""
        return None

    @property
    def memory_traits(self) -> dict[str, Any]:
        """Settings that affect what blocks save for backward, by name."""
        return {}

    @property
    def changeable_settings(self) -> tuple[str, ...]:
        """Settings that may change while a run is continued: no weight depends on them."""
        return ()

    def find_problems(self) -> list[str]:
        """Inconsistent settings, each with value, rule and remedy."""
        return []

    def describe_shape(self) -> str:
        """Its sizes as text."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.dim_units.items())
        return f"{self.layers} layers, {sizes}"


@dataclass(frozen=True, kw_only=True)
class DecoderModelConfig(DecoderConfig, ModelConfig):
    """The model: a named size, any field of which can be changed."""

    kind: str = "decoder"
    """Kind of the model, which decides about the settings of this section; it follows from size."""
    size: str = "tiny"
    """tiny, gpt2, llama3-1b, llama3-8b, llama3-70b, llama3-405b, qwen3-0.6b or qwen3-8b; of
    experts moe-tiny, mixtral-8x7b, qwen3-30b-a3b, deepseek-moe-16b or ted-6.7b-16e;
    imported: what `ranvier import` has found."""

    @property
    def num_parameters(self) -> int:
        """Parameters of all matrices and embeddings; vectors are too few to matter."""
        return self._count_parameters(self.experts)

    @property
    def num_active_parameters(self) -> int:
        """Parameters that are active per token: only the experts it is routed to."""
        return self._count_parameters(self.experts_per_token)

    def _count_parameters(self, experts: int) -> int:
        """Parameters with `experts` experts in each MoE layer."""
        # Query and output projections have `heads`, key and value projections `kv_heads`.
        attention = 2 * self.embed * (self.heads + self.kv_heads) * self.head_dim
        hidden = (3 if self.activation in GATED_ACTIVATIONS else 2) * self.embed
        mixed = sum(map(self.has_experts, range(self.layers)))
        mixture = hidden * (experts * self.expert_width + self.shared_expert_mlp)
        # The router has an output for every expert, however many are active.
        mixture += self.embed * self.experts
        words = self.vocab * self.embed * (1 if self.tie_embeddings else 2)
        if self.position_embedding == "learned":
            places = self.max_seq * self.embed
        else:
            places = 0
        dense = (self.layers - mixed) * hidden * self.mlp
        return self.layers * attention + dense + mixed * mixture + words + places

    @property
    def sequence_limit(self) -> int:
        """Largest `data.seq_len`."""
        return self.max_seq

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Words of `lora.target_modules`."""
        gated = self.activation in GATED_ACTIVATIONS
        return tuple(word for word in LORA_TARGETS if gated or word != "gate")

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Query heads, kv heads and elements of a head."""
        return self.heads, self.kv_heads, self.head_dim

    @property
    def memory_traits(self) -> dict[str, Any]:
        """Settings that affect what blocks save for backward, by name."""
        return {name: getattr(self, name) for name in MEMORY_TRAITS}

    def describe_shape(self) -> str:
        """Its sizes as text."""
        return f"{super().describe_shape()}, tied {self.tie_embeddings}"

    @property
    def changeable_settings(self) -> tuple[str, ...]:
        """Rotary positions have no weights, so with them max_seq may change."""
        return ("max_seq",) if self.position_embedding == "rope" else ()


@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """Adapters: small trained layers beside frozen ones (LoRA, DoRA)."""

    init_from: str = ""
    """Directory of an adapter in PEFT's format to begin with: all settings but this are its own.
    Empty: A is drawn, B zero."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What the model reads."""

    sources: tuple[str, ...] = ("stdlib",)
    """Files (.txt, .md, .py, .rst, .txt.gz, .jsonl, .jsonl.gz, .json, .json.gz, .parquet, .arrow),
    Megatron pairs (.bin/.idx), directories of these, what `ranvier data prepare` or
    `Dataset.save_to_disk` made; stdlib: the texts of the running Python's own library."""
    mixture_weights: tuple[float, ...] = ()
    """Fraction of the samples that comes from each source; empty: by their number of tokens."""
    tokenizer: str = "standard"
    """standard: byte pairs learnt from the standard library; bytes; or a tokenizer.json. Corpora
    that are tokenized already keep theirs."""
    text_field: str = setting("text", free_text=True)
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    format: Literal["auto", "text", "chat"] = "auto"
    """What records are: texts, or conversations (messages, conversations, or a prompt and a
    completion). auto: as the first record looks."""
    chat_template: str = ""
    """File with the chat template, in Jinja; empty: that beside the tokenizer.json, else a simple
    one. Corpora that are tokenized already keep theirs."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that count in the loss: the assistant's messages and the end of its
    turns, or all."""
    truncate: Literal["right", "left", "drop", "split"] = "right"
    """What is done with a conversation longer than seq_len: its end (right) or its beginning (left)
    is cut off, it is left out, or it is split into several samples."""
    seq_len: int = setting(96, minimum=1, maximum=2**31, unit="tokens")
    """Tokens per sample, at most model.max_seq."""
    document_mask: bool = True
    """Attention and positions stay inside a document where a sample holds several."""
    validation_fraction: float = setting(0.02, fraction=True, usual=0.02)
    """Share of the documents, chosen by their hash, that is kept from training for evaluation."""
    max_bytes: int = setting(4_000_000, minimum=1, unit="bytes")
    """How much of the corpus stdlib is read."""
    verify_checksums: bool = True
    """Read tokenized corpora once at the start and compare digests (about 1 s a gigabyte)."""


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW and its schedule."""

    lr: float | None = setting(None, minimum=0.0, usual=3e-4)
    """Learning rate after warm-up. Not given: 0.576 / embed, which is 3e-3 for tiny and 2.8e-4 for
    llama3-1b, times the share min(1, 6 · sqrt(tokens of a step) / embed); 2e-5 for a model that
    was trained before, 2e-4 for adapters beside one."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """After warm-up: a cosine down, or stable and then linearly down (warm-up, stable, decay)."""
    warmup_steps: int = setting(-1, minimum=-1, unit="steps")
    """Steps in which the learning rate rises to lr. -1: a tenth of all, but 10 at least."""
    decay_ratio: float = setting(0.2, fraction=True, usual=0.2)
    """Fraction of the steps after warm-up in which wsd decays."""
    min_lr_ratio: float = setting(0.1, fraction=True, usual=0.1)
    """Learning rate at the end, as a fraction of lr."""
    beta1: float = setting(0.9, fraction=True, usual=0.9)
    """Decay of the first moment."""
    beta2: float = setting(0.95, fraction=True, usual=0.95)
    """Decay of the second moment."""
    eps: float = setting(1e-8, minimum=1e-30)
    """Added to the root of the second moment."""
    state_dtype: Literal["master", "bf16", "int8"] = "master"
    """Type of both moments of matrices. master: that of the master weights (fp32, or fp64 in runs
    in fp64); bf16 (half of fp32) or int8 (a quarter; a scale for each 256 numbers), both rounded up
    or down at random so that small changes count."""
    weight_decay: float = setting(0.1, minimum=0.0)
    """Weight decay of matrices: parameters with at least two named dims, excluding embeddings."""
    max_grad_norm: float = setting(1.0, minimum=0.0)
    """Gradients are clipped to this norm; 0: no clipping."""
    matrix_lr_scale: float = setting(1.0, minimum=0.0)
    """Factor of the learning rate of matrices."""
    embedding_lr_scale: float = setting(1.0, minimum=0.0)
    """Factor of the learning rate of embeddings (and of a head tied to one)."""
    vector_lr_scale: float = setting(1.0, minimum=0.0)
    """Factor of the learning rate of norms and biases."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What lies where: on the device, on the host or in a file; and how much of it may be used."""

    auto: bool = False
    """Choose plan.recompute, plan.micro_batch, and which optimizer states, parameters and
    activations are offloaded to the host, so that a step fits into the device (or into
    device_limit_gib) at the best predicted speed."""
    device_limit_gib: float = setting(0.0, minimum=0.0, usual=0.0, unit="GiB")
    """Device memory that a rank may use, in GiB. 0: what is free, less a reserve; on a CPU its
    share of the machine's memory."""
    host_limit_gib: float = setting(0.0, minimum=0.0, unit="GiB")
    """Host memory that a rank may use for offloaded tensors, in GiB. 0: its share of what is free,
    less a reserve."""
    optimizer_states: Literal["device", "host", "disk", "split"] = "device"
    """Where master weights and moments are kept: device; host: (pinned) host memory; disk: a
    memory-mapped file in offload_dir; split: as many as fit (or optimizer_states_on_device_gib) on
    the device, the rest on the host. All but the first are streamed through a few buffers during
    the backward pass and the next forward pass."""
    optimizer_states_on_device_gib: float = setting(0.0, minimum=0.0, unit="GiB")
    """Optimizer states that stay on the device with optimizer_states = split, in GiB. 0: as many as
    fit."""
    offload_dir: str = ""
    """Directory for optimizer_states = disk, on a fast disk."""
    optimizer_step_on: Literal["auto", "device", "cpu"] = "auto"
    """Device that runs the optimizer step of offloaded states. auto: the faster one, as
    measured."""
    offload_tile: int = setting(2**24, minimum=4096, maximum=2**30, unit="elements")
    """Elements of optimizer states that are streamed and updated at once."""
    parameters: Literal["device", "host"] = "device"
    """host: the parameters and gradients of blocks are offloaded, too, and fetched when a block
    runs."""
    activation_offload_fraction: float = setting(0.0, minimum=-1.0, maximum=1.0)
    """Fraction of the bytes saved for the backward pass that is offloaded to the host, copied while
    other blocks compute; the last block's stay. -1: the smallest that fits into
    device_limit_gib."""
    recompute_collectives: Literal["rerun", "save", "auto"] = "rerun"
    """Collectives inside of recomputed blocks (plan.recompute): rerun them; save their results; or
    auto: with a device_limit_gib save those that take longest for their bytes as far as they fit,
    else all."""


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Pruned training: matrices with fixed zeros, whose states hold the other numbers only.

    Each expert of a mixture has matrices of its own. Embeddings, heads and vectors are not pruned.
    A run that begins with given weights has masks of these. Exported weights are zero where they
    are pruned.
    """

    sparsity: float = setting(0.0, fraction=True, usual=0.8)
    """Share of each matrix that is zero. 0 with no pattern and no masks: nothing is pruned."""
    n_m_pattern: str = ""
    """N:M, such as 2:4: of each M numbers in a row N stay. Empty: any."""
    mask_file: str = ""
    """File of safetensors with a mask (nonzero: stays) by the name of each weight that is pruned.
    Empty: the smallest magnitudes go."""
    update_interval: int = setting(0, minimum=0, unit="steps")
    """Steps between updates of the masks until final_step; 0: the masks are fixed."""
    final_step: int = setting(0, minimum=0, unit="steps")
    """Step at which sparsity s is reached, growing as s (1 - (1 - t / final_step)³); pruned weights
    stay pruned. 0: all is pruned at the start."""

    @property
    def is_enabled(self) -> bool:
        """Whether anything is pruned."""
        return self.sparsity > 0.0 or bool(self.n_m_pattern or self.mask_file)

    @property
    def initial_density(self) -> float:
        """Lower bound on the fraction of a matrix that has states when a run begins."""
        # The density of a mask file is unknown before it is read; a growing sparsity starts dense.
        if self.mask_file:
            return 0.0
        if self.update_interval or not self.is_enabled:
            return 1.0
        if self.pattern_n_m:
            return self.pattern_n_m[0] / self.pattern_n_m[1]
        return 1.0 - self.sparsity

    @property
    def pattern_n_m(self) -> tuple[int, int] | None:
        """N and M of the pattern; None: there is none, or it is not valid."""
        words = self.n_m_pattern.split(":")
        # isascii: isdigit also accepts digits of other scripts.
        if len(words) != 2 or not all(word.isascii() and word.isdigit() for word in words):
            return None
        stay, of = map(int, words)
        if 0 < stay < of:
            return (stay, of)
        return None


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long, where and with which numbers."""

    steps: int = setting(250, minimum=1, unit="steps")
    """Optimizer steps."""
    seed: int = setting(0, minimum=0, maximum=2**63 - 1)
    """Of initial weights, data order and dropout."""
    output_dir: str = ""
    """Directory of the run; empty: a new one under runs/. One that holds a run is continued."""
    init_from: str = ""
    """What a new run takes its weights from, and the settings of its model: another run, one of
    its checkpoints, or a published model (a directory of safetensors)."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda (also AMD's ROCm) if there is one."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Of weights and activations. auto: fp32 on cpu, on cuda bf16 or, on devices without it, fp16
    with a dynamic loss scale."""
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Multiply in 8 bits (e4m3; tensorwise gradients e5m2), scaled by the largest number of each
    tensor, or of each of its rows, as it is now; weights stay as they are. Needs bf16 and a device
    that has it (H100 and later)."""
    float8_layers: tuple[str, ...] = ("qkv", "o", "enter", "up", "down")
    """Linear layers that do so: those with one of these words in their name (also: head)."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on cuda with a device for each rank, else gloo."""
    eval_interval: int = setting(50, minimum=0, unit="steps")
    """Steps between evaluations of the held-out loss (also at both ends); 0: none."""
    eval_samples: int = setting(64, minimum=1, unit="samples")
    """Held-out samples of an evaluation."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Where metrics go besides metrics.jsonl; needs the extra `log`."""
    sample_prompt: str = setting("def ", free_text=True)
    """What the sample of text at the end begins with; empty: no sample."""
    trace_comm: bool = False
    """Record the communication of the last step: a table, and trace-rank*.json for Perfetto."""
    check_collectives: bool = False
    """Compare every collective and every input of the model between ranks before it runs (slow)."""
    comm_timeout_seconds: float = setting(600.0, minimum=1.0, maximum=10000000.0, unit="seconds")
    """Seconds after which a collective that waits for a lost rank is an error."""
    deterministic: bool = False
    """On cuda: only algorithms that give the same bits each time, so that a resumed run repeats an
    uninterrupted one exactly (slower). On a CPU that is so anyway."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is kept to go on from."""

    interval: int = setting(0, minimum=-1, unit="steps")
    """Steps between checkpoints; 0: only at the end and when stopped; -1: never."""
    keep_latest: int = setting(2, minimum=0, unit="checkpoints")
    """Newest checkpoints that are kept; 0: all."""
    keep_interval: int = setting(0, minimum=0, unit="steps")
    """Checkpoints of steps that are multiples of this stay for good; 0: none do."""
    keep_best: bool = False
    """The checkpoint with the lowest held-out loss stays, too."""
    resume: str = "auto"
    """auto: go on from the newest good checkpoint in the directory of the run; never: begin anew
    in a directory without one; or the path of a checkpoint or of a run to go on from."""
    async_save: bool = True
    """Copy while the next step computes and write behind the run; False: the run waits."""
    allow_data_mismatch: bool = False
    """Go on from a checkpoint although the data has another fingerprint."""
    allow_config_mismatch: bool = False
    """Go on from a checkpoint although settings that it depends on differ."""
    strict: bool = True
    """Every tensor of a checkpoint must fit the model by name and shape. False: load those that do;
    the others keep their initial values."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """What is done when ranks end or hang."""

    max_restarts: int = setting(3, minimum=0)
    """Times in a row that killed ranks are started again without reaching a new step before the
    run goes on with a smaller grid or gives up (exit code 93); 0: they are not started again."""
    restart_on_error: bool = False
    """Start again also after a rank's own fault (an internal error, SIGSEGV, SIGABRT, ...)."""
    fallback_grids: tuple[str, ...] = ()
    """Grids to go on with where ranks are lost for good, such as data=2,row=2: the largest that
    fits is taken; the batch of a step stays what it is."""
    watchdog_seconds: float = setting(0.0, minimum=-1.0, unit="seconds")
    """Seconds a rank may take without a sign of life before all are ended with their stacks shown
    (exit code 72); at the start 600 at least. 0: twice the slowest of the last 100 steps and 30 s
    more, 420 s for a checkpoint, 600 s for an evaluation and at the start; -1: for ever."""
    share_gpu: bool = False
    """Let several ranks share a GPU over NCCL, as a test bed for grids of more ranks than there are
    GPUs: all that is computed is right, and nothing is fast. Without it such ranks talk over
    Gloo."""
    nnodes: int = setting(1, minimum=1, maximum=10**5, unit="nodes")
    """Nodes of the run. On each, one ranvier train starts `nproc` ranks, and all restart together;
    under srun with one task a node and --nproc it is known."""
    node_rank: int = setting(0, minimum=0)
    """The number of this node, from 0; under srun it is known."""
    rdzv_endpoint: str = ""
    """host:port where node 0 listens for the others; under srun it is known."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """What is done about numbers that are wrong."""

    max_skipped_steps: int = setting(10, minimum=0, unit="steps")
    """Maximum number of steps with a non-finite loss or gradient to skip before the run fails (exit
    code 74). A skipped step changes neither weights nor optimizer states. With on_spike = skip also
    the maximum number of consecutive spikes to skip."""
    on_spike: Literal["off", "warn", "skip", "rewind"] = "warn"
    """What to do about a loss spike: off; warn; skip: leave its update out; rewind: reload the
    latest checkpoint and continue after the offending samples."""
    spike_threshold: float = setting(10.0, minimum=1.0, unit="deviations")
    """How far a spike lies above the median of the window, in robust deviations (1.4826 times the
    median distance from it)."""
    spike_window: int = setting(128, minimum=8, unit="steps")
    """Losses that a spike is compared with."""
    max_rewinds: int = setting(3, minimum=0)
    """Times that a run may go back before it stops (exit code 74)."""
    replay_interval: int = setting(0, minimum=0, unit="steps")
    """Steps between steps that are computed twice before their update, loss and gradients compared
    bit by bit (exit code 74 if they differ); on cuda with train.deterministic. 0: none."""
    replica_check_interval: int = setting(100, minimum=0, unit="steps")
    """Steps between comparisons of all weights that several ranks hold; also before a checkpoint.
    0: none."""


def suggest_nearest(key: str, known: Iterable[str]) -> str:
    """A suggestion of the key that was meant, as a sentence; empty if none is close."""
    close = difflib.get_close_matches(key, list(known), 1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return ""
