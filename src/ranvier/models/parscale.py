"""ParScale: parallel streams of each sample, with learned prefixes and a learned average.

A sample is copied P times after the embedding. The copies (streams) run as P samples; they differ
in what their tokens attend to: each layer has learned keys and values for each stream, which all
its tokens see, in every document, without positions (`models.prefix_attention`). After the last
norm the streams of a token are averaged, and the head gets

    h = Σ_p a_p h_p,   a = (1 - ε) softmax(W₂ silu(W₁ [h_1, ..., h_P] + b₁) + b₂) + ε / P

(Chen et al. 2025). Streams of a sample are consecutive samples, so that ranks which split a batch
have all streams of their samples. Plain PyTorch; imports only torch.

Shapes: b samples, P streams, s tokens, d embed.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from ranvier.models.config import DecoderConfig
from ranvier.models.document_attention import Documents, TokenLayout
from ranvier.models.paged_attention import PagedSequences
from ranvier.models.segment_attention import accumulation_dtype


def copy_to_streams(x: Tensor, streams: int) -> Tensor:
    """Returns consecutive copies of each sample, `[b·P, s, ...]` of `[b, s, ...]`."""
    return x.repeat_interleave(streams, 0)


def copy_layout_to_streams(
    positions: Tensor, documents: Documents | TokenLayout | None, streams: int
) -> tuple[Tensor, Documents | TokenLayout | None]:
    """Returns the positions `[b·P, s]` and documents of all streams."""
    # One row of positions is that of all samples.
    if positions.shape[0] > 1:
        positions = copy_to_streams(positions, streams)
    # The sequences of an inference step are those of all streams.
    if documents is None or isinstance(documents, PagedSequences):
        return positions, documents
    layout: Any = documents
    return positions, layout.repeat_samples(streams)


class StreamScores(nn.Linear):
    """Scores of the streams of each token; x: `[b, s, d]`, y: `[b, s, P]`, at least in fp32."""

    def forward(self, x: Tensor) -> Tensor:
        """Computes the scores."""
        wide = accumulation_dtype(x.dtype)
        return F.linear(x.to(wide), self.weight.to(wide), self.bias.to(wide))


class StreamAggregation(nn.Module):
    """Weighted average of the streams of each token.

    Args:
        config: Configuration of the decoder.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.streams = config.streams
        self.smoothing = config.parscale_smoothing
        self.dims: dict[str, tuple[Any, ...]] = {
            "hidden": ("embed", (self.streams, "embed")),
            "scores": ("stream", "embed"),
        }
        self.hidden = nn.Linear(self.streams * config.embed, config.embed)
        self.scores = StreamScores(config.embed, self.streams)

    def forward(self, x: Tensor) -> Tensor:
        """Returns the average `[b, s, d]` of the streams x `[b·P, s, d]`."""
        # On a grid a rank has a part of the features of each stream, as `hidden` expects.
        separate: Tensor = x.unflatten(0, (-1, self.streams))
        streams = separate.transpose(1, 2)  # (b, s, P, d)
        scores: Tensor = self.scores(F.silu(self.hidden(streams.flatten(2))))
        weights = scores.softmax(-1) * (1.0 - self.smoothing) + self.smoothing / self.streams
        return (streams * weights.to(x.dtype).unsqueeze(-1)).sum(2)
