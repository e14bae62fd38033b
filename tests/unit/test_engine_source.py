"""From names to local directories, without a network."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.gguf_models import write_gguf
from tests.models import FAMILY_SETTINGS, tiny_model
from workers.engine import source
from workers.engine.fingerprint import fingerprint
from workers.engine.gguf import MANIFEST
from workers.engine.loader import load_head, load_tail
from workers.engine.source import Part, convert_once, hub_download, needed_files, prepare, resolve
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported, SplitInvalid
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


@pytest.mark.parametrize("place", [0.02, 0.5, 0.98])
def test_a_corrected_file_of_the_same_size_and_time_is_converted_anew(tmp_path: Path, place: float) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))
    first, status = convert_once(file, tmp_path / "cache"), file.stat()
    content = bytearray(file.read_bytes())
    begin = int(place * len(content)) if place > 0.1 else content.index(b"<|endoftext|>") + 2
    content[begin] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(status.st_atime_ns, status.st_mtime_ns))
    corrected = convert_once(file, tmp_path / "cache")
    assert corrected != first
    assert fingerprint(corrected) != fingerprint(first)


def test_a_file_has_one_fingerprint_wherever_and_after_whatever_it_is_converted(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "a" / "tiny.gguf", tiny_model(tmp_path / "one", seed=1))
    convert_once(file, tmp_path / "cache")
    write_gguf(file, tiny_model(tmp_path / "two", seed=2))
    (tmp_path / "b").mkdir()
    copy = Path(shutil.copy(file, tmp_path / "b"))
    here, there = convert_once(file, tmp_path / "cache"), convert_once(copy, tmp_path / "elsewhere")
    assert fingerprint(here) == fingerprint(there)
    assert here.name == there.name


def test_the_fingerprint_of_a_converted_file_outlives_an_upgrade(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))
    sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
    kept = json.dumps({"source": "tiny.gguf", "sha256": sha256, "conversion": 1}, indent=2) + "\n"
    assert (convert_once(file, tmp_path / "cache") / MANIFEST).read_text() == kept


def test_an_untouched_file_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))
    done = convert_once(file, tmp_path / "cache")
    file.chmod(0)
    file.chmod(0o644)  # touched, but the same
    assert convert_once(file, tmp_path / "cache") == done
    monkeypatch.setattr(hashlib, "file_digest", None)
    assert convert_once(file, tmp_path / "cache") == done


@pytest.mark.parametrize("note", ["", "{", "[]", "null", '{"stamp": []}'])
def test_a_note_that_cannot_be_read_is_made_anew(tmp_path: Path, note: str) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))
    done = convert_once(file, tmp_path / "cache")
    (kept,) = (tmp_path / "cache" / "digests").iterdir()
    before = kept.read_text()
    kept.write_text(note)
    assert convert_once(file, tmp_path / "cache") == done
    assert kept.read_text() == before


def test_a_conversion_in_a_cache_that_takes_no_notes_is_found(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))
    done = convert_once(file, tmp_path / "cache")
    shutil.rmtree(tmp_path / "cache" / "digests")
    (tmp_path / "cache" / "digests").touch()  # as unwritable as a read-only folder, also to root
    assert convert_once(file, tmp_path / "cache") == done
    assert "cannot be written, so the model's file is read whole again next time" in caplog.text


def test_a_file_that_changes_while_it_is_converted_leaves_nothing(tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "tiny.gguf", tiny_model(tmp_path / "origin"))

    def grow(*_: object) -> None:
        with file.open("ab") as stream:
            stream.write(b"more")

    with pytest.raises(ModelDamaged, match="was changed while it was converted"):
        convert_once(file, tmp_path / "cache", grow)
    assert not [path for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()]


def test_parts_are_one_model_whichever_is_named(tmp_path: Path) -> None:
    write_gguf(tmp_path / "big.gguf", tiny_model(tmp_path / "origin"), tensors_per_part=15)
    first, second, last = (str(tmp_path / f"big-0000{number}-of-00003.gguf") for number in (1, 2, 3))
    found = prepare(first, cache=tmp_path / "cache")
    assert found.num_layers == 4
    assert found.path == prepare(last, cache=tmp_path / "cache").path
    assert Path(found.path).name.startswith("big-")
    content = bytearray(Path(second).read_bytes())
    content[-100] ^= 1
    Path(second).write_bytes(content)
    assert prepare(first, cache=tmp_path / "cache").path != found.path


@pytest.mark.parametrize("family", FAMILY_SETTINGS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_complete_model_is_prepared_and_its_ends_are_told(tmp_path: Path, family: str, tied: bool) -> None:
    found = prepare(str(tiny_model(tmp_path, family, tied=tied)))
    assert (found.num_layers, found.context, found.end_token_ids) == (4, 512, (258,))
    assert (found.ends, found.warning) == ("<|im_end|> (258)", None)


def test_an_end_that_only_the_template_knows_is_told(tmp_path: Path) -> None:
    directory = tiny_model(tmp_path)
    for file in ("config.json", "generation_config.json"):
        (directory / file).write_text((directory / file).read_text().replace("258", "256"))
    settings = (directory / "tokenizer_config.json").read_text()
    (directory / "tokenizer_config.json").write_text(settings.replace("<|im_end|>", "<|endoftext|>"))
    found = prepare(str(directory))
    assert found.end_token_ids == (256,)
    assert found.warning is not None
    assert "writes <|im_end|> (258) behind an answer" in found.warning


def without_a_shard(directory: Path) -> None:
    into_shards(directory)
    (directory / "model-3.safetensors").unlink()


def with_a_short_shard(directory: Path) -> None:
    into_shards(directory)
    shard = directory / "model-3.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])


def with_an_empty_shard(directory: Path) -> None:
    into_shards(directory)
    (directory / "model-3.safetensors").write_bytes(b"")


def with_another_shard(directory: Path) -> None:
    into_shards(directory)
    shutil.copy(directory / "model-2.safetensors", directory / "model-3.safetensors")


def without_two_layers(directory: Path) -> None:
    file = directory / "model.safetensors"
    kept = {
        name: each for name, each in load_file(file).items() if ".layers.1." not in name and ".layers.3." not in name
    }
    save_file(kept, file)


def with_another_shape(directory: Path) -> None:
    file = directory / "model.safetensors"
    save_file(load_file(file) | {"model.norm.weight": torch.zeros(3)}, file)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (without_a_shard, r"model-3\.safetensors is missing"),
        (with_a_short_shard, r"model-3\.safetensors was cut off: \d+ of \d+ bytes"),
        (with_an_empty_shard, r"model-3\.safetensors is not a safetensors file, or was cut off"),
        (
            with_another_shard,
            r"model-3\.safetensors does not hold model\.layers\.3\.\S+, which model\.safetensors\.index",
        ),
        (without_two_layers, r"lacks 18 tensors of layers 1, 3, first model\.layers\.1\."),
        (with_another_shape, r"model\.norm\.weight has shape \[3\]"),
    ],
)
def test_an_incomplete_model_is_not_prepared(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    directory = tiny_model(tmp_path)
    damage(directory)
    with pytest.raises((ModelNotFound, ModelDamaged), match=message):
        prepare(str(directory))


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
