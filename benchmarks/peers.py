"""Contestants of `one_gpu.py`: Ranvier's trainer, and other trainers of the same model.

A contestant has `parameters`, the loss of its last step, `step(i)`, which takes one optimizer step
on batch number i, and `close()`. `right_step.py` checks its steps before they are timed: for this
it loads weights, and shows gradients, by their names in the format of Hugging Face. Peers are
searched among the installed packages and in the directory `peers/` at the root of the repository
(unpacked wheels; git ignores it). Packages that they import only for data and logs may be missing:
empty modules replace them.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
import re
import sys
import tomllib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from right_step import (
    CheckedContestant,
    InitialStates,
    NamedTensors,
    Reference,
    TwinWeights,
    UpdateRule,
    load_parallel,
    parallel_gradients,
)
from torch import Tensor, distributed, nn

from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import DecoderConfig
from ranvier.models.config import AdapterConfig
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

FOLDER = Path(__file__).resolve().parents[1] / "peers"
RATE = 1e-4
"""Learning rate of all contestants."""
BATCHES = 4
"""Number of different batches; step i uses batch i modulo this number."""
CHECKED_SAMPLES = 2
"""Number of different samples of the first batch, whose steps are checked. A twin in fp32 computes
for minutes on all samples of a large batch."""


@dataclass(frozen=True, kw_only=True)
class Shape(DecoderConfig):
    """A Llama: RMSNorm, rotary positions, grouped queries, SwiGLU, no biases."""

    vocab: int = 128256
    max_seq: int = 4096
    """Tokens per sample."""
    rope_theta: float = 500000.0

    @classmethod
    def of(cls, layers: int, embed: int, heads: int, mlp: int, **rest: Any) -> Shape:
        """Returns a shape whose heads fill the width, with 8 key-value heads."""
        rest = {"kv_heads": 8, "head_dim": embed // heads, **rest}
        return cls(layers=layers, embed=embed, heads=heads, mlp=mlp, **rest)

    @property
    def matmuls(self) -> dict[str, tuple[int, int, int]]:
        """Inputs, outputs and number of each kind of matrix."""
        return {
            "qkv": (self.embed, (self.heads + 2 * self.kv_heads) * self.head_dim, self.layers),
            "o": (self.heads * self.head_dim, self.embed, self.layers),
            "gate and up": (self.embed, 2 * self.mlp, self.layers),
            "down": (self.mlp, self.embed, self.layers),
            "head": (self.embed, self.vocab, 1),
        }

    @property
    def table(self) -> int:
        """Number of weights outside of matmuls: the embedding, unless it is also the head."""
        return 0 if self.tie_embeddings else self.vocab * self.embed

    @property
    def parameters(self) -> int:
        """Number of weights; a tied embedding counts once."""
        matrices = sum(k * n * count for k, n, count in self.matmuls.values())
        return matrices + self.table + (2 * self.layers + 1) * self.embed

    def flops(self, *, full: bool) -> int:
        """FLOPs per token, forward and backward: 6·(N - table) + 6·L·D·S; full attention
        12·L·D·S.
        """
        attention = self.layers * self.embed * self.max_seq
        return 6 * (self.parameters - self.table) + (12 if full else 6) * attention


@dataclass(frozen=True)
class Task:
    """The job of every contestant: a shape, the same batches, and a device."""

    shape: Shape
    batch: int
    device: torch.device
    pairs: Sequence[tuple[Tensor, Tensor]]
    """Tokens and targets `[b, s]` of each batch."""
    clip: bool = False
    """Whether peers also clip the gradient norm, as Ranvier does."""
    lr: float = RATE
    """Learning rate of all contestants."""

    @classmethod
    def of(
        cls, shape: Shape, batch: int, device: torch.device, *, clip: bool, lr: float = RATE
    ) -> Task:
        """Returns a task with random tokens from a fixed seed."""
        source = torch.Generator(device).manual_seed(0)
        size = (BATCHES, batch, shape.max_seq + 1)
        ids = torch.randint(0, shape.vocab, size, device=device, generator=source)
        ids[0] = ids[0, torch.arange(batch, device=device) % CHECKED_SAMPLES]
        pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
        return cls(shape, batch, device, pairs, clip, lr)

    def reference(
        self, lora: AdapterConfig | None = None, *, dtype: torch.dtype = torch.float32
    ) -> Reference:
        """Returns the plain twin of the task. dtype: of the weights of contestants."""
        weights = TwinWeights(self.shape, self.device, lora or AdapterConfig(), dtype=dtype)
        return Reference(weights, self.load_batch(0))

    def load_batch(self, i: int) -> Batch:
        """Returns batch number i."""
        return Batch(*self.pairs[i])

    @property
    def cuda(self) -> bool:
        """Whether peers compile and compute in bf16; on a CPU this is only a check."""
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        """Returns an autocast to bf16 with fp32 weights."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)


