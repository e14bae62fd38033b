"""The safetensors files of a model directory: which tensors there are, and reading single ones lazily."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from workers.errors import ModelDamaged, ModelNotFound

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def tensor_files(directory: Path) -> dict[str, Path]:
    """Every tensor's name and the file that holds it, which need not be here; ModelNotFound without weights."""
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


def read_tensors(
    files: Mapping[str, Path], wanted: Mapping[str, str], dtype: torch.dtype, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Yield (new name, tensor) for every `wanted` stored name -> new name, cast one by one.

    Only one tensor is in memory twice at a time. A file that is not here raises ModelNotFound.
    """
    with ExitStack() as stack:
        opened: dict[Path, Any] = {}
        for stored, name in wanted.items():
            path = files[stored]
            if path not in opened:
                if not path.is_file():
                    raise ModelNotFound(f"{path} is missing; it holds {stored}")
                opened[path] = stack.enter_context(safe_open(path, framework="pt"))
            tensor = opened[path].get_tensor(stored)
            # a copy even without a cast: a view would keep the whole mapped file referenced
            yield name, tensor.to(device=device, dtype=dtype, copy=True)


def only_shape_errors(name: str, expected: torch.Size, found: torch.Size) -> None:
    """ModelDamaged unless a stored tensor has the shape that the config asks for."""
    if expected != found:
        raise ModelDamaged(f"tensor {name} has shape {list(found)}, the config asks for {list(expected)}")
