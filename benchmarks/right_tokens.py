"""Checks that engines which are timed generate the right tokens, and kernels the right outputs.

All engines get the same seeded weights (`right_step.TwinWeights`) and generate greedy tokens for
eight prompts, as they are timed. Each token must be the best one by the logits of transformers'
model in fp32, after the prompt and the tokens before it, or closer to it than the rounding of the
engine's dtype. In fp32 this means that all tokens are equal.

The outputs of a kernel are compared with those of a plain twin in a wider dtype; the limit is
relative to the largest magnitude.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from right_step import Check
from torch import Tensor

NUM_PROMPTS = 8
PROMPT_TOKENS = 48
NEW_TOKENS = 16
"""Tokens of each prompt and answer on a GPU."""


def check_tokens(
    name: str,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    logits_of: Callable[[Sequence[int]], Tensor],
    dtype: torch.dtype,
) -> Check:
    """Compares greedy tokens with the logits of the twin.

    logits_of: returns the logits `[s, v]` of the twin for a sequence. dtype: of the engine.
    """
    problems = []
    num_tokens = num_best = 0
    # Both logits that are compared are rounded.
    rounding = 2.0 * torch.finfo(dtype).eps
    if len(answers) != len(prompts):
        problems.append(f"{len(answers)} answers to {len(prompts)} prompts")
    for i, (prompt, answer) in enumerate(zip(prompts, answers, strict=False)):
        if not answer:
            problems.append(f"no answer to prompt {i}")
            continue
        logits = logits_of([*prompt, *answer])[len(prompt) - 1 : -1].double()
        best, token = logits.max(-1)
        tokens = torch.tensor(answer, device=logits.device)
        distance = best - logits.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        is_right = distance <= rounding * logits.abs().amax(-1)
        num_tokens += len(answer)
        num_best += int((token == tokens).sum())
        if not bool(is_right.all()):
            place = int((~is_right).nonzero()[0])
            problems.append(
                f"token {place} of prompt {i} is {answer[place]} instead of {int(token[place])}, "
                f"whose logit is {float(distance[place]):.4f} larger"
            )
    values = f"{num_best} of {num_tokens} tokens are the best, all within {rounding:.2g} of a logit"
    return Check(name, values, tuple(problems))


def check_outputs(name: str, outputs: Tensor, twin: Tensor, limit: float) -> Check:
    """Compares the outputs of a kernel with those of a twin, relative to the largest magnitude."""
    if outputs.shape != twin.shape:
        shapes = f"shape {tuple(outputs.shape)} instead of {tuple(twin.shape)}"
        return Check(name, shapes, (shapes,))
    error = float((outputs.double() - twin.double()).abs().max() / twin.double().abs().max())
    values = f"largest error {error:.2e} of the largest magnitude"
    # `not (a <= b)` also finds NaN.
    problems = () if error <= limit else (f"error {error:.2e} (at most {limit:.0e})",)
    return Check(name, values, problems)
