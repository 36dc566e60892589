"""Published models of strangers: see README.md beside this file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hostile.cases import change, rows, tells_secret, within
from ranvier.checkpoint.hf.model import entries_of, shapes_of
from ranvier.data.tokenizer import ByteTokenizer
from ranvier.errors import RanvierError, UnsafeInputError
from ranvier.models.hf.registry import FAMILIES
from ranvier.train.import_export import export_model, import_model

MODELS = rows("models.txt")
CONFIG = {
    "model_type": "llama",
    "vocab_size": 257,
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "eos_token_id": 256,
}


def published(folder: Path) -> Path:
    """A small model as others publish it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    ByteTokenizer().save(folder / "tokenizer.json")
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (folder / "generation_config.json").write_text('{"eos_token_id": 256}')
    family = FAMILIES["llama"]
    config = family.config_from_hf(CONFIG)
    shapes = shapes_of(config)
    tensors = {
        one.name: torch.ones(one.compute_shape(shapes)) for one in entries_of(family, config)
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return published(tmp_path_factory.mktemp("good") / "model")


@pytest.mark.parametrize("name", MODELS)
def test_a_model_ends_as_its_line_says(name: str, model: Path, tmp_path: Path) -> None:
    outcome, _, changes = MODELS[name]
    folder = tmp_path / "in"
    shutil.copytree(model, folder)
    change(folder, tmp_path / "outside", changes)
    run, out = tmp_path / "run", tmp_path / "out"
    with within(240):
        if outcome == "ok":
            import_model(str(folder), run)
            export_model(run, out)
            assert not tells_secret(out)
            return
        with pytest.raises(RanvierError) as found:
            import_model(str(folder), run)
    assert str(found.value.exit_code) == outcome, str(found.value)
    assert not run.exists() and not any(tmp_path.glob(".run*")), "something is left of it"


def hub_cache(model: Path, repo: Path) -> Path:
    """The model as a hub's cache keeps it: a snapshot of links to blobs."""
    snapshot = repo / "snapshots" / "0123abcd"
    (repo / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for i, path in enumerate(sorted(model.iterdir())):
        shutil.copyfile(path, repo / "blobs" / f"{i:040x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{i:040x}")
    return snapshot


def test_a_snapshot_of_a_hub_is_imported_and_exported(model: Path, tmp_path: Path) -> None:
    snapshot = hub_cache(model, tmp_path / "models--a--b")
    import_model(str(snapshot), tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "out")
    for name in ("tokenizer.json", "chat_template.jinja", "generation_config.json"):
        out = tmp_path / "out" / name
        assert not out.is_symlink() and out.read_bytes() == (model / name).read_bytes()


def test_links_of_a_snapshot_lead_to_its_own_blobs_only(model: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "secret.txt").write_text("{}")

    def refused(snapshot: Path) -> None:
        with pytest.raises(UnsafeInputError):
            import_model(str(snapshot), tmp_path / "run")
        assert not (tmp_path / "run").exists()

    for i, target in enumerate(
        (
            f"{outside}/secret.txt",
            "../../../outside/secret.txt",
            "../../blobs/../../outside/secret.txt",
            "../../blobs/..",
            "../0123abcd/config.json",
        )
    ):
        snapshot = hub_cache(model, tmp_path / f"models--a--{i}")
        (snapshot / "LICENSE").symlink_to(target)
        refused(snapshot)
    snapshot = hub_cache(model, tmp_path / "models--a--chain")  # a blob that is a link itself
    (snapshot.parents[1] / "blobs" / "ff").symlink_to(outside / "secret.txt")
    (snapshot / "LICENSE").symlink_to("../../blobs/ff")
    refused(snapshot)
    snapshot = hub_cache(model, tmp_path / "models--a--blobs")  # blobs that are elsewhere
    shutil.move(snapshot.parents[1] / "blobs", outside / "blobs")
    (snapshot.parents[1] / "blobs").symlink_to(outside / "blobs")
    refused(snapshot)
