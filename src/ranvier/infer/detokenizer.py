"""Text of tokens that arrive one by one; what was returned once is never taken back.

The text is that of decoding prompt and output as a whole, from where the prompt's text ends: the
text of a token depends on its neighbors (spaces, characters of several bytes). Each time, only a
window of the last tokens is decoded. It may begin anywhere, because decoders look at few neighbors;
when it has grown, it is moved on only if the text that is not returned yet stays the same.

Not returned yet are

* the replacement character U+FFFD at the end, which may be the beginning of a character,
* the text of byte tokens `<0x..>` until another token follows: their decoder replaces all of a
  sequence if it is not UTF-8 (SentencePiece),
* the longest end of the text that may be the beginning of a stop string.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from ranvier.data.tokenizer import Tokenizer
from ranvier.infer.sampling_params import SamplingParams

WINDOW_TOKENS = 8
"""Number of tokens that a window has at least, if there are as many."""
REPLACEMENT = "\ufffd"
MAX_PARTIAL_CHARACTER = 3
"""Maximum number of replacement characters of an incomplete character: its bytes."""
_BYTE_TOKEN = re.compile("<0x[0-9A-Fa-f]{2}>")


class StopStringMatcher:
    """Finds the first stop string in a text that arrives in pieces (Knuth, Morris and Pratt).

    The first is the one that ends first; if several end with the same character, the longest.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        # The longest first.
        self._stop = sorted(stop, key=len, reverse=True)
        self._borders = [_border_lengths(one) for one in self._stop]
        self._matched = [0] * len(stop)

    @property
    def num_matched(self) -> int:
        """Length of the longest end of the text that may be the beginning of a stop string."""
        return max(self._matched, default=0)

    def find(self, text: str) -> tuple[int, str] | None:
        """Returns the end in `text` of the first stop string, and the string; None if there is
        none.

        The characters after the end are not looked at.
        """
        if not self._stop:
            return None
        for end, character in enumerate(text, 1):
            found = self._advance(character)
            if found:
                return end, found
        return None

    def _advance(self, character: str) -> str:
        """Returns the longest stop string that ends with the next character, or nothing."""
        found = ""
        for i, (one, borders) in enumerate(zip(self._stop, self._borders, strict=True)):
            matched = self._matched[i]
            while matched and one[matched] != character:
                matched = borders[matched - 1]
            if one[matched] == character:
                matched += 1
            if matched == len(one):
                found = found or one
                # The next one may overlap it.
                matched = borders[-1]
            self._matched[i] = matched
        return found


def _border_lengths(text: str) -> list[int]:
    """Returns for each prefix the length of its longest proper prefix that is also its suffix."""
    borders = [0] * len(text)
    for i in range(1, len(text)):
        length = borders[i - 1]
        while length and text[length] != text[i]:
            length = borders[length - 1]
        borders[i] = length + (text[length] == text[i])
    return borders


