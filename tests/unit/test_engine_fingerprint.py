"""The same content has the same fingerprint, on any machine; other content has another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.models import tiny_model
from tests.unit.test_engine_source import COMMIT, into_shards
from workers.engine.fingerprint import fingerprint
from workers.engine.gguf import MANIFEST
from workers.errors import ModelNotFound


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def test_copies_and_other_spreads_over_files_are_the_same_model(model: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    assert fingerprint(copy) == fingerprint(model)
    into_shards(copy)
    assert fingerprint(copy) == fingerprint(model)


def test_which_library_version_saved_the_config_does_not_matter(model: Path) -> None:
    before = fingerprint(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "transformers_version": "9"}, sort_keys=True))
    assert fingerprint(model) == before


@pytest.mark.parametrize("file", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_every_setting_counts(model: Path, file: str) -> None:
    before = fingerprint(model)
    content = json.loads((model / file).read_text())
    (model / file).write_text(json.dumps({**content, "something": 1}))
    assert fingerprint(model) != before


def test_other_weights_of_the_same_shapes_are_another_model(model: Path) -> None:
    before = fingerprint(model)
    weights = load_file(model / "model.safetensors")
    weights["model.layers.2.mlp.up_proj.weight"] *= 1.01
    save_file(weights, model / "model.safetensors")
    assert fingerprint(model) != before


def test_another_dtype_is_another_model(model: Path) -> None:
    before = fingerprint(model)
    halves = {name: tensor.half() for name, tensor in load_file(model / "model.safetensors").items()}
    save_file(halves, model / "model.safetensors")
    assert fingerprint(model) != before


def test_a_hub_snapshot_needs_only_its_own_half(model: Path, tmp_path: Path) -> None:
    into_shards(model)
    snapshots = tmp_path / "models--acme--tiny" / "snapshots"
    snapshot = Path(shutil.copytree(model, snapshots / COMMIT))
    before = fingerprint(snapshot)
    (snapshot / "model-3.safetensors").unlink()
    assert fingerprint(snapshot) == before
    assert fingerprint(snapshot.rename(snapshots / COMMIT[::-1])) != before


def test_elsewhere_a_missing_weight_file_is_named(model: Path) -> None:
    into_shards(model)
    (model / "model-3.safetensors").unlink()
    with pytest.raises(ModelNotFound, match=r"model-3\.safetensors is missing"):
        fingerprint(model)


def test_a_converted_model_is_what_it_was_made_from(model: Path, tmp_path: Path) -> None:
    (model / MANIFEST).write_text('{"sha256": "ab", "conversion": 1}')
    copy = Path(shutil.copytree(model, tmp_path / "copy"))
    (copy / "model.safetensors").unlink()
    assert fingerprint(copy) == fingerprint(model)
    (copy / MANIFEST).write_text('{"sha256": "cd", "conversion": 1}')
    assert fingerprint(copy) != fingerprint(model)