class Contestant(CheckedContestant, Protocol):
    """A trainer of the model."""

    parameters: int

    def close(self) -> None:
        """Frees all memory."""


def run_of(shape: Shape, batch: int, settings: Mapping[str, str], kind: str) -> RunConfig:
    """Returns the run of a shape on one device. settings: by dotted name, e.g. `plan.recompute`."""
    tables: dict[str, dict[str, Any]] = {
        "model": asdict(shape),
        "data": {"seq_len": shape.max_seq},
        "plan": {"global_batch": batch, "compile_errors": "raise"},
        "train": {"device": kind, "dtype": "bf16" if kind == "cuda" else "fp32"},
    }
    for name, text in settings.items():
        section, dot, key = name.partition(".")
        if not dot:
            raise PlanError(
                f"{name!r} is not a setting. A setting has a section. Write plan.{name}."
            )
        tables.setdefault(section, {})[key] = _value(text)
    return runs.run_from_tables(tables).check_and_resolve(1)


def _value(text: str) -> Any:
    """Parses a setting as TOML; anything else is a text."""
    lower = text.lower()
    try:
        return tomllib.loads(f"x = {lower if lower in ('true', 'false') else text}")["x"]
    except tomllib.TOMLDecodeError:
        return text


def rule_of_run(run: RunConfig, lr: float) -> UpdateRule:
    """Returns the update rule of a run of Ranvier."""
    optim = run.optim
    betas = (optim.beta1, optim.beta2)
    return UpdateRule(lr, betas, optim.eps, run.weight_decay, optim.max_grad_norm)


def peer_rule(task: Task) -> UpdateRule:
    """Returns the update rule of the peers."""
    return UpdateRule(task.lr, max_grad_norm=1.0 if task.clip else 0.0)


class Ours:
    """Ranvier, built by its trainer."""

    def __init__(self, task: Task, settings: Mapping[str, str]) -> None:
        run = self.build_run(task, settings)
        nothing: Any = None  # steps are given their batches
        run = resolve_run(run, ResolveContext(world_size=1, device=task.device))
        self.trainer = Trainer.from_run(run, Grid({}), task.device, nothing)
        micro = self.trainer.run.plan.micro_batch  # a fit may have chosen it
        self.batches = [
            task.load_batch(i).split_micro_batches(self.trainer.grid, micro)
            for i in range(len(task.pairs))
        ]
        self.parameters = sum(param.numel() for param in self.trainer.state.model.parameters())
        self.loss: Tensor | None = None
        self.lr = task.lr
        self.on_gradients: Callable[[NamedTensors], None] | None = None
        self.rule = rule_of_run(self.trainer.run, task.lr)

    def build_run(self, task: Task, settings: Mapping[str, str]) -> RunConfig:
        """Returns the run of a task."""
        return run_of(task.shape, task.batch, settings, task.device.type)

    def load_weights(self, weights: TwinWeights) -> None:
        """Loads the weights of the twin, and shows gradients under its names from now on."""
        parallel = self.trainer.state.parallel
        load_parallel(parallel, weights)
        # Master weights have digits that working weights in bf16 have not.
        self.trainer.state.optimizer.load_full_state(InitialStates(weights), steps=0)

        def show_gradients() -> None:
            if self.on_gradients is not None:
                self.on_gradients(parallel_gradients(parallel, weights))

        self.trainer.state.optimizer.before_update = show_gradients

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""
        trainer = self.trainer
        micros = self.batches[i % len(self.batches)]
        self.loss = trainer.take_step(micros, self.lr, trainer.state.guard.step_limits).loss
        trainer.grid.trace.waited_events = []  # as the trainer does

    def close(self) -> None:
        """Frees all memory."""
        self.__dict__.clear()


