"""Pretrained models: loads a published model, or the model of a run, onto any grid.

    model = ranvier.from_pretrained("path/or/name", plan={"row": 2, "depth": 2})
    model.generate(input_ids, max_new_tokens=20)
    model(input_ids, labels=labels).loss.backward()

With a launcher every rank calls it. Each rank maps the files and copies its own slices, so that no
rank holds the full model or its shards twice. A KV cache is not supported, nor are gradients with
pipeline parallelism (pipe > 1; use `ranvier train`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ranvier.checkpoint import directory
from ranvier.checkpoint.hf import model as published
from ranvier.checkpoint.hf import safetensors
from ranvier.checkpoint.hf.model import PublishedModel
from ranvier.comm import collectives
from ranvier.comm.consensus import max_over_ranks, run_and_raise_together, world_axis
from ranvier.config.plan import InnerSplit, Plan
from ranvier.data.loader import rank_rows
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.errors import DamageError, DataError, PlanError
from ranvier.grid import Grid
from ranvier.infer import load
from ranvier.infer.generate import generate_tokens
from ranvier.infer.load import load_config_from_dir
from ranvier.infer.sampling_params import SamplingParams
from ranvier.integrations.hf_forward import CausalLMOutput, hf_forward
from ranvier.launch.external_launch import AxisSizes, build_grid, resolve_axes
from ranvier.models import Decoder, DecoderConfig
from ranvier.models.hf.family import Family, UnsupportedModelError
from ranvier.models.hf.registry import find_family, find_fitting_family
from ranvier.optim.optimizer import Optimizer
from ranvier.parallel.parallel_model import ParallelModel, get_parallel_model
from ranvier.sharding import REPLICA_AXES
from ranvier.system import safe_files
from ranvier.system.model_hub import find_model
from ranvier.train import import_export


def from_pretrained(
    source: str | Path,
    *,
    plan: AxisSizes | None = None,
    grid: Grid | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    inner: InnerSplit | None = None,
) -> PretrainedModel:
    """Loads a pretrained model (directory, file or Hugging Face Hub name), or the model of a run.

    plan: ranks on each axis, such as `{"row": 2}`, or a Plan; the remaining ranks are data. grid:
    an existing grid, instead of a plan. dtype: data type of the weights (default: as stored).
    inner: what col splits. Communicates: with all ranks that the launcher has started, unless a
    grid is given.
    """
    path = find_model(str(source))
    # For a path to one checkpoint of a run, the config is two levels up.
    if directory.CHECKPOINT_NAME.fullmatch(path.name):
        origin = path.parent.parent
    else:
        origin = path
    if (origin / "config.toml").exists():
        run = load_config_from_dir(origin)
        there = None
        config: DecoderConfig = run.decoder
    else:
        run = None
        there = PublishedModel.open(path)
        config = _published_config(there)
    sizes = {name: getattr(config, name) for name in CHECKED_DIMS}
    if grid is None:
        grid, here = build_grid(plan, sizes=sizes, inner=inner, device=device)
    else:
        here = torch.device(device or "cpu")
    inner = resolve_axes(plan or grid.degrees, grid.world_size, sizes, inner=inner).col_splits
    layout = Plan(col_splits=inner).with_degrees(grid.degrees)
    if there is None:
        if path != origin:
            step = directory.step_of(path)
        else:
            step = None
        model = load.load_model(origin, grid, here, step=step, plan=layout, dtype=dtype)
        return PretrainedModel(model, origin)
    # The files stay mapped while every rank copies its slices; an error on one rank raises on all.
    with there:
        model = load.build_empty_model(config, grid, here, plan=layout, dtype=dtype or there.dtype)
        parallel = get_parallel_model(model)
        run_and_raise_together(lambda: there.fill_state(parallel.sharded_state()), grid, here)
    parallel.bucket_scheduler.load_count += 1
    parallel.bucket_scheduler.begin_step("")
    return PretrainedModel(model.eval(), there.folder)


MAX_TOKEN_ID = 2**31
"""Upper bound (exclusive) of token ids."""
CHECKED_DIMS = ("embed", "heads", "kv_heads", "mlp", "vocab", "layers")
"""Dims that a plan is checked against."""


def _published_config(there: PublishedModel | None) -> DecoderConfig:
    assert there is not None
    return there.config


class PretrainedModel(nn.Module):
    """A model on a grid with the interface of transformers models."""

    def __init__(self, model: Decoder, origin: Path) -> None:
        super().__init__()
        self.model = model
        self.origin = origin
        self.grid = self.parallel.grid
        self.config = model.config
        self.train(model.training)
        self._samples_seen = 0
        """Number of training samples so far, of all coordinates; dropout depends on it."""

    @property
    def parallel(self) -> ParallelModel:
        """The `ParallelModel` of the model."""
        return get_parallel_model(self.model)

    @property
    def device(self) -> torch.device:
        """Device of my shards."""
        return self.parallel.bucket_scheduler.device

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer stored with the model, if there is one."""
        words = self.origin / "tokenizer.json"
        if words.exists():
            return load_tokenizer(str(words), self.origin)
        return None

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> CausalLMOutput:
        """Returns loss or logits `[b, s, v]`, as `hf_forward`; inputs are those of my coordinate.

        Communicates: as `hf_forward`.
        """
        samples = None
        if self.training:
            mine = input_ids.shape[0]
            whole = mine * self.grid.axis(*REPLICA_AXES).size
            samples = torch.tensor(
                [self._samples_seen + row for row in rank_rows(whole, self.grid)]
            )
            self._samples_seen += whole
        return hf_forward(
            self.model,
            input_ids,
            labels=labels,
            position_ids=position_ids,
            attention_mask=attention_mask,
            samples=samples,
        )

    def generate(
        self,
        input_ids: Tensor,
        *,
        max_new_tokens: int = 20,
        attention_mask: Tensor | None = None,
        do_sample: bool = False,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        seed: int = 0,
    ) -> Tensor:
        """Returns prompts `[b, s]` with continuations of at most max_new_tokens, on all ranks.

        All ranks pass the same arguments. A continuation ends with an EOS token (default: as stored
        with the model); shorter ones are padded. Sampling depends on (seed, row, position), not on
        the grid. Communicates: as `generate_tokens`.
        """
        if max_new_tokens < 1 or input_ids.dim() != 2 or input_ids.shape[1] < 1:
            raise PlanError(
                f"max_new_tokens={max_new_tokens} with input_ids of shape {list(input_ids.shape)}. "
                "It must be at least 1, and input_ids must have the shape [samples, tokens] with "
                "at least one token. Use max_new_tokens=20."
            )
        if eos_token_id is None:
            ends = self.eos_token_ids
        else:
            ends = _as_list(eos_token_id)
        params = SamplingParams(
            max_tokens=max_new_tokens,
            # Temperature 0 is greedy decoding.
            temperature=temperature if do_sample else 0.0,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
        )
        prompts = prompts_from_mask(input_ids, attention_mask)
        said = generate_tokens(self.model, prompts, params, end_token_ids=ends)
        if pad_token_id is not None:
            known = [pad_token_id]
        else:
            known = self._read_token_ids("pad_token_id")
        # Pad with the pad token, else with an EOS token, else with 0.
        fill = (known or ends or [0])[0]
        longest = max(map(len, said))
        more = [words + [fill] * (longest - len(words)) for words in said]
        return torch.cat([input_ids.cpu(), torch.tensor(more)], 1).to(input_ids.device)

    @cached_property
    def eos_token_ids(self) -> list[int]:
        """EOS tokens stored with the model."""
        if (self.origin / "config.toml").exists():
            own = self.tokenizer
        else:
            own = None
        return self._read_token_ids("eos_token_id") or (
            [own.eos_token_id] if own is not None else []
        )

    def _read_token_ids(self, key: str) -> list[int]:
        """Returns token ids under `key` in the JSON files next to the weights, if any."""
        # A run stores the files of the model it was imported from in a subdirectory.
        homes = (self.origin / import_export.ORIGIN_DIR, self.origin)
        for path in (h / n for h in homes for n in ("generation_config.json", "config.json")):
            there = safe_files.path_exists(path)
            if there:
                found = published.read_json_table(path, root=self.origin).get(key)
            else:
                found = None
            if found is not None:
                return _checked_ids(found, key, path)
        return []

    def optimizer(
        self,
        *,
        lr: float = 1e-5,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        decay: float = 0.1,
        clip: float = 1.0,
    ) -> Optimizer:
        """Returns AdamW for its weights with sharded states; `step()` updates and drops the
        gradients."""
        queue = self.parallel.bucket_scheduler
        return Optimizer(queue, lr=lr, betas=betas, eps=eps, decay=decay, clip=clip)

    # ---- export -------------------------------------------------------------------------

    def save_pretrained(
        self, out: str | Path, *, shard: int = import_export.MAX_SHARD_BYTES
    ) -> None:
        """Saves in Hugging Face format; no rank holds more than its shards and one full tensor.

        Communicates: one tensor after the other over all axes.
        """
        kind, config = self._resolve_family()
        dtype = self.parallel.bucket_scheduler.buckets[0].data.dtype
        ids = import_export.token_ids(self.origin, config)
        config = {**config, **ids, "dtype": str(dtype).removeprefix("torch.")}
        # The older name of "dtype"; it would contradict the one written above.
        config.pop("torch_dtype", None)
        entries = published.entries_of(kind, self.config)
        shapes = published.shapes_of(self.config)
        names = [name for entry in entries for name in entry.our_names]
        listed = safetensors.list_hf_tensors(entries, shapes, dict.fromkeys(names, dtype))

        def write() -> None:
            # Rank 0 decides which weight comes next. The others follow in a loop: the maximum over
            # ranks is the index that rank 0 sends, because they contribute -1.
            if self.grid.rank != 0:
                while (number := max_over_ranks(-1, self.grid, self.device)) < len(names):
                    self._gather_full_weight(names[number], shapes)
                return
            try:
                with import_export.write_atomically(Path(out)) as here:
                    text = json.dumps(config, indent=2) + "\n"
                    (here / "config.json").write_text(text, encoding="utf-8")
                    import_export.copy_tokenizer_files(self.origin, here, config)
                    read = self._full_weight_reader(names, shapes)
                    with import_export.transfer_progress("saving") as progress:
                        safetensors.write_safetensors(
                            here, listed, read, most=shard, progress=progress
                        )
            finally:
                # Also after an error: an index past the last one ends the loops of other ranks.
                max_over_ranks(len(names), self.grid, self.device)

        run_and_raise_together(write, self.grid, self.device)

    def _resolve_family(self) -> tuple[Family, dict[str, Any]]:
        """Returns the model family in Hugging Face format, and its config.json."""
        if (self.origin / "config.toml").exists():
            return import_export.resolve_family(self.origin, load_config_from_dir(self.origin))
        theirs = published.read_json_table(self.origin / "config.json")
        try:
            return find_family(theirs), theirs
        except UnsupportedModelError:
            return find_fitting_family(self.config, "")

    def _full_weight_reader(
        self, names: Sequence[str], shapes: Mapping[str, tuple[int, ...]]
    ) -> Any:
        """Returns a function that reads a full weight on rank 0, after sending its index to all
        ranks."""

        def read(name: str) -> Tensor:
            max_over_ranks(names.index(name), self.grid, self.device)
            return self._gather_full_weight(name, shapes)

        return read

    def _gather_full_weight(self, name: str, shapes: Mapping[str, tuple[int, ...]]) -> Tensor:
        """Returns a full weight on all ranks, bit-exact. Communicates: all-reduce over all axes."""
        parallel = self.parallel
        device = self.device
        dtype = parallel.bucket_scheduler.buckets[0].data.dtype
        whole = torch.zeros(shapes[name], dtype=dtype, device=device)
        weight = parallel.weights.get(name)
        if weight is not None and weight.bucket.owns_weight(weight):
            weight.shard.write_into(whole, weight.storage)
        # Sum bytes, not numbers: exactly one rank has each element, and -0.0 keeps its sign.
        bits = collectives.all_reduce(
            whole.view(-1).view(torch.uint8), world_axis(self.grid)
        ).wait()
        return bits.view(dtype).view(shapes[name]).cpu()


