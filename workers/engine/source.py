"""From what a user calls a model to a local directory: a directory, a GGUF file or a Hugging Face hub id."""

from __future__ import annotations

import fcntl
import hashlib
import re
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from workers.engine import checkpoint, gguf
from workers.engine.fingerprint import content_digest
from workers.engine.gguf import Progress
from workers.engine.loader import check_complete, check_split, load_config
from workers.engine.tokenizer import end_ids, load_tokenizer, overlooked_end, shown
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported, WorkerError
from workers.settings import CacheSettings

#: `owner/name`, with the commit, tag or branch to take after an @
HUB_ID = re.compile(r"(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")
#: everything of a hub model but its weights
SMALL_FILES = ("*.json", "*.jinja", "tokenizer.model", "*.txt", "*.tiktoken")

#: (hub id, revision, patterns of files to have) -> the local directory with those files
Download = Callable[[str, str | None, Sequence[str]], Path]


class Part(Enum):
    """Which half of a model a process needs."""

    HEAD = "head"
    TAIL = "tail"
    WHOLE = "whole"
    #: config and tokenizer alone, to know what it is before anything is loaded
    DESCRIPTION = "description"


@dataclass(frozen=True)
class ModelDirectory:
    """A local model: config, tokenizer and at least the weights of the part that was asked for."""

    path: Path
    num_layers: int
    #: first layer of the tail's half
    split: int
    #: longest prompt + completion the model was made for, in tokens
    context: int


@dataclass(frozen=True, slots=True)
class PreparedModel:
    """Files of a model that can be served."""

    path: str
    num_layers: int
    context: int
    #: ids of the tokens that end a text, and the same for people
    end_token_ids: tuple[int, ...]
    ends: str
    #: which other end the chat template writes; None where all is well
    warning: str | None


def prepare(model: str, *, cache: Path | None = None, progress: Progress | None = None) -> PreparedModel:
    """`resolve` the whole model, and look at all of its files. Errors as there."""
    found = resolve(model, cache=cache, progress=progress)
    check_complete(found.path)
    tokenizer = load_tokenizer(found.path)
    ends = end_ids(found.path, tokenizer)
    return PreparedModel(
        path=str(found.path),
        num_layers=found.num_layers,
        context=found.context,
        end_token_ids=ends,
        ends=shown(tokenizer, ends),
        warning=overlooked_end(tokenizer, ends),
    )


def resolve(
    model: str,
    part: Part = Part.WHOLE,
    split: int | None = None,
    *,
    cache: Path | None = None,
    progress: Progress | None = None,
    download: Download | None = None,
) -> ModelDirectory:
    """The local directory of a model directory, `.gguf` file or hub id (`owner/name[@revision]`).

    A GGUF file is converted once and kept under `cache` (default: `CacheSettings`). Of a hub model only the
    files that hold `part`'s layers are fetched. `split` None cuts in the middle. Errors: ModelNotFound,
    ModelUnsupported, ModelDamaged, SplitInvalid.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        return _described(path, split)
    if path.suffix == ".gguf":
        return _described(convert_once(path, cache or CacheSettings().directory, progress), split)
    match = HUB_ID.fullmatch(model)
    if match is None or model.startswith((".", "/", "~")):
        raise ModelNotFound(f"model {model!r} is neither a directory, a .gguf file nor a hub id owner/name")
    return _fetch(match["repo"], match["revision"], part, split, download or hub_download)


def convert_once(path: Path, cache: Path, progress: Progress | None = None) -> Path:
    """The converted form of a GGUF file, made now unless it is there; safe against races and kills.

    It is found by the file's whole content, which is read again only when the file was touched.
    """
    files, notes = gguf.parts(path), cache / "digests"
    sha256 = content_digest(files, notes)
    key = hashlib.sha256(f"{gguf.REVISION}:{sha256}".encode()).hexdigest()[:16]
    directory = cache / "models" / f"{gguf.model_name(path)}-{key}"
    if directory.is_dir():
        return directory
    directory.parent.mkdir(parents=True, exist_ok=True)
    with _locked(directory.with_name(f"{directory.name}.lock")):
        if not directory.is_dir():
            partial = directory.with_name(f"{directory.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # left by a process that was killed
            partial.mkdir()
            try:
                gguf.convert(files[0], partial, sha256, progress)
                if content_digest(files, notes) != sha256:
                    raise ModelDamaged(f"{path} was changed while it was converted: begin anew")
            except WorkerError:
                shutil.rmtree(partial)  # nobody would look for it under this name again
                raise
            partial.rename(directory)
    return directory


def needed_files(directory: Path, part: Part, split: int) -> tuple[str, ...]:
    """The names of the weight files that hold the part's tensors, from the index alone."""
    if not (directory / checkpoint.INDEX).is_file():
        return (checkpoint.SINGLE,)
    config = load_config(directory)
    first, last = {
        Part.HEAD: (0, split),
        Part.TAIL: (split, config.num_hidden_layers),
        Part.WHOLE: (0, config.num_hidden_layers),
    }[part]
    wanted = checkpoint.part_names(
        checkpoint.tensor_files(directory),
        first,
        last,
        head=part is not Part.TAIL,
        tail=part is not Part.HEAD,
        tied=config.tie_word_embeddings,
    )
    return tuple(sorted({file.name for file in wanted.values()}))


def hub_download(repo: str, revision: str | None, patterns: Sequence[str]) -> Path:
    """Fetch the matching files of a hub model, or find them in the hub's own cache; else ModelNotFound."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return Path(snapshot_download(repo, revision=revision, allow_patterns=list(patterns)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFound(
            f"model {repo} is no local directory and cannot be fetched from the hub: {reason}"
        ) from error


def _fetch(repo: str, revision: str | None, part: Part, split: int | None, download: Download) -> ModelDirectory:
    """Config first, to know the layers; then the weight files of the part, of the very same commit."""
    path = download(repo, revision, SMALL_FILES)
    described = _described(path, split)
    if part is Part.DESCRIPTION:
        return described
    commit = path.name if path.parent.name == "snapshots" else revision
    download(repo, commit, needed_files(path, part, described.split))
    for name in needed_files(path, part, described.split):
        if not (path / name).is_file():
            raise ModelNotFound(f"hub model {repo} has no {name}; shardq reads safetensors only")
    return described


def _described(path: Path, split: int | None) -> ModelDirectory:
    config = load_config(path)
    num_layers: int = config.num_hidden_layers
    if num_layers < 2:
        raise ModelUnsupported(f"{path} has a single layer: nothing to cut")
    cut = num_layers // 2 if split is None else split
    check_split(cut, num_layers)
    return ModelDirectory(path=path, num_layers=num_layers, split=cut, context=config.max_position_embeddings)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an advisory lock on a file; the kernel drops it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