@dataclass(frozen=True)
class Location:
    """Where a library has a tensor of the twin."""

    parameter: str
    """Name of its parameter."""
    view: Callable[[Tensor], Tensor] = lambda x: x
    """Returns the part of the parameter with the elements in the order of the twin's tensor."""


Locations = Callable[[str], Location]
"""Returns where a library has the tensor with a Hugging Face name."""
WRAPPERS = re.compile(r"_orig_mod\.|_checkpoint_wrapped_module\.|base_layer\.|\.default(?=\.)")
"""Parts of names that wrappers add."""


def named_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of a model without the parts of names that wrappers add."""
    parameters = model.named_parameters(remove_duplicate=False)
    return {WRAPPERS.sub("", name): param for name, param in parameters}


def local_tensor(x: Tensor) -> Tensor:
    """Returns the whole tensor of the only rank."""
    from torch.distributed.tensor import DTensor  # imports sympy, which takes a while

    return x.to_local() if isinstance(x, DTensor) else x


def load_model(model: nn.Module, weights: TwinWeights, locate: Locations) -> None:
    """Loads the weights of the twin into a model of another library."""
    parameters = named_parameters(model)
    with torch.no_grad():
        for name, weight in weights.items():
            location = locate(name)
            part = location.view(local_tensor(parameters[location.parameter].data))
            part.copy_(weight.view(part.shape))


def model_gradients(model: nn.Module, weights: TwinWeights, locate: Locations) -> NamedTensors:
    """Yields the gradients of a model of another library."""
    parameters = named_parameters(model)
    for name in weights.trained:
        location = locate(name)
        grad = parameters[location.parameter].grad
        if grad is not None:
            part = location.view(local_tensor(grad)).reshape(weights.shape_of(name))
            yield name, part.to(weights.device)


def same_name(name: str) -> Location:
    """The location in a model that has the names of the twin."""
    return Location(name)


def decoder_location(shape: DecoderConfig, name: str) -> Location:
    """Returns where our plain decoder has a tensor."""
    piece = TwinWeights(shape, torch.device("cpu")).pieces[name]
    return Location(piece.parameter, piece.select)


@dataclass
class Peer:
    """A model of another library with fp32 weights, and torch's fused AdamW."""

    model: nn.Module
    mean_loss: Callable[[Tensor, Tensor], Tensor]
    """Returns the loss of tokens and targets."""
    task: Task
    locate: Locations = same_name
    fused: bool = True
    """Whether torch's AdamW is its fused one."""
    undo: Callable[[], None] = lambda: None
    loss: Tensor | None = None
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        params = list(self.model.parameters())
        self.parameters = sum(param.numel() for param in params)
        self.rule = peer_rule(self.task)
        self.on_gradients: Callable[[NamedTensors], None] | None = None
        self.optimizer = torch.optim.AdamW(
            params,
            lr=self.rule.lr,
            betas=self.rule.betas,
            eps=self.rule.eps,
            weight_decay=self.rule.weight_decay,
            fused=self.fused or None,
        )

    def load_weights(self, weights: TwinWeights) -> None:
        """Loads the weights of the twin."""
        load_model(self.model, weights, self.locate)
        self.weights = weights

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""
        loss = self.mean_loss(*self.task.pairs[i % len(self.task.pairs)])
        loss.backward()
        if self.on_gradients is not None:
            self.on_gradients(model_gradients(self.model, self.weights, self.locate))
        if self.task.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.loss = loss.detach()

    def close(self) -> None:
        """Frees all memory."""
        self.undo()
        self.__dict__.clear()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """Returns the mean over all tokens, in fp32."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def _compiled(function: Any, task: Task) -> Any:
    return torch.compile(function) if task.cuda else function


class _Stub(types.ModuleType):
    """A module in which every name is a false class without behavior."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        ignore = {"__init__": lambda *_, **__: None, "__bool__": lambda _: False}
        return type(name, (), ignore)


