"""Sections of a run config, one dataclass each."""

from __future__ import annotations

import abc
import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from ranvier.models.config import GATED_ACTIVATIONS, AdapterConfig, DecoderConfig
from ranvier.setting import setting

IMPORTED_SIZE = "imported"
"""Size of a model that was imported. All its fields are set explicitly."""
LORA_TARGETS = ("heads", "kv_heads", "mlp", "q", "k", "v", "o", "gate", "up", "down")
"""Accepted values of `lora.target_modules` for decoders."""
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
class ModelConfig(abc.ABC):
    """Settings that every kind of model has."""

    kind: str
    """Name of the kind in `config.kinds`."""
    size: str
    """One of the named sizes of this kind."""
    layers: int
    """Number of blocks."""
    embed: int
    """Width of the residual stream."""

    @property
    @abc.abstractmethod
    def num_parameters(self) -> int:
        """Number of parameters in matrices and embeddings. Vectors are too small to matter."""

    @property
    def num_active_parameters(self) -> int:
        """Parameters that are active per token."""
        return self.num_parameters

    @property
    @abc.abstractmethod
    def dim_units(self) -> dict[str, int]:
        """Number of units of each named dim."""

    @property
    def sequence_limit(self) -> int:
        """Largest `data.seq_len`."""
        return 2**31

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Accepted values of `lora.target_modules`; empty if the model does not support
        adapters."""
        return ()

    @property
    def attention_heads(self) -> tuple[int, int, int] | None:
        """Query heads, key/value heads and head size; None without attention."""
        return None

    @property
    def streams(self) -> int:
        """Samples inside the model for each sample of a batch."""
        return 1

    @property
    def memory_traits(self) -> dict[str, Any]:
        """Settings that affect what blocks save for backward, by name."""
        return {}

    @property
    def changeable_settings(self) -> tuple[str, ...]:
        """Settings that may change when a run is resumed because no weight depends on them."""
        return ()

    def find_problems(self) -> list[str]:
        """Returns inconsistent settings, each with value, rule and remedy."""
        return []

    def describe_shape(self) -> str:
        """Returns the sizes of the model as text."""
        sizes = ", ".join(f"{name} {size}" for name, size in self.dim_units.items())
        return f"{self.layers} layers, {sizes}"


@dataclass(frozen=True, kw_only=True)
class DecoderModelConfig(DecoderConfig, ModelConfig):
    """Architecture of the model: a named size, any field of which can be overridden."""

    kind: str = "decoder"
    """Kind of model, which determines the other settings of this section. Derived from size."""
    size: str = "tiny"
    """Named model size, such as tiny, gpt2, llama3-1b or mixtral-8x7b. Dense models are tiny, gpt2,
    llama3-1b, llama3-8b, llama3-70b, llama3-405b, qwen3-0.6b and qwen3-8b. Mixtures of experts are
    moe-tiny, mixtral-8x7b, qwen3-30b-a3b, deepseek-moe-16b and ted-6.7b-16e. Models with recurrent
    depth are recurrent-tiny, recurrent-0.5b and huginn-3.5b. gemstone-WxD is the model of the
    Gemstones suite with the width W, a multiple of 128, and D layers. `imported` is set by `ranvier
    import`."""

    @property
    def num_parameters(self) -> int:
        """Number of parameters in matrices and embeddings. Vectors are too small to matter."""
        return self._count_parameters(self.experts)

    @property
    def num_active_parameters(self) -> int:
        """Number of parameters that are active per token: only the experts it is routed to
        count."""
        return self._count_parameters(self.experts_per_token)

    def _count_parameters(self, experts: int) -> int:
        """Returns the number of parameters with `experts` experts in each MoE layer."""
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
        # A recurrent core reads its state and the prelude, through one matrix each.
        adapters = 2 * self.embed**2 if self.is_recurrent else 0
        streams = 0
        if self.streams > 1:
            # Keys and values of each layer, and the two matrices of the average.
            prefix = self.kv_heads * self.parscale_prefix_tokens * self.head_dim
            streams = self.streams * (2 * self.layers * prefix + self.embed * (self.embed + 1))
        outside = words + places + adapters + streams
        return self.layers * attention + dense + mixed * mixture + outside

    @property
    def sequence_limit(self) -> int:
        """Largest `data.seq_len`."""
        return self.max_seq

    @property
    def adapter_targets(self) -> tuple[str, ...]:
        """Accepted values of `lora.target_modules`."""
        gated = self.activation in GATED_ACTIVATIONS
        return tuple(word for word in LORA_TARGETS if gated or word != "gate")

    @property
    def attention_heads(self) -> tuple[int, int, int]:
        """Query heads, key/value heads and head size."""
        return self.heads, self.kv_heads, self.head_dim

    @property
    def memory_traits(self) -> dict[str, Any]:
        """Settings that affect what blocks save for backward, by name."""
        return {name: getattr(self, name) for name in MEMORY_TRAITS}

    def describe_shape(self) -> str:
        """Returns the sizes of the model as text."""
        return f"{super().describe_shape()}, tied {self.tie_embeddings}"

    @property
    def changeable_settings(self) -> tuple[str, ...]:
        """`max_seq` may change with rotary positions, which have no weights."""
        return ("max_seq",) if self.position_embedding == "rope" else ()


@dataclass(frozen=True, kw_only=True)
class LoraConfig(AdapterConfig):
    """Adapters (LoRA, DoRA): small trainable layers next to frozen ones."""

    init_from: str = ""
    """Directory of an adapter in PEFT format to start from. All other settings of this section are
    then read from the adapter. If empty, A is initialized at random and B with zeros."""


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Training data, tokenizer and samples."""

    sources: tuple[str, ...] = ("stdlib",)
    """Training corpora: files, directories of files, or stdlib. File formats are .txt, .md, .py,
    .rst, .txt.gz, .jsonl, .jsonl.gz, .json, .json.gz, .parquet, .arrow and Megatron pairs
    (.bin/.idx). The output of `ranvier data prepare` or `Dataset.save_to_disk` also works.
    stdlib is the text of Python's standard library."""
    mixture_weights: tuple[float, ...] = ()
    """Fraction of the samples from each source. If empty, it is proportional to their number of
    tokens."""
    tokenizer: str = "standard"
    """Tokenizer: standard (byte-pair encoding trained on Python's standard library), bytes, or the
    path of a tokenizer.json. Corpora that are already tokenized keep their own."""
    text_field: str = setting("text", free_text=True)
    """Key of a .jsonl record, or column of a .parquet or .arrow file, that holds the text."""
    format: Literal["auto", "text", "chat"] = "auto"
    """Format of the records: text, or chat (messages, conversations, or a prompt and a completion).
    auto detects it from the first record."""
    chat_template: str = ""
    """File with the chat template, in Jinja. If empty, the template next to tokenizer.json is used,
    or a simple one. Corpora that are already tokenized keep their own."""
    loss_on: Literal["assistant", "all"] = "assistant"
    """Tokens of conversations that count in the loss: the assistant's messages with their
    end-of-turn tokens, or all tokens."""
    truncate: Literal["right", "left", "drop", "split"] = "right"
    """How to handle a conversation longer than seq_len: cut off its end (right) or its beginning
    (left), drop it, or split it into several samples."""
    seq_len: int = setting(96, minimum=1, maximum=2**31, unit="tokens")
    """Tokens per sample, at most model.max_seq."""
    document_mask: bool = True
    """Restrict attention and positions to one document in samples that contain several."""
    balance: Literal["auto", "cost", "none"] = "auto"
    """How the samples of a step are assigned to ranks and micro-batches: by cost, so that ranks
    wait less for samples with long documents, or in their order (none). The samples of a step are
    the same. auto means cost with document_mask; a resumed run keeps what it had."""
    packing: Literal["auto", "balanced", "full"] = "auto"
    """How conversations are packed into samples: with similar attention work in each, so that ranks
    wait less for each other (balanced), or as full as possible (full). balanced needs at most 1%
    more samples, and neither cuts a conversation. auto means balanced for new runs; a resumed run
    keeps what it had."""
    validation_fraction: float = setting(0.02, fraction=True, usual=0.02)
    """Fraction of the documents, selected by hash, that is held out of training for evaluation."""
    goldfish_k: int = setting(0, minimum=0, maximum=2**31)
    """Goldfish loss: one of goldfish_k targets is not learned, so that documents that are read
    several times are not memorized. At least 2; 0 disables it. Held-out samples keep all
    targets."""
    goldfish_context_width: int = setting(13, minimum=1, maximum=2**16, unit="tokens")
    """Number of tokens that decide with goldfish_strategy hash or hash-table whether a target is
    dropped. Targets with fewer tokens of their document before them in the sample are kept."""
    goldfish_strategy: Literal["hash", "hash-table", "static", "random"] = "hash"
    """Which targets are dropped. hash: those with a small hash of the tokens before them, so that a
    passage has the same mask wherever it is. hash-table: as in the published code, by a product
    of the last tokens, including the target. static: every goldfish_k-th of a document. random:
    others each time, which does not prevent memorization."""
    canaries: str = ""
    """JSONL file of documents whose memorization is measured: text, times (how often the run reads
    it) and bucket (its group in results). Each replaces the beginning of that many samples, at
    random."""
    canary_samples: int = setting(0, minimum=0, unit="samples")
    """Number of first samples of the run in which canaries are placed. 0 means train.steps ·
    plan.global_batch; a resumed run keeps what it had."""
    max_bytes: int = setting(4_000_000, minimum=1, unit="bytes")
    """Maximum number of bytes to read from stdlib."""
    verify_checksums: bool = True
    """Verify the checksums of tokenized corpora at the start (about 1 s per GB)."""


