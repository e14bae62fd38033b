"""What hidden states cost on the wire, and what narrower ones change: `python -m benchmarks.wire`.

SmolLM2-135M-Instruct cut in the middle, on the CPU, the 24 prompts of `tests.parity`.

`frames`: frames of the prompts' hidden states with and without `--wire-compress`, by compute and wire dtype.
`flips`: the prompts' tokens after which the likeliest next token is another one than with float32 on the wire.
`texts`: greedy texts, 8 jobs at a time, float32; how many are the same with another wire dtype (takes minutes).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median

import torch

from relay.codec import decode, encode
from relay.messages import DTYPE_BYTES, Draft, Prefill, Round, Sampling, Tensor
from tasks.generation import Outcome
from tests.models import smollm2_directory
from tests.pair import Halves, generate, tasks_for
from tests.parity import greedy_requests
from workers.engine.loader import load_head
from workers.engine.shard import HeadShard
from workers.engine.tensors import from_wire, to_wire
from workers.head.drafters import make_drafter

SPLIT, SLOTS, MAX_LENGTH, CHUNK = 15, 8, 256, 64
#: compute dtype → wire dtypes worth having with it
WIRE_DTYPES = {"float32": ("float32", "int8"), "float16": ("float16", "int8"), "bfloat16": ("bfloat16", "int8")}
#: (rows, tokens a row) of the frames looked at; one row of `CHUNK` is a chunk of prefill
SHAPES = ((1, 5), (8, 5), (1, CHUNK))
_GREEDY = Sampling(0.0, 0, 1.0, 0.0, 0)


@dataclass(frozen=True, slots=True)
class Cost:
    """A frame with and without compression; milliseconds of CPU of encoding and decoding together."""

    plain_bytes: int
    packed_bytes: int
    plain_ms: float
    packed_ms: float

    @property
    def pays_below_mbit_s(self) -> float:
        """The bandwidth of one wire at which the bytes saved take as long as the work that saves them."""
        return 8e-6 * (self.plain_bytes - self.packed_bytes) / (1e-3 * (self.packed_ms - self.plain_ms))


def texts_of(halves: Halves, wire_dtype: str, max_tokens: int, draft_length: int = 0) -> list[Outcome]:
    """What the jobs give with this wire dtype."""
    drafter = make_drafter(
        "ngram" if draft_length else "none",
        target=halves.directory,
        drafter=None,
        dtype="float32",
        device="cpu",
        slots=SLOTS,
        max_length=MAX_LENGTH,
    )
    tasks = tasks_for(greedy_requests(max_tokens))
    return generate(halves, tasks, drafter, draft_length=draft_length, concurrency=SLOTS, wire_dtype=wire_dtype)


def hidden_states(head: HeadShard, text: Sequence[int]) -> torch.Tensor:
    """[tokens, hidden] of a text at the cut."""
    return _fed(head.forward, [torch.tensor([text[at : at + CHUNK]]) for at in range(0, len(text), CHUNK)])


def _fed(forward: Callable[..., torch.Tensor], chunks: Sequence[torch.Tensor]) -> torch.Tensor:
    """A half's output over the chunks of one text, in slot 0."""
    outputs, start = [], 0
    for chunk in chunks:
        outputs.append(forward(chunk, torch.tensor([0]), torch.tensor([start]))[0])
        start += chunk.shape[1]
    return torch.cat(outputs)


def prompts_of(halves: Halves) -> list[list[int]]:
    """The tokens of the prompts."""
    return [halves.prompts.read(task).tokens for task in tasks_for(greedy_requests(1))]


# -- frames ---------------------------------------------------------------------------------------------------------


