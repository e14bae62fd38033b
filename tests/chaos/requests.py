"""The jobs of a campaign, and which of them are fair: whose text does not hang on rounding."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import torch
from sqlalchemy import select
from transformers import AutoModelForCausalLM

from storage.database import Database
from storage.job_records import ChoiceRow, JobRow
from storage.tables import job
from tasks.generation import FinishReason, GenerationRequest, GenerationTask
from workers.engine import noise
from workers.engine.sampling import SamplingRows, filtered
from workers.engine.tokenizer import end_ids, load_tokenizer
from workers.head.prompts import PromptReader

#: rounding differs between shapes; see tests/parity.py
MIN_GAP = 1e-3
#: of a job, prompt included
MAX_LENGTH = 256

_OPENINGS = (
    "Write a short poem about the sea",
    "Explain to a child why the sky is blue",
    "The three most important inventions are",
    "Once upon a time, in a village by the river",
)
_SAMPLING: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0},
    {"temperature": 0.7, "top_p": 0.9, "n": 3},
    {"temperature": 0},
    {"temperature": 1.3, "top_k": 20},
)


def requests(count: int, seed: int, *, min_tokens: int, max_tokens: int) -> list[dict[str, Any]]:
    """Lines of a file: prompts and chats, greedy and sampled, of many lengths. The same for the same seed."""
    source = random.Random(seed)
    lines = []
    for number in range(count):
        text = f"{_OPENINGS[number % len(_OPENINGS)]}, number {source.randrange(10_000)}"
        asked = {"messages": [{"role": "user", "content": text}]} if number % 5 == 4 else {"prompt": text}
        lines.append(
            {
                "custom_id": f"job-{number}",
                **asked,
                **_SAMPLING[number % len(_SAMPLING)],
                "max_tokens": source.randint(min_tokens, max_tokens),
                "seed": source.randrange(2**31),
                # else most texts of a random model end soon
                "ignore_eos": number % 4 != 0,
            }
        )
    return lines


class Judge:
    """The uncut model: says how clearly each token of a finished job was the best choice."""

    def __init__(self, directory: Path) -> None:
        self._model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
        tokenizer = load_tokenizer(directory)
        self._prompts = PromptReader(
            tokenizer=tokenizer,
            eos=end_ids(directory, tokenizer),
            vocab_size=int(self._model.config.vocab_size),
            context=MAX_LENGTH,
        )

    def fair(self, database: Database, rows: list[JobRow]) -> list[JobRow]:
        """The jobs whose every token won by `MIN_GAP` or more. Fails if one is not the model's own choice."""
        stored = _requests(database, [row.id for row in rows])
        return [row for row in rows if self._gap(row, stored[row.id]) >= MIN_GAP]

    def _gap(self, row: JobRow, request: GenerationRequest) -> float:
        """The smallest one of all completions."""
        first = ChoiceRow(row.text or "", row.token_ids, row.finish_reason or "")
        completions = (first, *row.choices)
        if len(completions) != request.n:
            raise AssertionError(f"{row.custom_id}: {len(completions)} completions, not {request.n}")
        return min(
            self._gap_of(row, request.of_choice(choice), completion) for choice, completion in enumerate(completions)
        )

    @torch.inference_mode()
    def _gap_of(self, row: JobRow, request: GenerationRequest, completion: ChoiceRow) -> float:
        task = GenerationTask(row.id, row.attempt, row.batch_id, row.custom_id, row.model, request)
        read, chosen = self._prompts.read(task), list(completion.token_ids)
        # where the text ended by itself, its end was a choice, too, and is not among its tokens
        num_choices = len(chosen) + (completion.finish_reason == FinishReason.STOP)
        fed = torch.tensor([[*read.tokens, *chosen][: len(read.tokens) + num_choices - 1]])
        logits = self._model(fed).logits[0, len(read.tokens) - 1 :].float()
        if request.temperature:
            rows = SamplingRows.from_rows([read.sampling] * len(logits))
            positions = torch.arange(len(read.tokens), len(read.tokens) + len(logits))
            logits = filtered(logits, rows) + noise.gumbel(rows.seed, positions, logits.shape[-1])
        best = logits.topk(2)
        gaps = best.values[:, 0] - best.values[:, 1]
        right = best.indices[: len(chosen), 0] == torch.tensor(chosen)
        if bool((~right & (gaps[: len(chosen)] >= MIN_GAP)).any()):
            raise AssertionError(f"{row.custom_id}: the undisturbed text is not the model's: {completion.text!r}")
        return float(gaps.min())


def text_of(row: JobRow) -> str | None:
    """All that a job wrote, to be compared."""
    return "\0".join([row.text, *(choice.text for choice in row.choices)]) if row.text is not None else None


def _requests(database: Database, ids: list[str]) -> dict[str, GenerationRequest]:
    with database.read() as connection:
        found = connection.execute(select(job.c.id, job.c.request).where(job.c.id.in_(ids))).all()
    return {row.id: GenerationRequest.from_json(json.loads(row.request)) for row in found}
