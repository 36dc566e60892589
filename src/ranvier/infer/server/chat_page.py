"""The chat page, and the content security policy under which it works."""

from __future__ import annotations

import base64
import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

CHAT_PAGE_PATH = Path(__file__).with_name("chat_page.html")


@dataclass(frozen=True)
class ChatPage:
    """A page without external resources."""

    content: str
    policy: str
    """Value of the header Content-Security-Policy: allows this style, this script and the server
    itself, nothing else."""


def read_chat_page() -> ChatPage:
    """Returns the chat page with the policy that names its style and script by their hashes."""
    content = CHAT_PAGE_PATH.read_text(encoding="utf-8")
    style = _hash_element(content, "style")
    script = _hash_element(content, "script")
    policy = (
        f"default-src 'none'; style-src {style}; script-src {script}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
    return ChatPage(content, policy)


def _hash_element(content: str, tag: str) -> str:
    """Returns the source expression of the only element with this tag."""
    (inner,) = re.findall(rf"<{tag}>(.*?)</{tag}>", content, re.DOTALL)
    digest = hashlib.sha256(inner.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"
