"""A decoder with recurrent depth (Geiping et al. 2025, Huginn) in plain PyTorch.

    e   = prelude(embed_scale · embed(x))
    s_i = core(A_s s_{i-1} + A_e e),  i = 1, ..., r
    y   = head(norm(coda(norm(s_r))))

The core is one block, so that on a grid a pass gathers its weights once, whatever r is. A_e e does
not depend on i and is computed once. The first iterations run without gradients and keep nothing
for backward, so that memory does not depend on r. s_0 is random (`InitialState`), and r is drawn
for each step (`draw_recurrence`).

Shapes: b samples, s tokens, d embed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from statistics import NormalDist

import torch
from torch import Tensor, nn

from ranvier.models import counter_random
from ranvier.models.config import DecoderConfig
from ranvier.models.decoder import Decoder, build_block
from ranvier.models.document_attention import Documents, TokenLayout
from ranvier.models.paged_attention import PagedSequences
from ranvier.models.recurrence import LOG_NORMAL_SIGMA, LayerCalls, Recurrence, expected_calls

INITIAL_STD = math.sqrt(2 / 5)
INITIAL_LIMIT = 3.0
"""Initial states are normal with this standard deviation, truncated at so many of them."""


def draw_recurrence(seed: int, step: int, config: DecoderConfig) -> Recurrence:
    """Returns the iterations of a training step, a function of seed and step."""
    normal = NormalDist().inv_cdf(counter_random.uniform_number(seed, "recurrence", step))
    log_mean = math.log(config.mean_recurrence)
    rate = math.exp(log_mean - LOG_NORMAL_SIGMA**2 / 2.0 + LOG_NORMAL_SIGMA * normal)
    # Events of a Poisson process in [0, rate], whose distances are exponentially distributed.
    events = 0
    time = 0.0
    while True:
        time -= math.log(counter_random.uniform_number(seed, "recurrence", step, events))
        if time > rate:
            return Recurrence.split(events + 1, config.backprop_depth)
        events += 1


class InitialState(nn.Module):
    """The state before the first iteration, a function of (seed, sample, token, feature)."""

    def __init__(self) -> None:
        super().__init__()
        self.seed = 0
        """Seed of the run; on a grid that of the step context."""
        self.samples: Tensor | None = None
        """Index of each sample in the run, `[b]`. By default 0, 1, 2, ..., and in evaluation 0 for
        all, so that a result does not depend on its place in a batch."""

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        """Returns the initial state of the tokens of x; x, y: `[b, s, d]`.

        positions: of the tokens of an inference engine, `[b, s]`, which all count as tokens of
        sample 0.
        """
        samples = self.samples
        if positions is not None or (samples is None and not self.training):
            samples = torch.zeros(x.shape[0], dtype=torch.int64)
        elif samples is None:
            samples = torch.arange(x.shape[0])
        tokens = positions
        if tokens is None:
            tokens = torch.arange(x.shape[1], device=x.device).unsqueeze(0)
        features = torch.arange(x.shape[2], device=x.device)
        counters = [samples.to(x.device).view(-1, 1, 1), tokens.unsqueeze(-1), features]
        return self.draw_states(self.seed, counters, x.dtype)

    def draw_states(self, seed: int, counters: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
        """Returns the states of some elements, `[b, s, d]`.

        counters: numbers of their samples in the run, of their tokens in the sample and of their
        features, shaped to broadcast; so the values are the same on every grid.
        """
        return counter_random.truncated_normal_values(
            counters,
            torch.tensor(counter_random.random_key(seed, "initial_state")),
            std=INITIAL_STD,
            limit=INITIAL_LIMIT,
            dtype=dtype,
        )


class RecurrentCore(nn.Module):
    """One iteration of the core: its layers applied to A_s s + A_e e."""

    dims = {"adapter": ("embed", "embed")}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.adapter = nn.Linear(config.embed, config.embed, bias=False)
        first = config.prelude_layers
        blocks = [build_block(config, first + i) for i in range(config.core_layers)]
        for block in blocks:
            block.attention.core.is_recurrent = True
        # Not a module list, whose elements would be blocks with buckets of their own.
        self.layers = nn.Sequential(*blocks)

    def forward(
        self,
        state: Tensor,
        injection: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | Tensor | None,
    ) -> Tensor:
        """Returns the next state; state, injection, y: `[b, s, d]`."""
        x = self.adapter(state) + injection
        for layer in self.layers:
            x = layer(x, angles, documents)
        following: Tensor = x
        return following


class RecurrentDecoder(Decoder):
    """A decoder whose middle layers run several times with the same weights.

    Args:
        config: Sizes and options of the model, with `core_layers` of at least 1.

    Example:
        >>> import torch
        >>> from ranvier.models import MODEL_SIZES, RecurrentDecoder
        >>> model = RecurrentDecoder(MODEL_SIZES["recurrent-tiny"]).eval()
        >>> model.eval_recurrence = 8
        >>> model(torch.zeros(2, 8, dtype=torch.int64)).shape
        torch.Size([2, 8, 4096])
    """

    returns_head_loss = True
    dims = {**Decoder.dims, "inject": ("embed", "embed"), "initial_state": ("embed",)}

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.eval_recurrence = config.mean_recurrence
        """Iterations in evaluation."""
        self.recurrence = Recurrence.split(config.mean_recurrence, config.backprop_depth)
        """Iterations of the current training step."""

    def build_blocks(self, config: DecoderConfig) -> Iterator[nn.Module]:
        """Yields the blocks of the prelude, the core, and the blocks of the coda."""
        # Registered before the blocks, as layers behind them count as used after the last block.
        self.inject = nn.Linear(config.embed, config.embed, bias=False)
        self.initial_state = InitialState()
        for i in range(config.layers):
            if i == config.prelude_layers:
                yield RecurrentCore(config)
            if config.prelude_layers <= i < config.prelude_layers + config.core_layers:
                continue
            block = build_block(config, i)
            # Its output is also read by layers other than the next block.
            block.can_defer_add = False
            yield block

    @property
    def parts(self) -> list[tuple[str, ...]]:
        """None: the core cannot be split into stages."""
        return []

    @property
    def core_name(self) -> str:
        """Name of the recurrent core."""
        return f"blocks.{self.config.prelude_layers}"

    def begin_step(self, seed: int, step: int) -> None:
        """Draws the iterations of a training step."""
        self.recurrence = draw_recurrence(seed, step, self.config)

    def layer_calls(self, recurrence: Recurrence | None = None) -> dict[str, LayerCalls]:
        """Returns how often a pass calls each layer that it does not call once, by name.

        The name of a block stands for all of its layers. recurrence: iterations of the pass; those
        of the current training step by default.
        """
        calls = (recurrence or self.recurrence).calls
        return {self.core_name: calls, "norm": LayerCalls(with_grad=2)}

    def mean_layer_calls(self) -> dict[str, LayerCalls]:
        """Returns the same as `layer_calls`, on average over training steps."""
        config = self.config
        calls = expected_calls(config.mean_recurrence, config.backprop_depth)
        return {**self.layer_calls(), self.core_name: calls}

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        positions: Tensor | None = None,
        documents: Documents | TokenLayout | Tensor | None = None,
        logits_to_keep: Tensor | None = None,
    ) -> Tensor:
        """Returns logits `[b, s, v]`, or the sum of the token losses; as `Decoder.forward`."""
        x, angles, documents = self.prepare_inputs(None, tokens, positions, documents)
        injection = self.run_prelude(x, angles, documents)
        if isinstance(documents, PagedSequences):
            assert positions is not None
            state = self.initial_state(injection, positions)
            return self.run_step(state, injection, angles, documents, logits_to_keep)
        state = self.initial_state(injection)
        recurrence = self.recurrence
        if not self.training:
            recurrence = Recurrence.split(self.eval_recurrence, self.config.backprop_depth)
        with torch.no_grad():
            for _ in range(recurrence.without_grad):
                state = self.iterate(state, injection, angles, documents)
        if torch.is_grad_enabled():
            # The same graph can run all iterations if the state of each requires a gradient.
            state = state.detach().requires_grad_()
        for _ in range(recurrence.with_grad):
            state = self.iterate(state, injection, angles, documents)
        x = self.run_coda(state, angles, documents)
        y: Tensor = self.head(x, targets, logits_to_keep)
        return y

    def run_step(
        self,
        state: Tensor,
        injection: Tensor,
        angles: Tensor | None,
        sequences: PagedSequences,
        logits_to_keep: Tensor | None,
    ) -> Tensor:
        """Runs the iterations of a step of an inference engine; returns logits `[b, n, v]`.

        Tokens may exit before the last iteration, if logits of the next token show that they need
        no further one; they keep their state then.
        """
        exits = sequences.early_exit
        for i in range(sequences.num_iterations):
            now = replace(sequences, iteration=i)
            if exits is None:
                state = self.iterate(state, injection, angles, now)
                continue
            following = self.iterate(state, injection, angles, exits.hide_finished(now))
            state = exits.keep_finished(state, following)
            logits = None
            if exits.decides:
                logits = self.head(self.run_coda(state, angles, sequences), None, logits_to_keep)
            if exits.update(i, logits, sequences):
                break
        y: Tensor = self.head(self.run_coda(state, angles, sequences), None, logits_to_keep)
        return y

    def run_prelude(
        self, x: Tensor, angles: Tensor | None, documents: Documents | TokenLayout | None
    ) -> Tensor:
        """Returns A_e prelude(x), the input of all iterations; x, y: `[b, s, d]`."""
        for block in self.blocks[: self.config.prelude_layers]:
            x = block(x, angles, documents)
        injection: Tensor = self.inject(x)
        return injection

    def iterate(
        self,
        state: Tensor,
        injection: Tensor,
        angles: Tensor | None,
        documents: Documents | TokenLayout | None,
    ) -> Tensor:
        """Runs one iteration; state, injection, y: `[b, s, d]`."""
        core = self.blocks[self.config.prelude_layers]
        following: Tensor = core(state, injection, angles, documents)
        return following

    def run_coda(
        self, state: Tensor, angles: Tensor | None, documents: Documents | TokenLayout | None
    ) -> Tensor:
        """Returns the input of the head for a state; state, y: `[b, s, d]`."""
        x = self.norm(state)
        for block in self.blocks[self.config.prelude_layers + 1 :]:
            x = block(x, angles, documents)
        y: Tensor = self.norm(x)
        return y
