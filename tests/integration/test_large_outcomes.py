"""An outcome with 84,000 log probabilities goes its whole way: front, queue server, database, results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from storage.jobs import claim_waiting, iterate_results
from tasks import keys
from tasks.generation import Alternative, Choice, FinishReason, Outcome, TokenLogprob
from tasks.openai_results import output_line
from tasks.recorder import Recorder
from tasks.results import ResultsReader, publish_outcome
from tests.bookkeeping import MODEL, Office, open_office, outcome, submit
from workers.head.channel_messages import MAX_MESSAGE_BYTES, Finished, decode_to_front, encode

NUM_TOKENS, NUM_TOP = 4000, 20


@pytest.fixture
def office(tmp_path: Path) -> Iterator[Office]:
    with open_office(tmp_path) as opened:
        yield opened


def token(number: int) -> Alternative:
    text = f" {number % 1500:x}"
    return Alternative(number % 1500, text, tuple(text.encode()), -(number % 977) / 61)


def large(job: str) -> Outcome:
    positions = tuple(
        TokenLogprob(token(number), tuple(token(31 * number + rank) for rank in range(NUM_TOP)))
        for number in range(NUM_TOKENS)
    )
    text = "".join(position.chosen.text for position in positions)
    ids = tuple(position.chosen.token for position in positions)
    more = Choice("b", (7,), FinishReason.STOP, positions[:1])
    return replace(outcome(job, text=text), token_ids=ids, logprobs=positions, choices=(more,))


def test_it_arrives_whole_and_fits_every_channel(office: Office) -> None:
    batch = submit(office.database, 1)
    claim_waiting(office.database, MODEL, max_jobs=1, max_bytes=10**6)
    sent = large(f"{batch}-1")
    message = encode(Finished(sent.task_id, sent))
    assert len(message) < MAX_MESSAGE_BYTES / 32
    received = decode_to_front(message)
    assert isinstance(received, Finished)
    assert received.outcome == sent

    publish_outcome(office.client, received.outcome)
    ((_, fields),) = office.client.xrange(keys.RESULTS)
    assert len(fields[b"json"]) < 600 * NUM_TOKENS
    assert Recorder(office.database, ResultsReader(office.client)).record(0) == 1

    (row,) = iterate_results(office.database, batch, logprobs=True)
    assert row.completion_tokens == NUM_TOKENS + 1
    first, second = json.loads(json.dumps(output_line(row)))["response"]["body"]["choices"]
    assert first["logprobs"]["token_logprobs"] == [position.chosen.logprob for position in sent.logprobs]
    assert all(NUM_TOP <= len(top) <= NUM_TOP + 1 for top in first["logprobs"]["top_logprobs"])
    assert first["text"][first["logprobs"]["text_offset"][-1] :] == sent.logprobs[-1].chosen.text
    assert len(second["logprobs"]["tokens"]) == 1