class _Missing(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds stubs for packages that are not installed."""

    def __init__(self, roots: Sequence[str]) -> None:
        self.roots = roots

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        known = name.partition(".")[0] in self.roots
        return ModuleSpec(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing."""


@contextmanager
def stubbed(*roots: str) -> Iterator[None]:
    """Makes missing packages importable inside the context."""
    finder = _Missing(roots)
    sys.meta_path.append(finder)
    board = "torch.utils.tensorboard"  # it is there, but fails without its package
    if "tensorboard" in roots and importlib.util.find_spec("tensorboard").loader is finder:
        sys.modules[board] = _Stub(board)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, one in sys.modules.items() if isinstance(one, _Stub)]:
            del sys.modules[name]


UNUSED = ("datasets", "tensorboard", "torchdata")
"""Packages that torchtitan imports for data and logs."""


def import_titan() -> tuple[Any, Any, Any]:
    """Returns torchtitan's Llama, its arguments and its parallelize function."""
    with stubbed(*UNUSED):
        from torchtitan.models.llama3.infra import parallelize
        from torchtitan.models.llama3.model.args import RoPEScalingArgs, TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    # By default it scales rotary frequencies as Llama 3.1 does; no other contestant does.
    unscaled = partial(TransformerModelArgs, rope_scaling_args=RoPEScalingArgs(scaling_factor=1.0))
    return Transformer, unscaled, parallelize


TITAN_NAMES = {
    "model.embed_tokens": "tok_embeddings",
    "model.norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.o_proj": "attention.wo",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
    "mlp.gate": "feed_forward.router.gate",
    "mlp.shared_experts.gate_proj": "feed_forward.shared_experts.w1",
    "mlp.shared_experts.up_proj": "feed_forward.shared_experts.w3",
    "mlp.shared_experts.down_proj": "feed_forward.shared_experts.w2",
}
TITAN_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
LAYER_NAME = re.compile(r"model\.layers\.(\d+)\.(.+)")
EXPERT_NAME = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


