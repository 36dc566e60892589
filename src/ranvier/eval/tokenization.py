"""Words: texts to tokens and back, as others do it with the tokenizer of a model.

Unlike in training, the tokenizer's own rules hold: it may begin a text with a token of its own, and
special tokens that are spelt out are special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ranvier.data.sources import imported
from ranvier.data.tokenizer import Tokenizer, tokenizer_of
from ranvier.data.tokenizer_config import tokens_of
from ranvier.errors import DataError


@dataclass
class Words:
    """A tokenizer with what its config says of it."""

    tokenizer: Tokenizer
    library: Any
    end: int
    """The token that ends a text."""
    prefix: int
    """The token before a text that nothing else is before."""

    @classmethod
    def of(cls, folder: Path) -> Words:
        """Those of a run: its tokenizer.json, and what lies beside it."""
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DataError(
                f"{folder} has no tokenizer.json: its corpora came as tokens. Evaluation needs the "
                f"tokenizer that made them. Copy its tokenizer.json to {path}."
            )
        tokenizer = tokenizer_of(path, folder)
        library = imported("tokenizers", "evaluation").Tokenizer.from_str(tokenizer.text)
        library.no_truncation()
        library.no_padding()
        end, first = tokenizer.end, library.token_to_id(tokens_of(folder).get("bos_token", ""))
        return cls(tokenizer, library, end, end if first is None else first)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The tokens of a text; special: with those that the tokenizer adds itself."""
        ids: list[int] = self.library.encode(text, add_special_tokens=special).ids
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text of tokens; special ones are left out."""
        text: str = self.library.decode(list(ids), skip_special_tokens=True)
        return text

    def name(self, token: int) -> str:
        """How a token is spelt."""
        return str(self.library.id_to_token(token))

    def cut(self, said: Sequence[int], stops: Sequence[str]) -> str:
        """The text of tokens up to the end, or to what stops it."""
        text = self.decode(said)
        for stop in filter(None, stops):
            text = text.partition(stop)[0]
        return text

    def ended(self, stops: Sequence[str]) -> Callable[[Sequence[int]], bool]:
        """Whether the last of the tokens that were said ends the text."""
        stops = [stop for stop in stops if stop]
        # a token has one byte at least, and the first of them may be of a character before
        most = max((len(stop.encode()) for stop in stops), default=0) + 4

        def ended(said: Sequence[int]) -> bool:
            if said[-1] == self.end:
                return True
            tail = self.decode(said[-most:]) if stops else ""
            return any(stop in tail for stop in stops)

        return ended
