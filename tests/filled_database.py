"""Ended batches with known figures, for the tests of what is asked of stored results."""

from __future__ import annotations

import json

from storage.batch_records import NewBatch
from storage.batches import add_jobs, begin_submission, publish_batch
from storage.database import Database
from storage.job_records import NewJob, OutcomeRow
from storage.jobs import claim_waiting
from storage.outcomes import record_outcomes
from storage.states import JobState

MODEL = "tiny"
#: when the jobs were fed; job n of a batch started n seconds later
START = 1_700_000_000.0


def fill(
    db: Database,
    texts: list[str | None],
    *,
    name: str | None = None,
    model: str = MODEL,
    prefix: str = "c",
    prompt: str = "prompt",
) -> str:
    """An ended batch with a job per text, failed where it is None; its id.

    Job n generates a token per character and takes 2 s in its slot: 0.1 n to the first token, 0.2 s drafting, 0.3 s
    head, 0.4 s link, 0.5 s tail. Jobs with a long text end by length.
    """
    submission = begin_submission(db, NewBatch(file_hash=name or prefix, name=name))
    requests = [json.dumps({"prompt": f"{prompt} {n}", "seed": 7}) for n in range(1, len(texts) + 1)]
    jobs = [NewJob(n, f"{prefix}{n}", model, "/v1/completions", request) for n, request in enumerate(requests, start=1)]
    add_jobs(db, submission, jobs)
    batch = publish_batch(db, submission).id
    claim_waiting(db, model, max_jobs=len(jobs), max_bytes=10**9)
    record_outcomes(db, [_outcome(batch, n, text) for n, text in enumerate(texts, start=1)])
    return batch


def _outcome(batch: str, n: int, text: str | None) -> OutcomeRow:
    if text is None:
        return OutcomeRow(
            f"{batch}-{n}", 1, "h1", JobState.FAILED, error_type="context_length_exceeded", error_message="too long"
        )
    return OutcomeRow(
        f"{batch}-{n}",
        1,
        "h1",
        JobState.COMPLETED,
        text=text,
        token_ids=tuple(map(ord, text)),
        finish_reason="length" if len(text) > 20 else "stop",
        prompt_tokens=3,
        started_at=START + n,
        finished_at=START + n + 2,
        ttft_s=0.1 * n,
        decode_tps=10.0 * n,
        rounds=4,
        tokens_per_round=2.5,
        drafted=12,
        accepted=6,
        cached_tokens=0,
        wire_bytes_up=1000,
        wire_bytes_down=100,
        draft_s=0.2,
        head_s=0.3,
        link_s=0.4,
        tail_s=0.5,
        wire_dtype="float32",
    )
