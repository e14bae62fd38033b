"""A drafter beside the target's device or on it: `python -m benchmarks.drafter_device` on a machine with two GPUs.

Whole-model mode, so that one process is enough: the target computes on `--device`. Measured, with random weights and a
fixed draft length (so that nothing depends on how good the drafts are): rounds per second of every row with the drafter
on the target's device, one lane and two, and with the drafter on `--drafter-device`, two lanes, where lane B is drafted
while lane A is computed. The bound is (draft + target) / max(draft, target) of the times of one lane's round.
`--small` makes models of a few layers, to try the script on a CPU.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
from transformers.utils import logging as transformers_logging

from benchmarks.engine_run import Head, Ran, whole_relay
from benchmarks.wan_prompts import equal_jobs
from tests.models import EOS_ID, byte_tokenizer
from workers.engine.source import Part
from workers.head.drafters import make_drafter
from workers.head.worker import engine_options
from workers.served import ServedModel
from workers.settings import HeadSettings, is_gpu

Dtype = Literal["float32", "float16", "bfloat16"]

MAX_LENGTH = 256
#: hidden size, layers, inner size, heads, heads of keys and values: Qwen2.5-1.5B and 0.5B, and what a CPU can do
SHAPES = {
    "target": (1536, 28, 8960, 12, 2),
    "drafter": (896, 24, 4864, 14, 2),
    "small-target": (256, 6, 512, 4, 2),
    "small-drafter": (128, 4, 256, 4, 2),
}


@dataclass(frozen=True, slots=True)
class Way:
    """Where the drafter runs, and how many lanes there are."""

    name: str
    device: str
    lanes: int
    apart: bool


def random_model(directory: Path, shape: str, dtype: Dtype, device: str) -> Path:
    """A model of this shape with random weights; the tokenizer is the same for all."""
    hidden, layers, inner, heads, kv_heads = SHAPES[shape]
    torch.manual_seed(len(shape))
    settings: dict[str, Any] = {"hidden_size": hidden, "num_hidden_layers": layers, "intermediate_size": inner}
    config = AutoConfig.for_model(
        "qwen2",
        **settings,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        vocab_size=32_000,
        max_position_embeddings=1024,
        eos_token_id=EOS_ID,
    )
    with torch.device(device):
        model = AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype))  # type: ignore[no-untyped-call]
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID)  # type: ignore[no-untyped-call]
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


class Bench:
    """The target's halves, and everything to run jobs through them in several ways."""

    def __init__(self, arguments: argparse.Namespace, root: Path) -> None:
        prefix = "small-" if arguments.small else ""
        self._arguments = arguments
        self._target = random_model(root / "target", f"{prefix}target", arguments.dtype, arguments.device)
        self._drafter = random_model(root / "drafter", f"{prefix}drafter", arguments.dtype, arguments.device)
        settings = self._settings(1)
        served = ServedModel.resolve(settings, Part.WHOLE)
        head, tail = served.load_whole(slots=settings.num_slots, max_query=settings.max_query)
        self._head, self._relay = Head(served, head), whole_relay(served, tail)

    def run(self, way: Way) -> Ran:
        """The jobs, after two short ones to warm up."""
        settings = self._settings(way.lanes)
        drafter = make_drafter(
            "model",
            target=self._target,
            drafter=self._drafter,
            dtype=self._arguments.dtype,
            device=way.device,
            slots=settings.num_slots,
            max_length=MAX_LENGTH,
            graphs=settings.graphs and is_gpu(way.device),
        )
        options = replace(
            engine_options(settings, self._arguments.dtype), drafts_apart_on=way.device if way.apart else None
        )
        for requests in (equal_jobs(settings.num_slots, 4), equal_jobs(settings.num_slots, self._arguments.tokens)):
            ran = self._head.run(requests, settings, self._relay, drafter, options)
        return ran

    def _settings(self, lanes: int) -> HeadSettings:
        return HeadSettings(
            model=str(self._target),
            head_id="bench",
            whole=True,
            dtype=self._arguments.dtype,
            device=self._arguments.device,
            slots=self._arguments.jobs,
            max_length=MAX_LENGTH,
            drafter="model",
            draft_length=self._arguments.draft_length,
            lanes=lanes,
        )


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Measure a drafter on a device of its own.")
    parser.add_argument("--device", default="cuda:0", help="of the target")
    parser.add_argument("--drafter-device", default="cuda:1")
    parser.add_argument("--dtype", default="bfloat16", choices=["float32", "float16", "bfloat16"])
    parser.add_argument("--jobs", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=48, help="of each job")
    parser.add_argument("--draft-length", type=int, default=4)
    parser.add_argument("--small", action="store_true", help="models of a few layers")
    return parser.parse_args()


def main() -> int:
    """Print the table; status 1 if texts differ in float32."""
    arguments = parse()
    here, there = arguments.device, arguments.drafter_device
    ways = [
        Way("drafter on the target's device, 1 lane", here, 1, False),
        Way("drafter on the target's device, 2 lanes", here, 2, False),
        Way("drafter on its own device, 2 lanes, in turn", there, 2, False),
        Way("drafter on its own device, 2 lanes, overlapped", there, 2, True),
    ]
    print(f"{here} and {there}, torch {torch.__version__}, {arguments.dtype}, {time.strftime('%Y-%m-%d')}")
    print(f"{arguments.jobs} jobs × {arguments.tokens} tokens, K = {arguments.draft_length}, random weights\n")
    print("| way | rounds per second and row | to the first | texts like the first's |")
    print("|---|---|---|---|")
    texts: list[tuple[int, ...]] = []
    first, same = 0.0, 0
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    with tempfile.TemporaryDirectory() as root:
        bench = Bench(arguments, Path(root))
        for way in ways:
            ran = bench.run(way)
            pace = ran.num_rounds / arguments.jobs / ran.wall_s
            first, texts = first or pace, texts or ran.texts
            same = sum(one == other for one, other in zip(texts, ran.texts, strict=True))
            print(f"| {way.name} | {pace:.1f} | {pace / first:.2f} | {same} of {arguments.jobs} |", flush=True)
    return 0 if same == arguments.jobs or arguments.dtype != "float32" else 1


if __name__ == "__main__":
    sys.exit(main())
