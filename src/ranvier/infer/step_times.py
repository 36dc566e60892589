"""Chooses the budget of a step from measured steps, so that a step takes at most a given time.

Running requests get a token per step, so the time of a step is their inter-token latency. The
seconds of a step are taken as linear in its tokens, seconds = a + b · tokens. Both are fitted to
the last steps; older ones count less, because contexts grow. Pure: no clock, no state.
"""

from __future__ import annotations

from typing import NamedTuple

DECAY = 0.98
"""Weight of a step relative to the one after it: about the last 50 steps count."""
TARGET_SHARE = 0.9
"""Share of the target that a mean step may take, because some take longer."""
MIN_PROMPT_TOKENS = 16
"""Tokens of prompts that a step may always have, so that new requests progress."""


class StepTimes(NamedTuple):
    """Weighted sums over measured steps: tokens t and seconds y."""

    weight: float = 0.0
    tokens: float = 0.0
    seconds: float = 0.0
    tokens_squared: float = 0.0
    tokens_seconds: float = 0.0

    def add(self, tokens: int, seconds: float) -> StepTimes:
        """Returns the sums with one more step."""
        return StepTimes(
            DECAY * self.weight + 1.0,
            DECAY * self.tokens + tokens,
            DECAY * self.seconds + seconds,
            DECAY * self.tokens_squared + tokens * tokens,
            DECAY * self.tokens_seconds + tokens * seconds,
        )

    def fit(self) -> tuple[float, float]:
        """Returns a and b, neither of them negative; there must be a step.

        Steps of one size alone are taken as proportional to their tokens, which is careful.
        """
        mean = self.tokens / self.weight
        spread = self.tokens_squared / self.weight - mean * mean
        slope = 0.0
        if spread > 1e-9 * mean * mean:
            joint = self.tokens_seconds / self.weight - mean * self.seconds / self.weight
            slope = max(0.0, joint / spread)
        else:
            slope = self.seconds / max(self.tokens, 1.0)
        start = self.seconds / self.weight - slope * mean
        if start < 0.0:
            # The line through the origin with the least squared error.
            return 0.0, self.tokens_seconds / self.tokens_squared
        return start, slope


def choose_token_budget(
    times: StepTimes, target_seconds: float, *, num_decodes: int, most: int
) -> int:
    """Returns the number of tokens of a step that takes at most `target_seconds`.

    It has room for one token of each running request, as leaving one out would cost it a whole
    step, and for a few tokens of prompts. Without running requests there is no limit.

    num_decodes: running requests that get a token per step. most: maximum number of tokens.
    """
    least = min(most, num_decodes + MIN_PROMPT_TOKENS)
    if num_decodes == 0:
        return most
    if times.weight == 0.0:
        return least
    start, slope = times.fit()
    room = TARGET_SHARE * target_seconds - start
    if room <= slope * least:
        return least
    if room >= slope * most:
        return most
    return int(room / slope)
