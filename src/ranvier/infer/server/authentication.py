"""API keys: where they come from, and how a request is matched with one.

Only digests are kept, so that a key cannot appear in a log or an error.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ranvier.errors import PlanError

API_KEY_VARIABLE = "RANVIER_API_KEY"
"""Environment variable with API keys, separated by commas."""
MAX_KEY_FILE_BYTES = 1 << 20


@dataclass(frozen=True)
class ApiKeys:
    """Digests of the accepted keys; without any, every request is accepted."""

    digests: tuple[bytes, ...] = ()

    @classmethod
    def from_texts(cls, keys: Sequence[str]) -> ApiKeys:
        """Returns the digests of keys."""
        return cls(tuple(hashlib.sha256(key.encode()).digest() for key in keys))

    def find_owner(self, header: bytes) -> str | None:
        """Returns a name for the key of an Authorization header; None if it is not accepted.

        The name is the start of the digest of the key, empty if no key is needed.
        """
        if not self.digests:
            return ""
        scheme, _, key = header.partition(b" ")
        digest = hashlib.sha256(key.strip()).digest()
        found = ""
        # All keys are compared, so that the time does not depend on which one matches.
        for known in self.digests:
            if hmac.compare_digest(known, digest):
                found = known.hex()[:16]
        if scheme.lower() == b"bearer" and found:
            return found
        return None


def read_api_keys(path: str, variable: str) -> list[str]:
    """Returns the keys in a file and in the text of `API_KEY_VARIABLE`."""
    keys = [key.strip() for key in variable.split(",") if key.strip()]
    if path:
        try:
            with Path(path).open(encoding="utf-8") as file:
                text = file.read(MAX_KEY_FILE_BYTES)
        except (OSError, UnicodeDecodeError) as error:
            reason = getattr(error, "strerror", None) or "it is not UTF-8"
            raise PlanError(
                f"serve.api_key_file={path!r} cannot be read: {reason}. It must be a text file "
                "with one key per line. Check the path."
            ) from None
        lines = [line.strip() for line in text.splitlines()]
        found = [line for line in lines if line and not line.startswith("#")]
        if not found:
            raise PlanError(
                f"serve.api_key_file={path!r} contains no key. It must have one key per line. Add "
                "a key, or remove the setting."
            )
        keys.extend(found)
    return keys
