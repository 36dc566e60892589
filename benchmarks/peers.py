"""Contestants of `one_gpu.py`: Ranvier's trainer, and other trainers of the same model.

A contestant has `parameters`, the loss of its last step, `step(i)`, which takes one optimizer step
on batch number i, and `close()`. Peers are searched among the installed packages and in the
directory `peers/` at the root of the repository (unpacked wheels; git ignores it). Packages that
they import only for data and logs may be missing: empty modules replace them.
"""

from __future__ import annotations

import atexit
import importlib.abc
import importlib.util
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
from torch import Tensor, distributed, nn

from ranvier.config import run as runs
from ranvier.config.run import RunConfig
from ranvier.data.batch import Batch
from ranvier.errors import PlanError
from ranvier.grid import Grid
from ranvier.models import DecoderConfig
from ranvier.train.resolve import ResolveContext, resolve_run
from ranvier.train.trainer import Trainer

FOLDER = Path(__file__).resolve().parents[1] / "peers"
RATE = 1e-4
"""Learning rate of all contestants."""
BATCHES = 4
"""Number of different batches; step i uses batch i modulo this number."""


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

    @classmethod
    def of(cls, shape: Shape, batch: int, device: torch.device, *, clip: bool) -> Task:
        """Returns a task with random tokens from a fixed seed."""
        source = torch.Generator(device).manual_seed(0)
        size = (BATCHES, batch, shape.max_seq + 1)
        ids = torch.randint(0, shape.vocab, size, device=device, generator=source)
        pairs = [(one[:, :-1].contiguous(), one[:, 1:].contiguous()) for one in ids]
        return cls(shape, batch, device, pairs, clip)

    @property
    def cuda(self) -> bool:
        """Whether peers compile and compute in bf16; on a CPU this is only a check."""
        return self.device.type == "cuda"

    def autocast(self) -> torch.autocast:
        """Returns an autocast to bf16 with fp32 weights."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.cuda)


class Contestant(Protocol):
    """A trainer of the model."""

    parameters: int
    loss: Tensor | None

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""

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


class Ours:
    """Ranvier, built by its trainer."""

    def __init__(self, task: Task, settings: Mapping[str, str]) -> None:
        run = run_of(task.shape, task.batch, settings, task.device.type)
        nothing: Any = None  # steps are given their batches
        run = resolve_run(run, ResolveContext(world_size=1, device=task.device))
        self.trainer = Trainer.from_run(run, Grid({}), task.device, nothing)
        micro = self.trainer.run.plan.micro_batch  # a fit may have chosen it
        self.batches = [
            Batch(tokens, targets).split_micro_batches(self.trainer.grid, micro)
            for tokens, targets in task.pairs
        ]
        self.parameters = sum(param.numel() for param in self.trainer.state.model.parameters())
        self.loss: Tensor | None = None

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""
        trainer = self.trainer
        micros = self.batches[i % len(self.batches)]
        self.loss = trainer.take_step(micros, RATE, trainer.state.guard.step_limits).loss
        trainer.grid.trace.waited_events = []  # as the trainer does

    def close(self) -> None:
        """Frees all memory."""
        self.__dict__.clear()


@dataclass
class Peer:
    """A model of another library with fp32 weights, and torch's fused AdamW."""

    model: nn.Module
    mean_loss: Callable[[Tensor, Tensor], Tensor]
    """Returns the loss of tokens and targets."""
    task: Task
    undo: Callable[[], None] = lambda: None
    loss: Tensor | None = None
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        self.model.train()
        params = list(self.model.parameters())
        self.parameters = sum(param.numel() for param in params)
        self.optimizer = torch.optim.AdamW(
            params, lr=RATE, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, i: int) -> None:
        """Takes one optimizer step on batch number i."""
        loss = self.mean_loss(*self.task.pairs[i % len(self.task.pairs)])
        loss.backward()
        if self.task.clip:
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0, foreach=True)
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
        from torchtitan.models.llama3.model.args import TransformerModelArgs
        from torchtitan.models.llama3.model.model import Transformer
    return Transformer, TransformerModelArgs, parallelize


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

    return Peer(model, mean_loss, task)


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

    return Peer(model, mean_loss, task)


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

    return Peer(model, mean_loss, task, undo)


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