OptimizerName = Literal["adamw", "muon", "jorge", "sgd"]


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The optimizer and its learning rate schedule."""

    name: OptimizerName = "adamw"
    """Update rule. adamw and sgd (with momentum) update all parameters. muon and jorge update
    hidden matrices, i.e. matrices of blocks except routers and adapters, and AdamW updates the
    rest: embeddings, head, norms, biases. muon orthogonalizes the momentum of each matrix. jorge
    preconditions gradients as Shampoo does."""
    lr: float | None = setting(None, minimum=0.0, usual=3e-4)
    """Peak learning rate, reached after warm-up. The default is 2e-5 for a pretrained model and
    2e-4 for its adapters. Otherwise it is 0.576 / embed · min(1, 6 · sqrt(tokens per step) /
    embed), where 0.576 / embed is 3e-3 for tiny and 2.8e-4 for llama3-1b. sgd and jorge, and muon
    with muon_adjust_lr = original, have other scales: their default is 0.1 and 0.02."""
    lr_rule: Literal["none", "gemstone"] = "none"
    """How the learning rate depends on the shape of the model. none: lr and adamw_lr are used as
    they are. gemstone: both are lr_eff, and lr_eff / (model.embed · sqrt(model.layers)) is used,
    so that one value suits models of other widths and depths. The default lr_eff of AdamW, and of
    muon with match_rms_adamw, is 5; other optimizers and pretrained models need lr."""
    adamw_lr: float | None = setting(None, minimum=0.0)
    """Peak learning rate of the parameters that muon or jorge leave to AdamW. The default is lr for
    muon with muon_adjust_lr = match_rms_adamw, and otherwise the default rate of AdamW."""
    schedule: Literal["cosine", "wsd"] = "cosine"
    """Schedule after warm-up: cosine decay, or wsd (constant, then linear decay)."""
    warmup_steps: int = setting(-1, minimum=-1, unit="steps")
    """Steps in which the learning rate rises to lr. -1 means 10% of all steps, at least 10."""
    decay_ratio: float = setting(0.2, fraction=True, usual=0.2)
    """Fraction of the steps after warm-up in which wsd decays the learning rate."""
    min_lr_ratio: float = setting(0.1, fraction=True, usual=0.1)
    """Final learning rate as a fraction of lr."""
    beta1: float = setting(0.9, fraction=True, usual=0.9)
    """Decay rate of the first moment of AdamW."""
    beta2: float = setting(0.95, fraction=True, usual=0.95)
    """Decay rate of the second moment of AdamW."""
    eps: float = setting(1e-8, minimum=1e-30)
    """Term added to the square root of the second moment of AdamW."""
    momentum: float | None = setting(None, fraction=True, usual=0.9)
    """Decay rate of the momentum of muon (default 0.95), jorge and sgd (0.9)."""
    muon_nesterov: bool = True
    """Whether muon orthogonalizes the Nesterov momentum."""
    muon_adjust_lr: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of the learning rate of a matrix with muon. match_rms_adamw: 0.2 sqrt(max(rows,
    cols)), with which updates are as large as those of AdamW, so that its learning rate and weight
    decay carry over. original: sqrt(max(1, rows / cols))."""
    muon_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """Coefficients a, b, c of a step X ← aX + (bA + cA²)X, A = XXᵀ, of the Newton-Schulz iteration
    of muon."""
    muon_steps: int = setting(5, minimum=1)
    """Steps of the iteration."""
    muon_dtype: Literal["auto", "bf16", "fp32", "master"] = "auto"
    """Data type of the iteration, in which updates also travel between ranks. auto: bf16 on CUDA,
    and the type of the master weights on a CPU."""
    jorge_variant: Literal["symmetric", "plain"] = "symmetric"
    """Form of the preconditioner of jorge. symmetric: it is kept symmetric, which is more accurate.
    plain: the published form."""
    max_preconditioner_dim: int = setting(1024, minimum=2)
    """Side of the tiles of a matrix that jorge preconditions separately, a power of two. Larger
    tiles are more accurate and need more memory and time."""
    precondition_interval: int = setting(1, minimum=1, unit="steps")
    """Steps from one update of the preconditioners of jorge to the next."""
    preconditioner_eps: float = setting(1e-6, minimum=1e-30)
    """Preconditioners of jorge begin with eps^(-1/4) times the identity."""
    grafting: bool = True
    """Whether an update of jorge has the norm of the update of SGD, whose learning rate then
    carries over."""
    state_dtype: Literal["master", "bf16", "int8"] = "master"
    """Data type of the moments of matrices. master: the type of the master weights (fp32, or fp64
    in fp64 runs). bf16 takes half the memory of fp32. int8 takes a quarter, with one scale per 256
    values; it is for AdamW only. Both are rounded stochastically so that small changes are not
    lost."""
    weight_decay: float | None = setting(None, minimum=0.0)
    """Weight decay of matrices: parameters with at least two named dims, excluding embeddings. The
    default is 0.1 for adamw and muon, and 1e-4 for sgd and jorge. It is decoupled from the gradient
    except with sgd. jorge divides it by 1 - momentum, so that the value of a run with sgd carries
    over."""
    max_grad_norm: float = setting(1.0, minimum=0.0)
    """Maximum gradient norm; larger gradients are clipped. 0 disables clipping."""
    matrix_lr_scale: float = setting(1.0, minimum=0.0)
    """Multiplier of the learning rate of matrices, with any optimizer."""
    embedding_lr_scale: float = setting(1.0, minimum=0.0)
    """Multiplier of the learning rate of embeddings, including a tied output head."""
    vector_lr_scale: float = setting(1.0, minimum=0.0)
    """Multiplier of the learning rate of norms and biases."""

    @property
    def needs_whole_matrices(self) -> bool:
        """Whether hidden matrices have an update rule that needs them whole."""
        return self.name in ("muon", "jorge")


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """Memory limits, and offloading from the device to the host or to disk."""

    auto: bool = False
    """Choose plan.recompute, plan.micro_batch and what is offloaded to the host (optimizer states,
    parameters, activations), so that a step fits into device memory (or into device_limit_gib) at
    the best predicted speed."""
    device_limit_gib: float = setting(0.0, minimum=0.0, usual=0.0, unit="GiB")
    """Device memory that a rank may use, in GiB. 0 means the free memory minus a reserve; on a CPU,
    an equal share of the machine's memory."""
    host_limit_gib: float = setting(0.0, minimum=0.0, unit="GiB")
    """Host memory that a rank may use for offloaded tensors, in GiB. 0 means an equal share of the
    free memory minus a reserve."""
    optimizer_states: Literal["device", "host", "disk", "split"] = "device"
    """Where to store master weights and Adam moments. device: in device memory. host: in (pinned)
    host memory. disk: in a memory-mapped file in offload_dir. split: as much as fits (or
    optimizer_states_on_device_gib) on the device, the rest on the host. Offloaded states are
    streamed through a few buffers during the backward pass and the next forward pass."""
    optimizer_states_on_device_gib: float = setting(0.0, minimum=0.0, unit="GiB")
    """Optimizer states that stay on the device with optimizer_states = split, in GiB. 0 means as
    much as fits."""
    offload_dir: str = ""
    """Directory for optimizer_states = disk. Use a fast disk."""
    optimizer_step_on: Literal["auto", "device", "cpu"] = "auto"
    """Device that runs the optimizer step of offloaded states. auto measures which one is
    faster."""
    offload_tile: int = setting(2**24, minimum=4096, maximum=2**30, unit="elements")
    """Number of optimizer state elements that are streamed and updated at a time."""
    parameters: Literal["device", "host"] = "device"
    """Where to store the parameters and gradients of blocks. With host, they are fetched when a
    block runs."""
    activation_offload_fraction: float = setting(0.0, minimum=-1.0, maximum=1.0)
    """Fraction of the activation bytes that is offloaded to the host. The copies overlap with the
    compute of other blocks; activations of the last block stay on the device. -1 means the smallest
    fraction that fits into device_limit_gib."""
    recompute_collectives: Literal["rerun", "save", "auto"] = "rerun"
    """Collectives inside recomputed blocks (see plan.recompute). rerun: run them again. save: save
    their results. auto: save all of them, or with device_limit_gib as many as fit, those with the
    most time per byte first."""


