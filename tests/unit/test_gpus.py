"""What is said of a device that cannot be used, before torch is imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from tests.cli_runner import Shardq, error_of
from workers.gpus import Driver, Gpu, TorchBuild, obstacle, too_old, torch_build
from workers.settings import HeadSettings

T4 = Gpu("Tesla T4", 16 << 30, (7, 5))
WITH_CUDA, WITHOUT = TorchBuild("2.13.0", "12.8"), TorchBuild("2.13.0+cpu", None)
ONE, TWO = Driver((12, 8), "570.86.15", 0, (T4,)), Driver((12, 8), "570.86.15", 0, (T4, T4))


@pytest.mark.parametrize(
    ("device", "torch", "driver", "said"),
    [
        ("cuda", WITHOUT, ONE, "torch 2.13.0+cpu is built without CUDA: install a build with it"),
        ("cuda", WITH_CUDA, None, "there is no NVIDIA driver here"),
        ("cuda", WITH_CUDA, Driver((12, 8), "570", 803), "the NVIDIA driver does not start (error 803)"),
        ("cuda", WITH_CUDA, Driver((12, 8), "570", 100), "the NVIDIA driver shows no GPU"),
        ("cuda", WITH_CUDA, Driver((11, 4), "470", 0, (T4,)), "built for CUDA 12.8, the driver runs up to 11.4"),
        ("cuda:1", WITH_CUDA, ONE, "there is 1 GPU here: cuda:0"),
        ("cuda:7", WITH_CUDA, TWO, "there are 2 GPUs here: cuda:0 to cuda:1"),
    ],
)
def test_a_device_that_cannot_be_used_is_told_with_its_cause(
    device: str, torch: TorchBuild, driver: Driver | None, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert said in str(obstacle(device, torch, driver))


def test_gpus_that_a_variable_hides_are_told_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert "CUDA_VISIBLE_DEVICES is '7'" in str(obstacle("cuda", WITH_CUDA, Driver((12, 8), "570", 100)))


@pytest.mark.parametrize(
    ("device", "torch", "driver"),
    [
        ("cpu", WITHOUT, None),
        ("cuda", WITH_CUDA, ONE),
        ("cuda:1", WITH_CUDA, TWO),
        # a newer CUDA of the same generation runs on an older driver
        ("cuda", WITH_CUDA, Driver((12, 2), "535", 0, (T4,))),
        # a driver that does not say what it runs, a build for AMD's GPUs, no torch at all: not known to be wrong
        ("cuda", WITH_CUDA, Driver((0, 0), "", 0, (T4,))),
        ("cuda", TorchBuild("2.13.0+rocm6.4", None, rocm=True), None),
        ("cuda", None, ONE),
    ],
)
def test_nothing_is_said_against_a_device_that_may_work(
    device: str, torch: TorchBuild | None, driver: Driver | None
) -> None:
    assert obstacle(device, torch, driver) is None


def test_a_gpu_older_than_every_kernel_of_a_build_is_told() -> None:
    builds = ["sm_75", "sm_80", "sm_90a", "compute_120"]
    assert "has capability 6.0, this torch is built for 7.5 and later" in str(too_old((6, 0), builds))
    assert too_old((7, 5), builds) is too_old((12, 1), builds) is too_old((6, 0), []) is None


def test_torch_is_known_by_its_files_as_it_knows_itself() -> None:
    code = "import torch; print(torch.__version__, torch.version.cuda, torch.version.hip is not None)"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    found = torch_build()
    assert found is not None
    assert [found.version.partition("+")[0], str(found.cuda), str(found.rocm)] == [
        printed[0].partition("+")[0],
        *printed[1:],
    ]


@pytest.mark.parametrize("device", ["mps", "gpu", "CUDA", "cuda:x", "cuda:-1", "xpu", "meta"])
def test_a_device_that_is_none_is_refused_by_its_option(device: str) -> None:
    with pytest.raises(ValidationError, match=r"--device \(SHARDQ_DEVICE\): expected cpu, cuda or cuda:N"):
        HeadSettings(model="m", device=device)
    with pytest.raises(ValidationError, match=r"--drafter-device \(SHARDQ_DRAFTER_DEVICE\)"):
        HeadSettings(model="m", drafter_device=device)


def test_head_tail_and_up_refuse_it_before_anything_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("workers.gpus.torch_build", lambda: WITHOUT)
    run = Shardq(tmp_path / "data", {})
    for command in ("head", "tail", "up"):
        message = error_of(run(command, "--model", "/no/such/model", "--device", "cuda"))
        assert "device 'cuda' cannot be used: torch 2.13.0+cpu is built without CUDA" in message
    assert "'cuda:0' cannot" in error_of(run("head", "--model", "/no/such/model", "--drafter-device", "cuda:0"))


def test_doctor_shows_gpus_and_says_what_keeps_the_settings_from_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Shardq(tmp_path / "data", {})

    def gpu(**environment: str) -> list[str]:
        shown = run("doctor", "--role", "tail", **environment).stdout.splitlines()
        return [line for line in shown if line.split()[1] == "gpu"]

    monkeypatch.setattr("cli.doctor.machine.torch_build", lambda: WITH_CUDA)
    monkeypatch.setattr("cli.doctor.machine.driver", lambda: ONE)
    text = "cuda:0, Tesla T4, 17.2 GB, capability 7.5, driver 570.86.15, torch's CUDA 12.8"
    assert gpu() == [f"ok      gpu        {text}"]
    assert gpu(SHARDQ_DEVICE="cuda:1") == [
        "failed  gpu        device 'cuda:1' cannot be used: there is 1 GPU here: cuda:0"
    ]
    monkeypatch.setattr("cli.doctor.machine.torch_build", lambda: WITHOUT)
    (line,) = gpu()
    assert line.startswith("warning gpu        cuda:0, Tesla T4")
    monkeypatch.setattr("cli.doctor.machine.driver", lambda: None)
    assert gpu() == ["ok      gpu        none, and none is asked for: this machine computes on the CPU"]
