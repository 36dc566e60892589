"""Finds a pretrained model: a local directory or file, or a name on the Hugging Face Hub.

Works without torch, so that a missing model is reported immediately.
"""

from __future__ import annotations

from pathlib import Path

from ranvier.errors import PlanError


def find_model(source: str) -> Path:
    """Returns the path of a model: a directory, a file, or the snapshot of a Hugging Face Hub
    name."""
    path = Path(source)
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise PlanError(
            f"{source!r} is an adapter (adapter_config.json), not a model. An adapter needs the "
            "weights of its base model. Pass the base model as SRC or train.init_from, and the "
            "adapter as lora.init_from."
        )
    if path.exists():
        return path
    # A name on the Hub is `name` or `owner/name`; anything else is a path that does not exist.
    if source.count("/") > 1 or source.startswith((".", "/", "~")) or not source:
        raise PlanError(
            f"{source!r} does not exist. A model is a directory with config.json and "
            "*.safetensors, or a name on the Hugging Face Hub. Check the path."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PlanError(
            f"{source!r} is not a local directory, and huggingface_hub, which downloads models, is "
            "not installed. Pass a directory, or install the extra: pip install 'ranvier[hf]'."
        ) from None
    try:
        # No pickles, and no code.
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE", "NOTICE"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    # The Hub client raises many kinds of errors, including network errors.
    except Exception as error:
        reason = str(error).splitlines()[0].removeprefix("Got: ")
        raise PlanError(
            f"{source!r} is not a local directory and cannot be downloaded: {reason:.200}. "
            "Pass the path of a directory with config.json and *.safetensors."
        ) from None
