"""Loading a half takes the memory of that half."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import smollm2_directory

ROOT = Path(__file__).parents[2]
#: reads the peak from /proc: getrusage would count the parent's, from before the exec
MEASURE = """
import json, sys
import bitsandbytes, torch, transformers, transformers.integrations.bitsandbytes
import workers.engine.loader as loader

def peak_bytes():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM"))

part, directory, split, dtype, quantization = sys.argv[1:]
before = peak_bytes()
load = {"head": loader.load_head, "tail": loader.load_tail}[part]
half = load(
    directory, int(split), dtype=dtype, slots=1, max_length=16, max_query=4, quantization=quantization
)
print(json.dumps({"growth": peak_bytes() - before, "weights": half.num_weight_bytes}))
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads Linux' /proc")


def measure(part: str, dtype: str, quantization: str) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURE, part, str(smollm2_directory()), "15", dtype, quantization]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    measured: dict[str, int] = json.loads(finished.stdout)
    return measured


@pytest.mark.parametrize(
    ("part", "dtype"),
    [
        pytest.param("head", "float32", marks=pytest.mark.slow),
        ("tail", "float32"),
        pytest.param("tail", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_peak_memory_grows_by_little_more_than_the_halfs_weights(part: str, dtype: str) -> None:
    measured = measure(part, dtype, "none")
    assert measured["weights"] > 100e6
    assert measured["growth"] <= 1.3 * measured["weights"] + 100e6


def test_a_half_in_4_bits_takes_no_more_on_its_way_there() -> None:
    measured = measure("tail", "float32", "nf4")
    assert measured["weights"] < 150e6  # of 325e6, and most of it the LM head, which stays
    assert measured["growth"] <= 1.3 * measured["weights"] + 100e6
