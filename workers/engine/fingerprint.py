"""The identity of a model's content, equal on two machines that hold the same model.

It covers config, tokenizer, generation config and *all* tensors, not only the half that a machine has:

- a converted model: the file it was made from (its hash stands in the manifest);
- a hub model: its commit, which names every byte;
- a model with dummy weights: that they are dummies, for these follow from the config;
- any other directory: name, dtype and shape of every tensor, and a few bytes of each, which tell a fine-tuned
  model from its origin without reading gigabytes.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from workers.engine import checkpoint, gguf
from workers.errors import ModelNotFound

log = logging.getLogger(__name__)

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
CONFIG_FILES = ("config.json", "generation_config.json")
#: written by whichever library saved the file last; it does not change what the model computes
VOLATILE_KEYS = frozenset({"transformers_version", "_name_or_path"})
#: bytes read from the middle of every tensor
SAMPLE_BYTES = 256


def fingerprint(directory: Path | str, *, dummy: bool = False) -> str:
    """The hex digest of a model directory; ModelNotFound if a file that it depends on is missing.

    `dummy`: of the model with `workers.engine.dummy`'s weights, whatever weights the directory holds.
    """
    path = Path(directory)
    if dummy:
        return _digest([*_config_parts(path), *_tokenizer_parts(path), b"dummy"])
    manifest = path / gguf.MANIFEST
    if manifest.is_file():
        return _digest([manifest.read_bytes()])
    parts = [*_config_parts(path), *_tokenizer_parts(path)]
    commit = _hub_commit(path)
    parts.extend([commit.encode()] if commit else _tensor_parts(path))
    return _digest(parts)


def content_digest(files: Sequence[Path], notes: Path) -> str:
    """The SHA-256 of a file, of several that of their digests.

    It is noted in the directory `notes`, and a file is read again only if anything tells that it is another one: path,
    size, inode, or the times of its content and of its inode.
    """
    digests = [_noted_sha256(file.resolve(), notes) for file in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()


def _noted_sha256(file: Path, notes: Path) -> str:
    status = file.stat()
    stamp = [str(file), status.st_size, status.st_ino, status.st_mtime_ns, status.st_ctime_ns]
    note = notes / f"{hashlib.sha256(str(file).encode()).hexdigest()[:32]}.json"
    try:
        known = json.loads(note.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # no usable note
    log.info("reading %s, to know it by its content", file)
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _write_note(note, json.dumps({"stamp": stamp, "sha256": digest}))
    return digest


def _write_note(note: Path, text: str) -> None:
    fresh = note.with_name(f"{note.name}.{os.getpid()}")
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8")
        fresh.replace(note)
    except OSError as error:  # a cache that others filled may be read-only
        log.warning("%s cannot be written, so the model's file is read whole again next time: %s", note, error.strerror)


def _digest(parts: list[bytes]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little"))
        digest.update(part)
    return digest.hexdigest()[:32]


def _config_parts(path: Path) -> Iterator[bytes]:
    for name in CONFIG_FILES:
        file = path / name
        if file.is_file():
            content = json.loads(file.read_text(encoding="utf-8"))
            kept = {key: value for key, value in content.items() if key not in VOLATILE_KEYS}
            yield name.encode()
            yield json.dumps(kept, sort_keys=True).encode()


def _tokenizer_parts(path: Path) -> Iterator[bytes]:
    for name in TOKENIZER_FILES:
        file = path / name
        if file.is_file():
            yield name.encode()
            yield file.read_bytes()


def _hub_commit(path: Path) -> str | None:
    """The commit of a snapshot in the hub's cache; there, only some weight files may be present."""
    resolved = path.absolute()
    is_commit = len(resolved.name) == 40 and set(resolved.name) <= set("0123456789abcdef")
    return resolved.name if resolved.parent.name == "snapshots" and is_commit else None


def _tensor_parts(path: Path) -> Iterator[bytes]:
    """Name, dtype, shape and sampled bytes of every tensor, sorted by name, whatever file each is in."""
    files = sorted(set(checkpoint.tensor_files(path).values()))
    entries: list[tuple[str, bytes]] = []
    for file in files:
        if not file.is_file():
            raise ModelNotFound(f"{file} is missing; without a hub commit both halves need all weight files")
        entries.extend(_file_entries(file))
    for name, content in sorted(entries):
        yield name.encode()
        yield content


def _file_entries(file: Path) -> Iterator[tuple[str, bytes]]:
    base, header = checkpoint.read_header(file)
    with file.open("rb") as stream:
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            middle = max(begin, (begin + end - SAMPLE_BYTES) // 2)
            stream.seek(base + middle)
            sample = stream.read(min(SAMPLE_BYTES, end - middle))
            yield name, f"{entry['dtype']}{entry['shape']}".encode() + sample
