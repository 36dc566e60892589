"""Where a published model is: a directory or file of this machine, or a Hugging Face Hub name.

Without torch, so that a missing model is reported at once.
"""

from __future__ import annotations

from pathlib import Path

from ranvier.errors import PlanError


def find_model(source: str) -> Path:
    """The path of a model: a directory, a file, or the snapshot of a Hugging Face Hub name."""
    path = Path(source)
    if (path / "adapter_config.json").exists() and not (path / "config.json").exists():
        raise PlanError(
            f"{source!r} is an adapter (adapter_config.json), no model. It is trained beside the "
            "weights of its base. Give the base as SRC or train.init_from, and this as "
            "lora.init_from."
        )
    if path.exists():
        return path
    # A name on the hub is `name` or `owner/name`; anything else is a path that does not exist.
    if source.count("/") > 1 or source.startswith((".", "/", "~")) or not source:
        raise PlanError(
            f"{source!r} is not there. A model is a directory with config.json and *.safetensors, "
            "or the name of one on the hub. Check the path."
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise PlanError(
            f"{source!r} is no directory here, and huggingface_hub, which fetches models, is not "
            "installed. Give a directory, or install the extra: pip install 'ranvier[hf]'."
        ) from None
    try:
        # No pickles and no code.
        patterns = ["*.safetensors", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE", "NOTICE"]
        return Path(snapshot_download(source, allow_patterns=patterns))
    # The hub client raises many kinds of errors, also those of the network.
    except Exception as error:
        raise PlanError(
            f"{source!r} is no directory here and cannot be fetched: "
            f"{str(error).splitlines()[0]:.200}. Give the path of a directory with config.json "
            "and *.safetensors."
        ) from None