def frames_table(halves: Halves) -> None:
    """Bytes and times of frames, over every dtype and shape."""
    print(
        "| compute | wire | rows × tokens | bytes | compressed | ratio | ms plain | ms compressed | pays below Mbit/s |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for dtype, wire_dtypes in WIRE_DTYPES.items():
        head = load_head(halves.directory, SPLIT, dtype=dtype, slots=1, max_length=MAX_LENGTH, max_query=CHUNK)
        states = torch.cat([hidden_states(head, prompt) for prompt in prompts_of(halves)])
        for wire_dtype in wire_dtypes:
            for shape in SHAPES:
                costs = [cost(frame_of(wire, shape)) for wire in _cut_out(states, wire_dtype, shape)]
                plain, packed = fmean(c.plain_bytes for c in costs), fmean(c.packed_bytes for c in costs)
                before, after = median(c.plain_ms for c in costs), median(c.packed_ms for c in costs)
                pays = Cost(round(plain), round(packed), before, after).pays_below_mbit_s
                print(
                    f"| {dtype} | {wire_dtype} | {shape[0]} × {shape[1]} | {plain:.0f} | {packed:.0f} "
                    f"| {packed / plain:.2f} | {before:.2f} | {after:.2f} | {pays:.0f} |",
                    flush=True,
                )


def _cut_out(states: torch.Tensor, wire_dtype: str, shape: tuple[int, int]) -> list[Tensor]:
    """The hidden states, [all tokens, hidden], in tensors of the shape's number of tokens."""
    parts = torch.split(states, shape[0] * shape[1])
    return [to_wire(part, wire_dtype) for part in parts if len(part) == shape[0] * shape[1]]


def frame_of(hidden: Tensor, shape: tuple[int, int]) -> Prefill | Round:
    """The frame that would carry these hidden states."""
    num_rows, num_tokens = shape
    if num_tokens == CHUNK:
        return Prefill(1, 0, 1, 0, 0, 9, True, _GREEDY, None, hidden)
    rows = tuple(Draft(slot, 1, 7, 40, 9, (1234,) * (num_tokens - 1)) for slot in range(num_rows))
    return Round(1, rows, hidden)


def cost(message: Prefill | Round) -> Cost:
    """Measured on this frame, the fastest of some tries."""
    plain, packed = encode(message), encode(message, compress=True)
    if decode(packed) != message:
        raise AssertionError("compression lost something")
    return Cost(
        len(plain),
        len(packed),
        _ms(lambda: decode(encode(message))),
        _ms(lambda: decode(encode(message, compress=True))),
    )


def _ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(7):
        started = time.process_time()  # others on the machine shall not count
        work()
        times.append(time.process_time() - started)
    return 1000 * min(times)


# -- flips and texts ------------------------------------------------------------------------------------------------


def flips_table(halves: Halves, wire_dtypes: Sequence[str]) -> None:
    """How often the likeliest next token is another one."""
    print("| wire | other next token |")
    print("|---|---|")
    states = [hidden_states(halves.head, prompt) for prompt in prompts_of(halves)]
    best = [_best(halves, hidden) for hidden in states]
    count = sum(len(tokens) for tokens in best)
    for wire_dtype in wire_dtypes:
        flipped = 0
        for hidden, tokens in zip(states, best, strict=True):
            narrow = from_wire(to_wire(hidden, wire_dtype), dtype=hidden.dtype, device=hidden.device)
            flipped += int((_best(halves, narrow) != tokens).sum())
        print(f"| {wire_dtype} | {flipped} of {count} |", flush=True)


def _best(halves: Halves, hidden: torch.Tensor) -> torch.Tensor:
    chunks = [hidden[None, at : at + CHUNK] for at in range(0, len(hidden), CHUNK)]
    return halves.tail.logits(_fed(halves.tail.forward, chunks)).argmax(dim=-1)


def texts_table(halves: Halves, wire_dtypes: Sequence[str], max_tokens: int) -> None:
    """Every wire dtype's texts against those of float32, and its bytes."""
    print("| wire | K | texts as float32's | texts as its own K = 0 | bytes a token |")
    print("|---|---|---|---|---|")
    reference = texts_of(halves, "float32", max_tokens)
    for wire_dtype in wire_dtypes:
        plain = reference if wire_dtype == "float32" else texts_of(halves, wire_dtype, max_tokens)
        for draft_length in (0, 4):
            ran = texts_of(halves, wire_dtype, max_tokens, draft_length) if draft_length else plain
            print(
                f"| {wire_dtype} | {draft_length} | {_same(ran, reference)} | {_same(ran, plain)} "
                f"| {_bytes_per_token(ran):.0f} |",
                flush=True,
            )


def _same(ran: Sequence[Outcome], others: Sequence[Outcome]) -> str:
    return f"{sum(a.token_ids == b.token_ids for a, b in zip(ran, others, strict=True))} of {len(ran)}"


def _bytes_per_token(outcomes: Sequence[Outcome]) -> float:
    """Up and down, prefill included, per completion token."""
    metrics = [outcome.metrics for outcome in outcomes if outcome.metrics is not None]
    return sum(m.wire_bytes_up + m.wire_bytes_down for m in metrics) / sum(len(o.token_ids) for o in outcomes)


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="What hidden states cost on the wire, and what narrower ones change.")
    parser.add_argument("--only", action="append", choices=["frames", "flips", "texts"])
    parser.add_argument("--max-tokens", type=int, default=64, help="of `texts`")
    parser.add_argument("--wire-dtype", action="append", choices=list(DTYPE_BYTES), help="of `flips` and `texts`")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    halves = Halves.load(smollm2_directory(), SPLIT, slots=SLOTS, max_length=MAX_LENGTH)
    wire_dtypes = arguments.wire_dtype or list(DTYPE_BYTES)
    tables: dict[str, Callable[[], None]] = {
        "frames": lambda: frames_table(halves),
        "flips": lambda: flips_table(halves, wire_dtypes),
        "texts": lambda: texts_table(halves, wire_dtypes, arguments.max_tokens),
    }
    with torch.inference_mode():
        for name in arguments.only or tables:
            tables[name]()
            print()


if __name__ == "__main__":
    main()
