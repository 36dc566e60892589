"""Where the weights of a served model come from: a run, a Hugging Face directory, or a seed."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from ranvier.checkpoint.hf import model as published
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.comm.consensus import run_and_raise_together
from ranvier.config.plan import Plan
from ranvier.data.chat.template import BUILT_IN, load_chat_template
from ranvier.data.chat.tokenize import ChatEncoder
from ranvier.data.tokenizer import load_tokenizer
from ranvier.errors import DamageError, PlanError, RanvierError
from ranvier.grid import Grid
from ranvier.infer.adapters import AdapterSource, fill_adapters, stack_configs
from ranvier.infer.load import (
    build_empty_model,
    find_checkpoint,
    find_saved_adapters,
    inference_dtype,
    load_config_from_dir,
    load_model,
    saved_dtype,
)
from ranvier.infer.structured_output import GrammarCompiler
from ranvier.models import MODEL_SIZES, AdapterConfig, Decoder, DecoderConfig
from ranvier.models.config import find_model_size
from ranvier.models.lora import ADAPTER_INFIX
from ranvier.nn.materialize import materialize_parameters
from ranvier.parallel.parallel_model import get_parallel_model
from ranvier.system import safe_files

SourceKind = Literal["run", "published", "random"]
PUBLISHED_DIR = "published"
"""Directory of an imported run with the files of its origin."""
MAX_TOKEN_ID = 2**31
"""Upper bound (exclusive) of token ids."""
RANDOM_TEMPLATE = (
    "{%- for message in messages -%}{{ message.content + ' ' }}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ 't1 ' }}{%- endif -%}"
)


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded onto any grid."""

    folder: Path
    """Directory of the run or of the published model; of random weights, that of their
    tokenizer."""
    kind: SourceKind
    size: str = ""
    """Name of a built-in model, if the weights are random."""
    step: int | None = None
    """Step of the checkpoint of a run; None means the latest."""
    seed: int = 0
    """Seed of random weights."""
    adapters: tuple[AdapterSource, ...] = ()
    """Adapters that requests choose by name."""

    @classmethod
    def find(cls, path: Path, *, step: int | None = None) -> ModelSource:
        """Returns the model in a directory. Raises a `PlanError` if there is none."""
        if (path / "config.toml").exists():
            find_checkpoint(path, step)
            return cls(path, "run", step=step)
        if (path / "config.json").exists():
            return cls(path, "published")
        raise PlanError(
            f"{path} is neither a run nor a model. It must have config.toml (a run) or config.json "
            "and safetensors (a model in Hugging Face format). Check the path."
        )

    def load_config(self) -> DecoderConfig:
        """Returns the architecture of the model."""
        if self.kind == "run":
            return load_config_from_dir(self.folder).decoder
        if self.kind == "random":
            return named_decoder(self.size)
        with PublishedModel.open(self.folder) as source:
            return source.config

    def with_adapters(self, adapters: Sequence[AdapterSource]) -> ModelSource:
        """Returns the model with adapters by name; raises if one of them does not fit."""
        if not adapters:
            return self
        own = self._own_adapters()
        if own.rank > 0:
            raise PlanError(
                f"{self.folder} is a run with adapters of rank {own.rank}. Adapters by name need "
                "a base without adapters. Serve its base, and the run as --adapter name=RUN."
            )
        found = dataclasses.replace(self, adapters=tuple(adapters))
        stack_configs(found.load_adapter_configs())
        return found

    def _own_adapters(self) -> AdapterConfig:
        if self.kind != "run":
            return AdapterConfig()
        checkpoint = find_checkpoint(self.folder, self.step)
        return find_saved_adapters(checkpoint, load_config_from_dir(self.folder).lora)

    def load_adapter_configs(self) -> list[AdapterConfig]:
        """Returns the settings of the adapters by name."""
        config = self.load_config()
        return [adapter.load_config(config) for adapter in self.adapters]

    def find_dtype(self, device: torch.device, dtype: torch.dtype | None = None) -> torch.dtype:
        """Returns the type of the weights on a device: `dtype`, or as stored, but at least fp32 on
        a CPU.
        """
        if dtype is not None:
            return dtype
        if self.kind == "run":
            return inference_dtype(saved_dtype(find_checkpoint(self.folder, self.step)), device)
        if self.kind == "random":
            return inference_dtype(torch.bfloat16, device)
        with PublishedModel.open(self.folder) as source:
            return inference_dtype(source.dtype, device)

    def load(
        self,
        grid: Grid,
        device: torch.device,
        plan: Plan,
        dtype: torch.dtype | None = None,
    ) -> Decoder:
        """Returns the model on a grid, in eval mode; each rank reads its shards.

        dtype: type of the weights (default: as `find_dtype`). Communicates: creation of process
        groups; one number over all axes.
        """
        dtype = self.find_dtype(device, dtype)
        configs = self.load_adapter_configs()
        model = self._load_base(grid, device, plan, dtype, stack_configs(configs))
        if self.adapters:
            fill_adapters(model, self.load_config(), self.adapters, configs)
        return model

    def build_empty(
        self, grid: Grid, device: torch.device | str, plan: Plan, dtype: torch.dtype
    ) -> Decoder:
        """Returns the model with zero weights, with its adapters.

        Communicates: creation of process groups.
        """
        lora = stack_configs(self.load_adapter_configs()) if self.adapters else self._own_adapters()
        return build_empty_model(
            self.load_config(), grid, device, lora=lora, plan=plan, dtype=dtype
        )

    def _load_base(
        self,
        grid: Grid,
        device: torch.device,
        plan: Plan,
        dtype: torch.dtype,
        lora: AdapterConfig,
    ) -> Decoder:
        """Returns the model without adapters by name, which have no values yet."""
        if self.kind == "run":
            return load_model(
                self.folder,
                grid,
                device,
                step=self.step,
                plan=plan,
                dtype=dtype,
                other_lora=lora if self.adapters else None,
            )
        if self.kind == "random":
            return self._load_random(grid, device, plan, dtype)
        with PublishedModel.open(self.folder) as source:
            model = self.build_empty(grid, device, plan, dtype)
            parallel = get_parallel_model(model)
            base = {
                name: part
                for name, part in parallel.sharded_state().items()
                if ADAPTER_INFIX not in name
            }
            run_and_raise_together(lambda: source.fill_state(base), grid, device)
        parallel.bucket_scheduler.load_count += 1
        parallel.bucket_scheduler.begin_step("")
        return model.eval()

    def _load_random(
        self, grid: Grid, device: torch.device, plan: Plan, dtype: torch.dtype
    ) -> Decoder:
        """Returns a model with seeded random weights, the same on every grid."""
        model = self.build_empty(grid, device, plan, dtype)
        parallel = get_parallel_model(model)
        materialize_parameters(
            parallel.bucket_scheduler, parallel.layers, seed=self.seed, dtype=dtype, device=device
        )
        parallel.bucket_scheduler.begin_step("")
        return model.eval()

    def end_token_ids(self) -> frozenset[int]:
        """Returns the tokens that end an answer.

        They are those of the files of the model, of its tokenizer and of its chat template.
        """
        found = {*_stored_end_tokens(self.folder)}
        if (self.folder / "tokenizer.json").exists():
            tokenizer = load_tokenizer(str(self.folder / "tokenizer.json"), self.folder)
            if not found:
                found.add(tokenizer.eos_token_id)
            template = load_chat_template(tokenizer, self.folder)
            if template.origin != BUILT_IN:
                found |= ChatEncoder(template, tokenizer).end_token_ids
        return frozenset(found)

    def grammar_compiler(self, vocab_size: int) -> GrammarCompiler | None:
        """Returns the compiler of structured outputs; None without the extra `grammar`.

        The front has checked what it compiles.
        """
        try:
            return GrammarCompiler(
                load_tokenizer(str(self.folder / "tokenizer.json"), self.folder),
                vocab_size,
                self.end_token_ids(),
                trusts_input=True,
            )
        except RanvierError:
            return None