def titan_location(shape: Shape, name: str) -> Location:
    """Returns where torchtitan's Llama, also with its MoE layer, has a tensor."""
    module = name.removesuffix(".weight")
    layer = LAYER_NAME.fullmatch(module)
    if layer is None:
        return Location(f"{TITAN_NAMES[module]}.weight")
    prefix, inner = f"layers.{layer[1]}", layer[2]
    expert = EXPERT_NAME.fullmatch(inner)
    if expert is not None:
        parameter = f"{prefix}.feed_forward.experts.{TITAN_EXPERTS[expert[2]]}"
        return Location(parameter, lambda x, number=int(expert[1]): x[number])  # type: ignore[misc]
    parameter = f"{prefix}.{TITAN_NAMES[inner]}.weight"
    if inner in ("self_attn.q_proj", "self_attn.k_proj"):
        # Rotary pairs are neighbours there, and halves of a head here.
        pairs = (-1, shape.head_dim // 2, 2, shape.embed)
        return Location(parameter, lambda x: x.view(pairs).transpose(1, 2))
    return Location(parameter)


def import_float8() -> Any:
    """Returns torchao's float8 training, as torchtitan uses it."""
    import_titan()
    from torchao import float8

    return float8


def titan(task: Task, *, fsdp: bool = False, float8: bool = False) -> Peer:
    """Returns torchtitan: blocks and loss compiled; autocast, or FSDP2 with mixed precision."""
    transformer, arguments, parallelize = import_titan()
    shape = task.shape
    usual = int(2 * 4 * shape.embed / 3)
    with torch.device(task.device), torch.no_grad():
        model = transformer(
            arguments(
                dim=shape.embed,
                n_layers=shape.layers,
                n_heads=shape.heads,
                n_kv_heads=shape.kv_heads,
                vocab_size=shape.vocab,
                ffn_dim_multiplier=shape.mlp / usual,
                multiple_of=256,
                rope_theta=shape.rope_theta,
                max_seq_len=shape.max_seq,
            )
        )
        model.init_weights()
    if shape.tie_embeddings:
        model.tok_embeddings.weight = model.output.weight
    if float8:
        ao = import_float8()  # torchtitan's filter auto_filter_small_kn: small matrices stay
        chosen = ao._auto_filter_for_recipe("tensorwise", filter_fqns=["output"])
        ao.convert_to_float8_training(model, module_filter_fn=chosen)
        if not any(type(module).__name__ == "Float8Linear" for module in model.modules()):
            raise ValueError("no matrix is large enough to gain from float8")
    if task.cuda:
        parallelize.apply_compile(model, types.SimpleNamespace(backend="inductor"))
    if fsdp:
        _shard(model, task, parallelize)
    of_logits = _compiled(cross_entropy, task)

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        if fsdp:
            return of_logits(model(tokens), targets)
        with task.autocast():
            logits = model(tokens)
        return of_logits(logits, targets)

    return Peer(model, mean_loss, task, partial(titan_location, shape))


def _shard(model: Any, task: Task, parallelize: Any) -> None:
    """Applies FSDP2 on one rank: bf16 weights from fp32 shards, gradients reduced in fp32."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    if not distributed.is_initialized():
        backend = "nccl" if task.cuda else "gloo"
        store = distributed.HashStore()
        distributed.init_process_group(backend, store=store, rank=0, world_size=1)
        atexit.register(distributed.destroy_process_group)
    mesh = init_device_mesh(task.device.type, (1,))
    dtype = torch.bfloat16 if task.cuda else torch.float32
    if not task.shape.tie_embeddings:
        parallelize.apply_fsdp(model, mesh, dtype, torch.float32, pp_enabled=False)
        return
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.layers.values():
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)  # both uses of the table in one group


def import_litgpt() -> tuple[Any, Any]:
    """Returns litgpt's model and config; importing its package would import all of Lightning."""
    if "litgpt" not in sys.modules:
        spec = importlib.util.find_spec("litgpt")
        if spec is None:
            raise ModuleNotFoundError("No module named 'litgpt'")
        bare = types.ModuleType("litgpt")
        bare.__path__ = list(spec.submodule_search_locations or [])
        sys.modules["litgpt"] = bare
    with stubbed("lightning", "lightning_utilities", "psutil", "jsonargparse"):
        from litgpt.config import Config
        from litgpt.model import GPT
    return GPT, Config


LITGPT_NAMES = {
    "model.embed_tokens": "transformer.wte",
    "model.norm": "transformer.ln_f",
    "lm_head": "lm_head",
    "input_layernorm": "norm_1",
    "post_attention_layernorm": "norm_2",
    "self_attn.o_proj": "attn.proj",
    "mlp.gate_proj": "mlp.fc_1",
    "mlp.up_proj": "mlp.fc_2",
    "mlp.down_proj": "mlp.proj",
}


def litgpt_location(shape: Shape, name: str) -> Location:
    """Returns where litgpt has a tensor."""
    module = name.removesuffix(".weight")
    layer = LAYER_NAME.fullmatch(module)
    if layer is None:
        return Location(f"{LITGPT_NAMES[module]}.weight")
    prefix, inner = f"transformer.h.{layer[1]}", layer[2]
    # q, k and v are the rows of one matrix.
    sizes = [n * shape.head_dim for n in (shape.heads, shape.kv_heads, shape.kv_heads)]
    projections = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    if inner in projections:
        number = projections.index(inner)
        return Location(f"{prefix}.attn.qkv.weight", lambda x: x.split(sizes)[number])
    return Location(f"{prefix}.{LITGPT_NAMES[inner]}.weight")


def litgpt(task: Task) -> Peer:
    """Returns litgpt: the whole model and the loss compiled; autocast."""
    gpt, config = import_litgpt()
    shape = task.shape
    with torch.device(task.device):
        model = gpt(
            config(
                name="benchmark",
                block_size=shape.max_seq,
                vocab_size=shape.vocab,
                padded_vocab_size=shape.vocab,
                n_layer=shape.layers,
                n_head=shape.heads,
                n_query_groups=shape.kv_heads,
                n_embd=shape.embed,
                rotary_percentage=1.0,
                parallel_residual=False,
                bias=False,
                norm_class_name="RMSNorm",
                mlp_class_name="LLaMAMLP",
                intermediate_size=shape.mlp,
                rope_base=int(shape.rope_theta),
            )
        )
    model.apply(model._init_weights)
    if shape.tie_embeddings:
        model.transformer.wte.weight = model.lm_head.weight
    forward, of_logits = _compiled(model, task), _compiled(cross_entropy, task)

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with task.autocast():
            logits = forward(tokens)
        return of_logits(logits, targets)

    return Peer(model, mean_loss, task, partial(litgpt_location, shape))


def import_transformers() -> Any:
    """Returns the module of transformers' Llama."""
    from transformers.models.llama import modeling_llama

    return modeling_llama


def import_liger() -> Any:
    """Returns the function that puts Liger's kernels into transformers' Llama."""
    import_transformers()
    from liger_kernel.transformers import apply_liger_kernel_to_llama

    return apply_liger_kernel_to_llama


def transformers(task: Task, *, liger: bool = False) -> Peer:
    """Returns transformers: model and loss compiled, or with Liger's kernels; autocast."""
    module, shape = import_transformers(), task.shape
    causal = module.LlamaForCausalLM
    before, forward = dict(vars(module)), causal.forward

    def undo() -> None:  # Liger changes the module, which later contestants use as well
        vars(module).update(before)
        causal.forward = forward

    config = module.LlamaConfig(
        hidden_size=shape.embed,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.mlp,
        vocab_size=shape.vocab,
        max_position_embeddings=shape.max_seq,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        rms_norm_eps=1e-5,
        tie_word_embeddings=shape.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
    )
    try:
        if liger:
            import_liger()()
        with torch.device(task.device):
            model = causal(config)
    except BaseException:
        undo()
        raise
    call = model if liger else _compiled(model, task)

    def mean_loss(tokens: Tensor, targets: Tensor) -> Tensor:
        with task.autocast():  # targets are shifted already
            loss: Tensor = call(input_ids=tokens, labels=targets, shift_labels=targets).loss
        return loss

    return Peer(model, mean_loss, task, undo=undo)


Kind = tuple[Callable[[], Any], Callable[[Task], Peer]]
PEERS: dict[str, Kind] = {
    "titan": (import_titan, titan),
    "titan-fsdp": (import_titan, partial(titan, fsdp=True)),
    "titan-float8": (import_float8, partial(titan, float8=True)),
    "titan-float8-fsdp": (import_float8, partial(titan, fsdp=True, float8=True)),
    "litgpt": (import_litgpt, litgpt),
    "liger": (import_liger, partial(transformers, liger=True)),
    "hf": (import_transformers, transformers),
}
"""How each peer is imported and built."""
NEED_GPU = ("titan-fsdp", "titan-float8", "titan-float8-fsdp", "liger")
"""Peers without a CPU path."""
PACKAGES = ("torchtitan", "torchao", "litgpt", "liger-kernel", "transformers")
"""The package of each peer."""


def missing(name: str) -> str:
    """Returns why a peer cannot be imported; empty if it can."""
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
    try:
        PEERS[name][0]()
    except Exception as error:
        return first_line(error)
    return ""


def first_line(error: BaseException) -> str:
    """Returns the message of an error in one line."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:200]
