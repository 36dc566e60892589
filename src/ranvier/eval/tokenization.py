"""Tokenizes texts for evaluation, as other frameworks do with the tokenizer of a model.

Unlike in training, the tokenizer's own rules apply: it may prepend a token to a text, and special
tokens that are spelled out in the text are special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.data.sources import import_optional
from ranvier.data.tokenizer import Tokenizer, load_tokenizer
from ranvier.data.tokenizer_config import read_special_tokens
from ranvier.errors import DataError


@dataclass
class EvalTokenizer:
    """A tokenizer with the special tokens of its config."""

    run_tokenizer: Tokenizer
    hf_tokenizer: Any
    eos_token_id: int
    """The token that ends a text."""
    prefix_token_id: int
    """The token that precedes a text without context."""

    @classmethod
    def from_run(cls, folder: Path) -> EvalTokenizer:
        """Loads the tokenizer of a run: its tokenizer.json and the files next to it."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"{folder} has no tokenizer.json, because its corpora were given as tokens. "
                "Evaluation needs the tokenizer that was used. Copy its tokenizer.json to "
                f"{path}."
            )
        tokenizer = load_tokenizer(path, folder)
        library = import_optional("tokenizers", "evaluation").Tokenizer.from_str(
            tokenizer.json_text
        )
        # The file may configure both; lengths are handled by the caller.
        library.no_truncation()
        library.no_padding()
        end = tokenizer.eos_token_id
        first = library.token_to_id(read_special_tokens(folder).get("bos_token", ""))
        return cls(tokenizer, library, end, end if first is None else first)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Returns the tokens of a text; special: including those that the tokenizer adds itself."""
        ids: list[int] = self.hf_tokenizer.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of tokens, without special tokens."""
        text: str = self.hf_tokenizer.decode(list(ids), skip_special_tokens=True)
        return text

    def token_name(self, token: int) -> str:
        """Returns the spelling of a token."""
        return str(self.hf_tokenizer.id_to_token(token))

    def decode_until_stop(self, said: Sequence[int], stops: Sequence[str]) -> str:
        """Returns the text of tokens up to the end, or up to the first stop string."""
        text = self.decode(said)
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text

    def make_stop_check(self, stops: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Returns a function that checks whether the last generated token ends the text."""
        stops = [stop for stop in stops if stop]
        # Decode only a tail that is long enough for a stop string: a token has at least one byte,
        # and up to 4 more bytes belong to a character that the tail cuts.
        most = max((len(stop.encode()) for stop in stops), default=0) + 4

        def ended(said: Sequence[int]) -> bool:
            if said[-1] == self.eos_token_id:
                return True
            if stops:
                tail = self.decode(said[-most:])
            else:
                tail = ""
            return any(stop in tail for stop in stops)

        return ended