@dataclass(frozen=True, kw_only=True)
class PruneConfig:
    """Sparse training, in which pruned weights are zero and have no optimizer states.

    Each expert is pruned separately. Embeddings, output heads and vectors are not pruned. In a run
    that starts from pretrained weights, the masks are computed from those weights. Exported weights
    are zero where they are pruned.
    """

    sparsity: float = setting(0.0, fraction=True, usual=0.8)
    """Fraction of each matrix that is zero. 0 without a pattern and a mask file disables
    pruning."""
    n_m_pattern: str = ""
    """N:M sparsity pattern such as 2:4, which keeps N of each M consecutive values in a row. If
    empty, the sparsity is unstructured."""
    mask_file: str = ""
    """Safetensors file with a mask for each pruned weight, under its name (nonzero means keep). If
    empty, the weights with the smallest magnitudes are pruned."""
    update_interval: int = setting(0, minimum=0, unit="steps")
    """Steps between updates of the masks until final_step. 0 keeps the masks fixed."""
    final_step: int = setting(0, minimum=0, unit="steps")
    """Step at which sparsity s is reached. It grows as s (1 - (1 - t / final_step)³), and pruned
    weights stay pruned. 0 prunes everything at the start."""

    @property
    def is_enabled(self) -> bool:
        """Whether anything is pruned."""
        return self.sparsity > 0.0 or bool(self.n_m_pattern or self.mask_file)

    @property
    def initial_density(self) -> float:
        """Lower bound on the fraction of a matrix that has states when a run starts."""
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
        """N and M of the pattern; None without a valid pattern."""
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
    """Length, output, device and precision of the run."""

    steps: int = setting(250, minimum=1, unit="steps")
    """Number of optimizer steps."""
    seed: int = setting(0, minimum=0, maximum=2**63 - 1)
    """Random seed of the initial weights, the data order and dropout."""
    output_dir: str = ""
    """Directory of the run. If it already contains a run, that run is resumed. If empty, a new
    directory is created under runs/."""
    init_from: str = ""
    """Run, checkpoint or directory of a pretrained model (safetensors) that provides the initial
    weights and the model settings."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Device to train on. auto uses cuda (also AMD ROCm) if available, else cpu."""
    dtype: Literal["auto", "fp64", "fp32", "bf16", "fp16"] = "auto"
    """Data type of weights and activations. auto: fp32 on cpu; on cuda bf16, or fp16 with a dynamic
    loss scale on devices without bf16."""
    float8: Literal["off", "tensorwise", "rowwise"] = "off"
    """Run matrix products in 8 bits (e4m3; with tensorwise the gradients are e5m2), scaled by the
    current maximum of each tensor (tensorwise) or of each row (rowwise). Weights keep their type.
    Requires bf16 and an H100 or later."""
    float8_layers: tuple[str, ...] = ("qkv", "o", "enter", "up", "down")
    """Linear layers that use float8: all layers whose name contains one of these words. `head` can
    be added."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """Communication backend. auto: nccl on cuda with one device per rank, else gloo."""
    eval_interval: int = setting(50, minimum=0, unit="steps")
    """Steps between evaluations of the held-out loss, in addition to those at the start and at the
    end. 0 disables evaluation."""
    eval_samples: int = setting(64, minimum=1, unit="samples")
    """Number of held-out samples per evaluation."""
    canary_interval: int = setting(0, minimum=0, unit="steps")
    """Steps between evaluations of data.canaries, in addition to those at the start and at the end:
    which fraction of each bucket is memorized, and its loss. 0 disables them."""
    canary_suffix: int = setting(50, minimum=1, unit="tokens")
    """Number of last tokens of a canary that must follow from the tokens before them."""
    loggers: tuple[Literal["tensorboard", "wandb"], ...] = ()
    """Loggers of metrics in addition to metrics.jsonl. They require the extra `log`."""
    sample_prompt: str = setting("def ", free_text=True)
    """Prompt of the sample text that is generated at the end. If empty, no text is generated."""
    trace_comm: bool = False
    """Record the communication of the last step: a table, and trace-rank*.json for Perfetto."""
    check_collectives: bool = False
    """Check before each collective that all ranks call it with matching arguments, and that model
    inputs agree (slow)."""
    comm_timeout_seconds: float = setting(600.0, minimum=1.0, maximum=10000000.0, unit="seconds")
    """Seconds after which a collective that waits for a lost rank fails."""
    deterministic: bool = False
    """Use only deterministic algorithms on cuda, so that a resumed run is bit-identical to an
    uninterrupted one (slower). Runs on a CPU are always deterministic."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are saved, which are kept, and how a run resumes."""

    interval: int = setting(0, minimum=-1, unit="steps")
    """Steps between checkpoints. 0 saves only at the end and when the run is stopped; -1 never
    saves."""
    keep_latest: int = setting(2, minimum=0, unit="checkpoints")
    """Number of latest checkpoints to keep. 0 keeps all."""
    keep_interval: int = setting(0, minimum=0, unit="steps")
    """Permanently keep each checkpoint whose step is a multiple of this. 0 disables it."""
    keep_best: bool = False
    """Also keep the checkpoint with the lowest held-out loss."""
    resume: str = "auto"
    """What to resume from. auto: the latest valid checkpoint in the directory of the run. never:
    start a new run, and rename the files of an earlier run in the directory to before-N-... .
    Otherwise the path of a checkpoint or of a run."""
    async_save: bool = True
    """Copy tensors while the next step computes, and write them in the background. False blocks
    training until the checkpoint is written."""
    allow_data_mismatch: bool = False
    """Resume even if the data has a different fingerprint."""
    allow_config_mismatch: bool = False
    """Resume even if settings that the checkpoint depends on differ."""
    strict: bool = True
    """Require every tensor of a checkpoint to match the model by name and shape. False loads the
    tensors that match; the others keep their initial values."""


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Nodes, restarts and the watchdog."""

    max_restarts: int = setting(3, minimum=0)
    """Maximum number of consecutive restarts without a new step, after ranks were killed. Then
    the run continues on a smaller grid (fallback_grids) or fails (exit code 93). 0 disables
    restarts."""
    restart_on_error: bool = False
    """Also restart after errors of a rank itself (an internal error, SIGSEGV, SIGABRT, ...)."""
    fallback_grids: tuple[str, ...] = ()
    """Grids to continue on when ranks are lost permanently, such as data=2,row=2. The largest grid
    that fits is used; the global batch does not change."""
    watchdog_seconds: float = setting(0.0, minimum=-1.0, unit="seconds")
    """Seconds that a rank may take without progress; at least 600 during start-up. After that the
    stacks of all ranks are printed and the run is stopped (exit code 72). 0 derives the limit:
    twice the slowest of the last 100 steps plus 30 s, 420 s for a checkpoint, 600 s for an
    evaluation and for start-up. -1 disables the watchdog."""
    share_gpu: bool = False
    """Let several ranks share a GPU with NCCL, to test grids with more ranks than GPUs. Results are
    correct but slow. Otherwise such ranks use Gloo."""
    nnodes: int = setting(1, minimum=1, maximum=10**5, unit="nodes")
    """Number of nodes. On each node one `ranvier train` starts `nproc` ranks; all nodes restart
    together. Derived under srun with one task per node and --nproc."""
    node_rank: int = setting(0, minimum=0)
    """Rank of this node, from 0. Derived under srun."""
    rdzv_endpoint: str = ""
    """host:port on which node 0 listens for the other nodes. Derived under srun."""


@dataclass(frozen=True, kw_only=True)
class CommConfig:
    """Collectives."""

    algorithm: str = "auto"
    """Algorithm of collectives: auto (the fastest that `ranvier measure` has found for each
    collective, axis and size; without measurements, shared memory between CPU ranks of a host),
    native (of NCCL or Gloo), shared_memory, ring, doubling, bruck, folded, direct, one_shot,
    hierarchical/INTER/INTRA (INTER between nodes, INTRA inside) or nvrar/INTRA. It may differ by
    axis: row=ring,data=hierarchical/bruck/native,native. `ranvier doctor` lists those that are
    available here."""


@dataclass(frozen=True, kw_only=True)
class GuardConfig:
    """Checks of loss and gradients, and what to do when they fail."""

    max_skipped_steps: int = setting(10, minimum=0, unit="steps")
    """Maximum number of steps with a non-finite loss or gradient to skip before the run fails (exit
    code 74). A skipped step changes neither weights nor optimizer states. With on_spike = skip, it
    is also the maximum number of consecutive spikes to skip."""
    on_spike: Literal["off", "warn", "skip", "rewind"] = "warn"
    """What to do about a loss spike: off; warn; skip its update; or rewind (reload the latest
    checkpoint and continue after the offending samples)."""
    spike_threshold: float = setting(10.0, minimum=1.0, unit="deviations")
    """Minimum height of a spike above the median of the window, in robust deviations (1.4826 times
    the median absolute deviation)."""
    spike_window: int = setting(128, minimum=8, unit="steps")
    """Number of previous losses that a loss is compared with."""
    max_rewinds: int = setting(3, minimum=0)
    """Maximum number of rewinds before the run fails (exit code 74)."""
    replay_interval: int = setting(0, minimum=0, unit="steps")
    """Steps between replay checks, which compute a step twice and compare loss and gradients bit by
    bit before the update (exit code 74 if they differ). Requires train.deterministic on cuda. 0
    disables them."""
    replica_check_interval: int = setting(100, minimum=0, unit="steps")
    """Steps between comparisons of all weights that several ranks hold; they also run before each
    checkpoint. 0 disables them."""


def suggest_nearest(key: str, known: Iterable[str]) -> str:
    """Returns the nearest known key as the sentence "Did you mean ...?"; empty if none is close."""
    close = difflib.get_close_matches(key, list(known), 1)
    if close:
        return f" Did you mean {close[0]!r}?"
    return ""