def prompts_from_mask(tokens: Tensor, mask: Tensor | None) -> list[list[int]]:
    """Returns the tokens of each row `[s]` that its mask keeps; padding must be on the left."""
    if mask is None:
        return [[int(token) for token in row] for row in tokens.tolist()]
    ones = (mask != 0).long()
    # A mask may only rise from 0 to 1, because generated tokens follow the prompt without a gap.
    if mask.shape != tokens.shape or bool((torch.diff(ones, dim=1) < 0).any()):
        raise DataError(
            f"attention_mask of shape {list(mask.shape)} has padding after tokens, or does not "
            "match input_ids. Generated tokens must directly follow the prompt. Pad on the left "
            "(padding_side='left')."
        )
    if bool((ones.sum(1) == 0).any()):
        raise DataError(
            "A row of attention_mask has no token. A prompt needs at least one token. Remove the "
            "row."
        )
    both = zip(tokens.tolist(), ones.tolist(), strict=True)
    return [[t for t, one in zip(row, kept, strict=True) if one] for row, kept in both]


def _checked_ids(found: Any, key: str, path: Path) -> list[int]:
    """Returns validated token ids from a settings file."""
    if isinstance(found, list):
        listed = found
    else:
        listed = [found]
    if not all(type(token) is int and 0 <= token < MAX_TOKEN_ID for token in listed):
        raise DamageError(
            f"{path} has {key}={found!r:.80}. It must be a token or a list of tokens, as integers "
            "from 0. Restore the file."
        )
    return listed


def _as_list(ends: int | Sequence[int]) -> list[int]:
    if isinstance(ends, int):
        return [ends]
    return list(ends)
