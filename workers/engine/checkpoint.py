"""The safetensors files of a model directory: which tensors there are, and reading single ones lazily."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from io import RawIOBase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
#: read at a time, in bytes
PIECE_BYTES = 16 << 20
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
#: a decoder layer's number within a tensor's name
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor's name and the file that holds it, which need not be here.

    ModelNotFound if the directory has neither an index nor a single safetensors file, ModelDamaged for a bad index.
    """
    index = directory / INDEX
    if index.is_file():
        return {name: directory / file for name, file in _weight_map(index).items()}
    single = directory / SINGLE
    if single.is_file():
        return dict.fromkeys(read_header(single)[1], single)
    if any(directory.glob("*.bin")):
        raise ModelNotFound(f"{directory} has pickled .bin weights only; shardq reads safetensors")
    raise ModelNotFound(f"{directory} has no {SINGLE} and no {INDEX}")


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weights: dict[str, str] = dict(json.loads(index.read_text(encoding="utf-8"))["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise ModelDamaged(f"{index} is no index of weights, or was cut off") from error
    return weights


def part_names(
    files: Mapping[str, Path], first: int, last: int, *, head: bool, tail: bool, tied: bool
) -> dict[str, Path]:
    """The tensors of layers [first, last); with `head` the embeddings, with `tail` final norm and LM head.

    May name a few too many (a multimodal checkpoint's image tower): the loader decides what it takes.
    """
    embedding_stored = any(name.endswith(EMBEDDING) for name in files)
    lm_head_stored = any(name.endswith(LM_HEAD) for name in files)

    def wanted(name: str) -> bool:
        layer = LAYER.search(name)
        if layer is not None:
            return first <= int(layer[1]) < last
        if name.endswith(EMBEDDING):
            return head or (tied and not lm_head_stored)
        if name.endswith(LM_HEAD):
            return tail or (tied and not embedding_stored)
        return tail

    return {name: file for name, file in files.items() if wanted(name)}


def read_header(file: Path) -> tuple[int, dict[str, Any]]:
    """Where a safetensors file's data begins, and its header: name -> dtype, shape, data_offsets.

    ModelNotFound if the file is absent, ModelDamaged if it is shorter than its header says.
    """
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            header: dict[str, Any] = json.loads(stream.read(length))
    except FileNotFoundError as error:
        raise ModelNotFound(f"{file} is missing") from error
    except (struct.error, ValueError, OverflowError, MemoryError) as error:
        raise ModelDamaged(f"{file} is not a safetensors file, or was cut off") from error
    header.pop("__metadata__", None)
    size, expected = file.stat().st_size, 8 + length + max((e["data_offsets"][1] for e in header.values()), default=0)
    if size < expected:
        raise ModelDamaged(f"{file} was cut off: {size} of {expected} bytes are there")
    return 8 + length, header


def read_tensors(
    files: Mapping[str, Path], wanted: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (new name, tensor) for every `wanted` stored name -> new name, cast to `dtype` on `device`.

    Beside the results PIECE_BYTES of memory are needed. A file that is not here raises ModelNotFound.
    """
    headers: dict[Path, tuple[int, dict[str, Any]]] = {}
    # one buffer for all: freeing it between tensors would leave holes in the heap
    buffer = torch.empty(PIECE_BYTES, dtype=torch.uint8)
    for stored, name in wanted.items():
        path = files[stored]
        if path not in headers:
            headers[path] = read_header(path)
        base, header = headers[path]
        yield name, _read_tensor(path, base, entry_of(stored, path, header), dtype, device, buffer)


def _read_tensor(
    path: Path, base: int, entry: dict[str, Any], dtype: torch.dtype, device: torch.device, buffer: Tensor
) -> Tensor:
    """One tensor, read piece by piece: a mapped file's pages would count as resident beside the copy."""
    stored = DTYPES[entry["dtype"]]
    result = torch.empty(entry["shape"], dtype=dtype, device=device)
    flat = result.view(-1)
    pieces = buffer.view(stored)
    with path.open("rb", buffering=0) as stream:
        stream.seek(base + entry["data_offsets"][0])
        for begin in range(0, flat.numel(), pieces.numel()):
            piece = pieces[: flat.numel() - begin]
            _fill(stream, piece, path)
            flat[begin : begin + piece.numel()].copy_(piece)
    return result


def _fill(stream: RawIOBase, piece: Tensor, path: Path) -> None:
    view = memoryview(piece.view(torch.uint8).numpy().data)
    while view:
        count = stream.readinto(view)
        if not count:
            raise ModelDamaged(f"{path} ends in the middle of a tensor")
        view = view[count:]


def entry_of(name: str, file: Path, header: Mapping[str, Any]) -> dict[str, Any]:
    """A tensor's entry in a header; ModelDamaged if the file does not hold it, whatever the index says."""
    if name not in header:
        raise ModelDamaged(f"{file} does not hold {name}, which {INDEX} says it does")
    entry: dict[str, Any] = header[name]
    if entry["dtype"] not in DTYPES:
        raise ModelUnsupported(f"{file} stores weights as {entry['dtype']}; supported: {', '.join(DTYPES)}")
    return entry


def check_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """ModelDamaged unless a stored tensor has the shape that the config asks for."""
    if expected != found:
        raise ModelDamaged(f"tensor {name} has shape {list(found)}, the config asks for {list(expected)}")