def _stored_end_tokens(folder: Path) -> list[int]:
    """Returns the end tokens in the JSON files next to the weights, if any."""
    for home in (folder / PUBLISHED_DIR, folder):
        for name in ("generation_config.json", "config.json"):
            path = home / name
            if not safe_files.path_exists(path):
                continue
            value = published.read_json_table(path, root=folder).get("eos_token_id")
            if value is None:
                continue
            tokens = value if isinstance(value, list) else [value]
            if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in tokens):
                raise DamageError(
                    f"{path} has eos_token_id={value!r:.80}. It must be a token or a list of "
                    "tokens, as integers from 0. Restore the file."
                )
            return tokens
    return []


def named_decoder(size: str) -> DecoderConfig:
    """Returns the architecture of a built-in model; raises if there is none."""
    try:
        found = find_model_size(size)
    except ValueError as error:
        raise PlanError(str(error)) from None
    if found is None:
        raise PlanError(
            f"model.size={size!r} is not known. Random weights need a built-in model. Use one of "
            f"{', '.join(MODEL_SIZES)}, gemstone-WxD."
        )
    return found


def write_random_model(folder: Path, size: str) -> ModelSource:
    """Writes a tokenizer for random weights into a directory, and returns the source.

    Token i is the word `ti`; token 0 ends an answer.
    """
    words = {f"t{i}": i for i in range(named_decoder(size).vocab)}
    tokenizer = {
        "version": "1.0",
        "added_tokens": [
            {"id": 0, "content": "t0", "special": True}
            | dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        ],
        "pre_tokenizer": {"type": "WhitespaceSplit"},
        "model": {"type": "WordLevel", "vocab": words, "unk_token": "t2"},
        # Joins words with spaces, as without a decoder, which grammars do not accept.
        "decoder": {"type": "WordPiece", "prefix": "##", "cleanup": False},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")
    config = {"eos_token": "t0", "chat_template": RANDOM_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return ModelSource(folder, "random", size=size)
