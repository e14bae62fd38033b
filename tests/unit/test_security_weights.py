"""A model's directory is data: nothing in it is ever run."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from tests.models import tiny_model
from workers.engine.loader import load_config
from workers.engine.source import Part, needed_files, resolve
from workers.engine.tokenizer import load_tokenizer
from workers.errors import ModelNotFound, WorkerError
from workers.served import ServedModel
from workers.settings import HeadSettings


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self._mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self._mark),)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return tiny_model(tmp_path / "model")


def load_all(directory: Path) -> None:
    """What a head and a tail do with a directory."""
    served = ServedModel.resolve(HeadSettings(model=str(directory), max_length=64), Part.HEAD, lambda *_: None)
    served.load_head(slots=1, max_query=4)
    served.load_tail(slots=1, max_query=4)
    load_tokenizer(directory)


def test_a_directory_with_pickled_weights_only_is_refused_and_nothing_is_unpickled(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelNotFound, match="pickled"):
        load_all(model)
    assert not mark.exists()


def test_pickled_weights_beside_safetensors_are_not_looked_at(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    for name in ("pytorch_model.bin", "training_args.bin", "model.pt"):
        (model / name).write_bytes(pickle.dumps(Bomb(mark)))
    load_all(model)
    assert not mark.exists()


def test_weights_that_are_a_pickle_under_another_name_are_refused(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    (model / "model.safetensors").write_bytes(pickle.dumps(Bomb(mark)))
    with pytest.raises(WorkerError):
        load_all(model)
    assert not mark.exists()


def test_an_index_that_names_a_pickle_is_refused(model: Path, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    names = list(load_file(model / "model.safetensors"))
    (model / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb(mark)))
    (model / "model.safetensors").unlink()
    index = {"weight_map": dict.fromkeys(names, "pytorch_model.bin")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(WorkerError):
        load_all(model)
    assert not mark.exists()


@pytest.mark.parametrize("model_type", [None, "evil"])
def test_code_that_comes_with_a_model_is_never_run(model: Path, tmp_path: Path, model_type: str | None) -> None:
    mark = tmp_path / "run"
    code = f"import os\nos.mkdir({str(mark)!r})\nclass Evil: ...\n"
    for module in ("configuration_evil.py", "modeling_evil.py", "tokenization_evil.py", "__init__.py"):
        (model / module).write_text(code)
    config = json.loads((model / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "configuration_evil.Evil", "AutoModelForCausalLM": "modeling_evil.Evil"}
    config["model_type"] = model_type or config["model_type"]
    (model / "config.json").write_text(json.dumps(config))
    tokenizer = json.loads((model / "tokenizer_config.json").read_text())
    tokenizer["auto_map"] = {"AutoTokenizer": ["tokenization_evil.Evil", "tokenization_evil.Evil"]}
    (model / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    if model_type is None:
        load_all(model)
    else:
        with pytest.raises(WorkerError):
            load_config(model)
    assert not mark.exists()


def test_only_safetensors_are_asked_of_the_hub(model: Path) -> None:
    asked: list[str] = []

    def download(repo: str, revision: str | None, patterns: Any) -> Path:
        asked.extend(patterns)
        return model

    resolve("owner/name", Part.HEAD, download=download)
    assert set(needed_files(model, Part.HEAD, 2)) <= set(asked)
    assert not [pattern for pattern in asked if pattern.endswith((".bin", ".pt", ".py", "*"))]
