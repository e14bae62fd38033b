"""What GPUs there are and whether torch's build can use them, known without importing torch, which takes seconds."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from workers.errors import DeviceUnavailable

#: where builds of torch with another CUDA, or none, come from
BUILDS = "https://pytorch.org/get-started/locally/"

#: numbers of the driver's interface: no GPU; attributes of one
_NO_DEVICE = 100
_MAJOR, _MINOR = 75, 76
#: bytes of names that the driver writes
_NAME_BYTES = 96


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as the driver describes it."""

    name: str
    memory_bytes: int
    #: compute capability, as (9, 0)
    capability: tuple[int, int]


@dataclass(frozen=True, slots=True)
class Driver:
    """NVIDIA's driver, and the GPUs that it shows to this process."""

    #: newest CUDA that it runs, as (12, 4); (0, 0) if it does not say
    cuda: tuple[int, int] = (0, 0)
    #: of the driver itself, as 570.86.15; empty if it does not say
    version: str = ""
    #: number of the error with which it refuses to start; 0: none
    error: int = 0
    gpus: tuple[Gpu, ...] = ()


@dataclass(frozen=True, slots=True)
class TorchBuild:
    """What is installed as torch."""

    version: str
    #: CUDA that it brings, as 12.8; None: none
    cuda: str | None
    #: whether it is for AMD's GPUs, which it calls `cuda`, too
    rocm: bool = False


def check_device(device: str) -> None:
    """DeviceUnavailable, with cause and cure, if it is known before torch is imported that it cannot be used."""
    problem = obstacle(device, torch_build(), driver()) if device != "cpu" else None
    if problem is not None:
        raise DeviceUnavailable(f"device {device!r} cannot be used: {problem}; `cpu` works everywhere")


def obstacle(device: str, torch: TorchBuild | None, found: Driver | None) -> str | None:
    """Why torch cannot use a device of this kind, and what to do; None if nothing speaks against it."""
    if torch is None or torch.rocm or not device.startswith("cuda"):
        return None  # whoever imports torch says what is missing
    if torch.cuda is None:
        return f"torch {torch.version} is built without CUDA: install a build with it ({BUILDS})"
    if found is None:
        return "there is no NVIDIA driver here: install it, or give the container its GPU (`docker run --gpus all`)"
    if found.error and found.error != _NO_DEVICE:
        return f"the NVIDIA driver does not start (error {found.error}): `nvidia-smi` says more"
    if not found.gpus:
        return f"the NVIDIA driver shows no GPU{_hidden()}: see `nvidia-smi`"
    if (0, 0) < found.cuda < (_major(torch.cuda), 0):
        known = ".".join(map(str, found.cuda))
        return f"torch is built for CUDA {torch.cuda}, the driver runs up to {known}: a newer driver, or {BUILDS}"
    if _index(device) >= len(found.gpus):
        last = f" to cuda:{len(found.gpus) - 1}" if len(found.gpus) > 1 else ""
        return f"there {_are(len(found.gpus))} here{_hidden()}: cuda:0{last}"
    return None


def too_old(capability: tuple[int, int], built_for: Sequence[str]) -> str | None:
    """Why a GPU runs none of a torch build's kernels, as `sm_90` or `compute_120`; None if it runs some."""
    numbers = sorted(int(found[1]) for name in built_for if (found := re.match(r"(?:sm|compute)_(\d+)", name)))
    if not numbers or capability[0] * 10 + capability[1] >= numbers[0]:
        return None
    own, first = (f"{number // 10}.{number % 10}" for number in (capability[0] * 10 + capability[1], numbers[0]))
    return f"has capability {own}, this torch is built for {first} and later: take another GPU, or an older build"


def torch_build() -> TorchBuild | None:
    """The installed torch by its files; None if there is none."""
    try:
        spec, number = importlib.util.find_spec("torch"), version("torch")
    except PackageNotFoundError:
        return None
    folder = next(iter((spec.submodule_search_locations if spec else None) or []), None)
    if folder is None:
        return None
    try:
        text = (Path(folder) / "version.py").read_text(encoding="utf-8")
    except OSError:
        text = ""
    return TorchBuild(number, _assigned(text, "cuda"), _assigned(text, "hip") is not None)


def driver() -> Driver | None:
    """NVIDIA's driver; None if there is none."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    error = int(library.cuInit(0))
    number = ctypes.c_int(0)
    library.cuDriverGetVersion(ctypes.byref(number))
    cuda = number.value // 1000, number.value % 1000 // 10
    if error:
        return Driver(cuda, _driver_version(), error)
    count = ctypes.c_int(0)
    library.cuDeviceGetCount(ctypes.byref(count))
    return Driver(cuda, _driver_version(), 0, tuple(_gpu(library, index) for index in range(count.value)))


def _gpu(library: ctypes.CDLL, index: int) -> Gpu:
    device, memory = ctypes.c_int(0), ctypes.c_size_t(0)
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGet(ctypes.byref(device), index)
    library.cuDeviceGetName(name, _NAME_BYTES, device)
    library.cuDeviceTotalMem_v2(ctypes.byref(memory), device)
    numbers = []
    for attribute in (_MAJOR, _MINOR):
        number = ctypes.c_int(0)
        library.cuDeviceGetAttribute(ctypes.byref(number), attribute, device)
        numbers.append(number.value)
    return Gpu(name.value.decode(errors="replace"), memory.value, (numbers[0], numbers[1]))


def _driver_version() -> str:
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return ""
    text = ctypes.create_string_buffer(_NAME_BYTES)
    if library.nvmlInit_v2() or library.nvmlSystemGetDriverVersion(text, _NAME_BYTES):
        return ""
    return text.value.decode(errors="replace")


def _assigned(source: str, name: str) -> str | None:
    """The text that a generated `version.py` gives a name; None for None."""
    found = re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]+)['\"]", source, re.MULTILINE)
    return found[1] if found else None


def _hidden() -> str:
    """The variable that hides GPUs, if it is set."""
    shown = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if shown is None else f" (CUDA_VISIBLE_DEVICES is {shown!r})"


def _index(device: str) -> int:
    return int(device.partition(":")[2] or 0)


def _major(cuda: str) -> int:
    return int(cuda.partition(".")[0])


def _are(count: int) -> str:
    return f"is {count} GPU" if count == 1 else f"are {count} GPUs"
