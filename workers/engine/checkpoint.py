"""The safetensors files of a model directory: which tensors there are, and reading single ones lazily."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from workers.errors import ModelDamaged, ModelNotFound

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
EMBEDDING = "embed_tokens.weight"
LM_HEAD = "lm_head.weight"
#: a decoder layer's number within a tensor's name
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor's name and the file that holds it, which need not be here.

    ModelNotFound if the directory has neither an index nor a single safetensors file.
    """
    index = directory / INDEX
    if index.is_file():
        weights = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: directory / file for name, file in weights.items()}
    single = directory / SINGLE
    if single.is_file():
        with safe_open(single, framework="pt") as file:
            return dict.fromkeys(file.keys(), single)
    if any(directory.glob("*.bin")):
        raise ModelNotFound(f"{directory} has pickled .bin weights only; shardq reads safetensors")
    raise ModelNotFound(f"{directory} has no {SINGLE} and no {INDEX}")


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
    """Where a safetensors file's data begins, and its header: name -> dtype, shape, data_offsets."""
    with file.open("rb") as stream:
        (length,) = struct.unpack("<Q", stream.read(8))
        header: dict[str, Any] = json.loads(stream.read(length))
    header.pop("__metadata__", None)
    return 8 + length, header


def read_tensors(
    files: Mapping[str, Path], wanted: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (new name, tensor) for every `wanted` stored name -> new name, cast one by one.

    Only one tensor is in memory twice at a time. A file that is not here raises ModelNotFound.
    """
    for stored, name in wanted.items():
        path = files[stored]
        if not path.is_file():
            raise ModelNotFound(f"{path} is missing; it holds {stored}")
        # opened anew for each: pages of a mapped file count as resident until it is closed
        with safe_open(path, framework="pt") as file:
            # a copy even without a cast: a view would keep the file mapped
            yield name, file.get_tensor(stored).to(device=device, dtype=dtype, copy=True)


def check_shape(name: str, expected: torch.Size, found: torch.Size) -> None:
    """ModelDamaged unless a stored tensor has the shape that the config asks for."""
    if expected != found:
        raise ModelDamaged(f"tensor {name} has shape {list(found)}, the config asks for {list(expected)}")