class IncrementalDetokenizer:
    """The text of one request, returned as its tokens arrive."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], params: SamplingParams
    ) -> None:
        self.text_offsets: list[int] = []
        """For each token the index in the text where its first character is, or would be."""
        self.stop_string: str | None = None
        """The stop string that has ended the text."""
        self.num_tokens = 0
        """Number of tokens read; those after a stop string are not."""
        self._tokenizer = tokenizer
        self._params = params
        self._hidden: frozenset[int] = frozenset()
        if params.skip_special_tokens:
            self._hidden = frozenset(tokenizer.special_token_ids.values())
        self._matcher = StopStringMatcher(params.stop)
        self._pieces: list[str] = []
        self._waiting = ""
        """Decoded text that may be the beginning of a stop string."""
        self._num_decoded = 0
        """Length of the text decoded so far, returned or waiting."""
        self._window = self._first_window(prompt_token_ids)
        self._prompt_text = self._decode(self._window)
        self._num_seen = _stable_length(self._prompt_text)
        """Length of the window's text that is decoded or belongs to the prompt."""
        self._is_at_prompt = True
        self._window_limit = 2 * WINDOW_TOKENS

    @property
    def text(self) -> str:
        """All text that was returned."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return "".join(self._pieces)

    def append(self, token_ids: Iterable[int], *, stop_token: int | None = None) -> str:
        """Adds tokens and returns the new text that cannot change any more.

        Ends at a stop string; see `stop_string` and `num_tokens`. stop_token: the last of the
        tokens, if it has ended the request; it has no text unless `include_stop_str_in_output`.
        """
        tokens = list(token_ids)
        text = ""
        for i, token in enumerate(tokens):
            if self.stop_string is not None:
                break
            is_end = stop_token is not None and i == len(tokens) - 1
            self.num_tokens += 1
            self.text_offsets.append(self._num_decoded)
            if self._is_visible(token) and (not is_end or self._params.include_stop_str_in_output):
                self._window.append(token)
                if not self._is_byte(token):
                    text += self._release(self._read_window(is_final=False))
        return text

    def finish(self) -> str:
        """Returns the rest of the text, at the end of the request."""
        if self.stop_string is not None:
            return ""
        text = self._release(self._read_window(is_final=True))
        if self.stop_string is None:
            self._pieces.append(self._waiting)
            text += self._waiting
            self._waiting = ""
        return text

    def _first_window(self, prompt_token_ids: Sequence[int]) -> list[int]:
        """Returns the last visible tokens of the prompt."""
        window: list[int] = []
        for token in reversed(prompt_token_ids):
            if not self._is_visible(token):
                continue
            # A sequence of byte tokens is decoded as a whole.
            if len(window) >= WINDOW_TOKENS and not self._is_byte(window[-1]):
                break
            window.append(token)
        return window[::-1]

    def _is_visible(self, token: int) -> bool:
        """Whether the decoder sees a token; it skips those that it does not know."""
        return token not in self._hidden and token in self._tokenizer.token_names

    def _is_byte(self, token: int) -> bool:
        return _BYTE_TOKEN.fullmatch(self._tokenizer.token_names[token]) is not None

    def _decode(self, tokens: Sequence[int]) -> str:
        if self._params.skip_special_tokens:
            return self._tokenizer.decode(tokens)
        return self._tokenizer.decode_with_specials(tokens)

    def _read_window(self, *, is_final: bool) -> str:
        """Returns the text of the window that is new and stable, or all new text."""
        text = self._decode(self._window)
        if is_final:
            end = len(text)
        else:
            end = _stable_length(text)
        # An incomplete character at the end of the prompt belongs to the output if it changes.
        if self._is_at_prompt and end > self._num_seen:
            self._num_seen = _common_length(text[:end], self._prompt_text)
            self._is_at_prompt = self._num_seen == end < len(self._prompt_text)
        new = text[self._num_seen : end]
        self._num_seen = max(self._num_seen, end)
        has_grown = len(self._window) >= self._window_limit
        if has_grown and not self._is_at_prompt and not is_final:
            self._move_window(text)
        return new

    def _move_window(self, text: str) -> None:
        """Drops the first tokens of the window if its unseen text stays the same."""
        tokens = self._window[-WINDOW_TOKENS:]
        shorter = self._decode(tokens)
        num_equal = _common_length(text[::-1], shorter[::-1])
        num_unseen = len(text) - self._num_seen
        # At least one seen character is equal, too.
        if num_equal > num_unseen:
            self._window = tokens
            self._num_seen = len(shorter) - num_unseen
            self._window_limit = 2 * WINDOW_TOKENS
        else:
            self._window_limit = 2 * len(self._window)

    def _release(self, new: str) -> str:
        """Adds decoded text, and returns what cannot be part of a stop string."""
        text = self._waiting + new
        self._num_decoded += len(new)
        found = self._matcher.find(new)
        while found is not None and self.num_tokens < self._params.min_tokens:
            end, _ = found
            rest = self._matcher.find(new[end:])
            found = rest and (end + rest[0], rest[1])
        if found is not None:
            end, self.stop_string = found
            keep = len(self._waiting) + end
            if not self._params.include_stop_str_in_output:
                keep -= len(self.stop_string)
            self._waiting = ""
        else:
            keep = len(text) - self._matcher.num_matched
            self._waiting = text[keep:]
        self._pieces.append(text[:keep])
        return text[:keep]


def _stable_length(text: str) -> int:
    """Returns the length of a text without what may be an incomplete character at its end."""
    end = len(text)
    while end > max(len(text) - MAX_PARTIAL_CHARACTER, 0) and text[end - 1] == REPLACEMENT:
        end -= 1
    return end


def _common_length(first: str, second: str) -> int:
    """Returns the length of the longest common prefix."""
    for i, (one, other) in enumerate(zip(first, second, strict=False)):
        if one != other:
            return i
    return min(len(first), len(second))
