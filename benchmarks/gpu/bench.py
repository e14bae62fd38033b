"""What every section is told: device, models, sizes, and how much time it may take."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch

from benchmarks.gpu.shapes import Shape, Shapes
from benchmarks.gpu.system import Systems
from benchmarks.gpu.timing import Effort, copy_bandwidth

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is computed at a time."""

    #: tokens of a row that stand in the caches when the work begins
    cache: int
    #: of the row counts that are measured, the larger one
    rows: int
    #: tokens drafted per row and round
    draft: int
    #: jobs at once, and tokens of each
    jobs: int
    #: jobs that the same slots do, one after the other
    queued: int
    tokens: int
    prompt: int
    rtt_ms: float
    #: of a slow link
    mbit_s: float
    #: Celery consumers of a head
    fronts: int
    #: jobs, and tokens of each, whose texts are compared
    compared: int
    compared_tokens: int


REAL_SIZES = Sizes(
    cache=1024,
    rows=32,
    draft=8,
    jobs=64,
    queued=192,
    tokens=128,
    prompt=64,
    rtt_ms=86.0,
    mbit_s=50.0,
    fronts=8,
    compared=16,
    compared_tokens=64,
)
TINY_SIZES = Sizes(
    cache=128,
    rows=4,
    draft=8,
    jobs=6,
    queued=9,
    tokens=24,
    prompt=12,
    rtt_ms=20.0,
    mbit_s=50.0,
    fronts=2,
    compared=2,
    compared_tokens=12,
)


@dataclass(frozen=True)
class Bench:
    """One run of the script."""

    device: torch.device
    dtype: Literal["float32", "float16", "bfloat16"]
    shapes: Shapes
    sizes: Sizes
    effort: Effort
    #: tiny shapes: nothing here says how fast anything is
    rehearsal: bool
    #: holds models and logs while the script runs
    directory: Path
    systems: Systems
    out: Path
    #: SmolLM2-135M-Instruct as GGUF file or as directory
    smollm2: Path | None
    quick: bool
    #: write the profiler's table of each measured piece of work into `out`
    profile: bool
    _models: dict[str, Path] = field(default_factory=dict)
    _bandwidth: list[float] = field(default_factory=list)

    def model(self, shape: Shape) -> Path:
        """The directory of a model, without weights."""
        if shape.name not in self._models:
            self._models[shape.name] = shape.write(self.directory / "models")
        return self._models[shape.name]

    @property
    def bandwidth(self) -> float:
        """Bytes a second that a copy moves, measured once."""
        if not self._bandwidth:
            self._bandwidth.append(copy_bandwidth(self.device))
        return self._bandwidth[0]

    def floor_ms(self, num_bytes: float) -> float:
        """Least time in which so many bytes are read."""
        return 1000 * num_bytes / self.bandwidth

    def load(self, loader: Callable[..., T], model: Path, *split: int, **options: Any) -> T:
        """What a function of `workers.engine.loader` loads onto the device."""
        return loader(model, *split, device=self.device, **options)

    def dummy(self, loader: Callable[..., T], shape: Shape, *split: int, **options: Any) -> T:
        """As `load`, with dummy weights of a shape."""
        given = {"dtype": self.dtype, "load_format": "dummy", **options}
        return self.load(loader, self.model(shape), *split, **given)

    def clear(self) -> None:
        """Give back the device's memory that nothing uses."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
