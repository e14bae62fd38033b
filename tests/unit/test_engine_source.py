"""From names to local directories, without a network."""

from __future__ import annotations

import fnmatch
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.gguf_models import write_gguf
from tests.models import tiny_model
from workers.engine import source
from workers.engine.loader import load_head, load_tail
from workers.engine.source import Part, convert_once, hub_download, needed_files, resolve
from workers.errors import ModelNotFound, ModelUnsupported, SplitInvalid
from workers.settings import CacheSettings

COMMIT = "0123456789abcdef0123456789abcdef01234567"


def into_shards(directory: Path) -> None:
    """Spread a model's weights over files: one for the embeddings, one per layer, one for the rest."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    weight_map = {}
    for name in tensors:
        parts = name.split(".")
        place = parts[2] if parts[1] == "layers" else "embed" if "embed_tokens" in name else "end"
        weight_map[name] = f"model-{place}.safetensors"
    for file in set(weight_map.values()):
        save_file({name: tensors[name] for name in tensors if weight_map[name] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


class FakeHub:
    """A hub with the model acme/tiny; `fetched` are the weight files that anyone asked for."""

    def __init__(self, remote: Path, cache: Path) -> None:
        self.remote = remote
        self.local = cache / "models--acme--tiny" / "snapshots" / COMMIT
        self.fetched: set[str] = set()
        self.revisions: list[str | None] = []

    def download(self, repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
        if repo != "acme/tiny":
            raise ModelNotFound(f"{repo} does not exist")
        self.revisions.append(revision)
        self.local.mkdir(parents=True, exist_ok=True)
        for file in self.remote.iterdir():
            if any(fnmatch.fnmatch(file.name, pattern) for pattern in patterns):
                shutil.copy(file, self.local)
                if file.suffix in (".safetensors", ".bin"):
                    self.fetched.add(file.stem.removeprefix("model-"))
        return self.local


@pytest.fixture
def hub(tmp_path: Path) -> FakeHub:
    remote = tiny_model(tmp_path / "remote")
    into_shards(remote)
    return FakeHub(remote, tmp_path / "cache")


def test_a_directory_is_itself_and_is_cut_in_the_middle(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path, layers=5)
    found = resolve(str(directory))
    assert found.path == directory
    assert (found.num_layers, found.split, found.context) == (5, 2, 512)
    assert resolve(str(directory), split=4).split == 4
    with pytest.raises(SplitInvalid):
        resolve(str(directory), split=5)


def test_a_model_of_one_layer_cannot_be_cut(tmp_path: Path) -> None:
    with pytest.raises(ModelUnsupported, match="single layer"):
        resolve(str(tiny_model(tmp_path, layers=1)))


@pytest.mark.parametrize(
    ("part", "files"),
    [
        (Part.HEAD, {"embed", "0"}),
        (Part.TAIL, {"1", "2", "3", "end"}),
        (Part.WHOLE, {"embed", "0", "1", "2", "3", "end"}),
    ],
)
def test_only_the_files_of_the_part_are_fetched_from_the_hub(hub: FakeHub, part: Part, files: set[str]) -> None:
    found = resolve("acme/tiny", part, 1, download=hub.download)
    assert hub.fetched == files
    assert found.path == hub.local
    if part is Part.HEAD:
        load_head(found.path, 1, slots=1, max_length=16, max_query=4)
    elif part is Part.TAIL:
        load_tail(found.path, 1, slots=1, max_length=16, max_query=4)


def test_the_tail_of_a_tied_hub_model_fetches_the_embeddings_too(tmp_path: Path) -> None:
    remote = tiny_model(tmp_path / "remote", tied=True)
    into_shards(remote)
    hub = FakeHub(remote, tmp_path / "cache")
    found = resolve("acme/tiny", Part.TAIL, 3, download=hub.download)
    assert hub.fetched == {"embed", "3", "end"}
    load_tail(found.path, 3, slots=1, max_length=16, max_query=4)


def test_weights_come_from_the_commit_that_the_config_came_from(hub: FakeHub) -> None:
    resolve("acme/tiny@main", Part.HEAD, download=hub.download)
    assert hub.revisions == ["main", COMMIT]


def test_a_hub_model_in_one_file_is_fetched_whole(tmp_path: Path) -> None:
    hub = FakeHub(tiny_model(tmp_path / "remote"), tmp_path / "cache")
    found = resolve("acme/tiny", Part.HEAD, download=hub.download)
    assert needed_files(found.path, Part.HEAD, 2) == ("model.safetensors",)
    assert (found.path / "model.safetensors").is_file()


def test_a_hub_model_with_pickled_weights_only_is_refused(tmp_path: Path) -> None:
    remote = tiny_model(tmp_path / "remote")
    (remote / "model.safetensors").rename(remote / "pytorch_model.bin")
    hub = FakeHub(remote, tmp_path / "cache")
    with pytest.raises(ModelNotFound, match="safetensors only"):
        resolve("acme/tiny", download=hub.download)
    assert hub.fetched == set()


@pytest.mark.parametrize("name", ["no-such-model", "./a/b", "/nowhere/at-all", "a/b/c", "~/nothing", ""])
def test_a_name_that_is_nothing_is_refused(name: str) -> None:
    with pytest.raises(ModelNotFound, match="neither a directory"):
        resolve(name)


def test_a_hub_that_cannot_be_reached_gives_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> str:
        raise OSError("cannot find the snapshot\nand much more")

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(ModelNotFound, match=r"acme/tiny is no local directory .* cannot find the snapshot$"):
        hub_download("acme/tiny", None, ["*.json"])


def test_a_gguf_file_is_converted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin", tied=True))
    steps: list[tuple[str, int, int]] = []
    first = resolve(str(file), cache=tmp_path / "cache", progress=lambda *step: steps.append(step))
    assert steps[-1][1] == steps[-1][2] > 0
    assert first.path.parent == tmp_path / "cache" / "models"
    monkeypatch.setattr(source.gguf, "convert", None)
    assert resolve(str(file), cache=tmp_path / "cache") == first


def test_what_a_killed_conversion_left_is_replaced(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin", tied=True))
    done = convert_once(file, tmp_path / "cache")
    partial = done.with_name(f"{done.name}.partial")
    done.rename(partial)
    (partial / "config.json").write_text("{")
    assert convert_once(file, tmp_path / "cache") == done
    assert not partial.exists()
    assert json.loads((done / "config.json").read_text())["model_type"] == "llama"


def test_another_file_of_the_same_name_is_another_conversion(tmp_path: Path) -> None:
    one = write_gguf(tmp_path / "a" / "tiny.gguf", tiny_model(tmp_path / "one", tied=True, seed=1))
    two = write_gguf(tmp_path / "b" / "tiny.gguf", tiny_model(tmp_path / "two", tied=True, seed=2))
    assert convert_once(one, tmp_path / "cache") != convert_once(two, tmp_path / "cache")


def test_a_missing_gguf_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"nothing\.gguf does not exist"):
        resolve(str(tmp_path / "nothing.gguf"))


def test_the_cache_is_the_users_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SHARDQ_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert CacheSettings().directory == Path.home() / ".cache" / "shardq"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert CacheSettings().directory == Path("/xdg/shardq")
    monkeypatch.setenv("SHARDQ_CACHE_DIR", "/own")
    assert CacheSettings().directory == Path("/own")
