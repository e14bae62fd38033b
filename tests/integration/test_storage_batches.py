"""Submitting, resuming and finding batches, on both kinds of database."""

from __future__ import annotations

import pytest

from storage.batch_records import BatchRow, Counts, NewBatch
from storage.batches import (
    add_jobs,
    begin_submission,
    discard_batch,
    get_batch,
    list_batches,
    publish_batch,
)
from storage.database import Database
from storage.errors import (
    BatchAmbiguous,
    BatchEmpty,
    BatchNotFound,
    JobExists,
    NameTaken,
    SubmissionSuperseded,
)
from storage.job_records import NewJob
from storage.jobs import claim_waiting, iterate_results, progress
from storage.served_models import list_models, upsert_model
from storage.states import BatchStatus
from tests.integration.storage_databases import START, Clock

pytest_plugins = ["tests.integration.storage_databases"]


def new_jobs(count: int, first: int = 1) -> list[NewJob]:
    return [
        NewJob(line, f"id-{line}", "m", "/v1/completions", '{"prompt":"p"}') for line in range(first, first + count)
    ]


def submit(db: Database, new: NewBatch, count: int = 3) -> BatchRow:
    submission = begin_submission(db, new)
    add_jobs(db, submission, new_jobs(count))
    return publish_batch(db, submission, num_invalid_lines=2)


def test_a_batch_is_unseen_by_the_feeder_until_it_is_published(db: Database, clock: Clock) -> None:
    submission = begin_submission(db, NewBatch("hash", parameters={"temperature": 0.5}, endpoint="/v1/x"))
    add_jobs(db, submission, new_jobs(2))
    assert claim_waiting(db, "m", max_jobs=9, max_bytes=10**6) == []
    assert submission.batch.status is BatchStatus.VALIDATING

    clock.now += 1.5
    published = publish_batch(db, submission, num_invalid_lines=4)

    assert published.status is BatchStatus.IN_PROGRESS
    assert published.counts == Counts(waiting=2)
    assert (published.created_at, published.in_progress_at) == (START, START + 1.5)
    assert (published.parameters, published.endpoint) == ({"temperature": 0.5}, "/v1/x")
    assert published.num_invalid_lines == 4
    assert len(claim_waiting(db, "m", max_jobs=9, max_bytes=10**6)) == 2


def test_the_same_file_without_a_name_is_a_new_batch_each_time(db: Database) -> None:
    assert submit(db, NewBatch("hash")).id != submit(db, NewBatch("hash")).id
    assert len(list_batches(db)) == 2


def test_the_same_name_and_file_find_the_published_batch_as_it_is(db: Database) -> None:
    first = submit(db, NewBatch("hash", "n", {"seed": 1}))
    again = begin_submission(db, NewBatch("hash", "n", {"seed": 1}))

    assert again.published
    assert again.batch == first
    with pytest.raises(SubmissionSuperseded):
        add_jobs(db, again, new_jobs(1, first=9))


def test_an_interrupted_submission_is_done_again_from_the_file(db: Database) -> None:
    interrupted = begin_submission(db, NewBatch("hash", "n", {"seed": 1}))
    add_jobs(db, interrupted, new_jobs(2))

    resumed = begin_submission(db, NewBatch("hash", "n", {"seed": 2}))
    assert (resumed.resumed, resumed.published) == (True, False)
    assert resumed.batch.id == interrupted.batch.id
    add_jobs(db, resumed, new_jobs(3))
    published = publish_batch(db, resumed)

    assert published.counts == Counts(waiting=3)
    assert published.parameters == {"seed": 2}


def test_a_submission_that_was_taken_over_can_no_longer_write(db: Database) -> None:
    slow = begin_submission(db, NewBatch("hash", "n"))
    begin_submission(db, NewBatch("hash", "n"))

    with pytest.raises(SubmissionSuperseded):
        add_jobs(db, slow, new_jobs(1))
    with pytest.raises(SubmissionSuperseded):
        publish_batch(db, slow)
    with pytest.raises(SubmissionSuperseded):
        discard_batch(db, slow)


def test_the_same_name_with_another_content_is_refused(db: Database) -> None:
    first = submit(db, NewBatch("hash", "n"))

    with pytest.raises(NameTaken, match=f"'n' belongs to {first.id}, which has another content"):
        begin_submission(db, NewBatch("other", "n"))


def test_a_published_name_is_refused_for_other_parameters(db: Database) -> None:
    submit(db, NewBatch("hash", "n", {"temperature": 0.5, "seed": 1}))

    with pytest.raises(NameTaken, match=r"other parameters \(seed, temperature\)"):
        begin_submission(db, NewBatch("hash", "n", {"temperature": 0.6}))


def test_a_batch_without_jobs_cannot_be_published(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    with pytest.raises(BatchEmpty):
        publish_batch(db, submission)


def test_a_discarded_batch_leaves_nothing_behind(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash", "n"))
    add_jobs(db, submission, new_jobs(2))
    discard_batch(db, submission)

    assert list_batches(db) == []
    assert list(iterate_results(db, submission.batch.id)) == []
    assert not begin_submission(db, NewBatch("other", "n")).resumed


def test_a_repeated_line_or_custom_id_writes_nothing_of_its_chunk(db: Database) -> None:
    submission = begin_submission(db, NewBatch("hash"))
    add_jobs(db, submission, new_jobs(2))

    for repeated in (NewJob(9, "id-1", "m", "u", "{}"), NewJob(1, "id-9", "m", "u", "{}")):
        with pytest.raises(JobExists):
            add_jobs(db, submission, [*new_jobs(1, first=5), repeated])
    assert publish_batch(db, submission).counts == Counts(waiting=2)


def test_a_custom_id_may_stand_in_several_batches(db: Database) -> None:
    first, second = submit(db, NewBatch("hash")), submit(db, NewBatch("hash"))
    ids = [[job.custom_id for job in iterate_results(db, batch.id)] for batch in (first, second)]
    assert ids[0] == ids[1] != []
    assert first.id != second.id


def test_a_batch_is_found_by_id_prefix_or_name(db: Database) -> None:
    batch = submit(db, NewBatch("hash", "my batch"))

    for reference in (batch.id, batch.id[:12], batch.id.removeprefix("batch_")[:8], "my batch"):
        assert get_batch(db, reference) == batch


@pytest.mark.parametrize("reference", ["", "nothing", "%", "batch_%", "my"])
def test_an_unknown_reference_is_an_error_that_says_so(db: Database, reference: str) -> None:
    submit(db, NewBatch("hash", "my batch"))
    with pytest.raises(BatchNotFound, match="no batch"):
        get_batch(db, reference)


def test_an_ambiguous_prefix_names_its_candidates(db: Database) -> None:
    ids = {submit(db, NewBatch("hash")).id for _ in range(2)}

    with pytest.raises(BatchAmbiguous, match="'batch_' fits several batches") as caught:
        get_batch(db, "batch_")
    assert set(caught.value.candidates) == ids


def test_an_id_wins_over_a_name_that_looks_like_it(db: Database) -> None:
    first = submit(db, NewBatch("hash"))
    submit(db, NewBatch("hash", first.id))

    assert get_batch(db, first.id) == first


def test_batches_are_listed_newest_first_with_their_counts(db: Database, clock: Clock) -> None:
    ids = []
    for count in (1, 2, 3):
        clock.now += 1
        ids.append(submit(db, NewBatch("hash"), count).id)
    clock.now += 1
    begin_submission(db, NewBatch("hash"))

    listed = list_batches(db, limit=3)
    assert listed[0].status is BatchStatus.VALIDATING
    assert [batch.id for batch in listed[1:]] == [ids[2], ids[1]]
    assert [batch.counts.total for batch in listed] == [0, 3, 2]
    assert [batch.id for batch in list_batches(db, statuses=[BatchStatus.IN_PROGRESS])] == ids[::-1]


def test_progress_of_an_unknown_batch_is_an_error(db: Database) -> None:
    with pytest.raises(BatchNotFound):
        progress(db, "batch_none")


def test_a_served_model_is_stored_once_with_its_latest_profile(db: Database, clock: Clock) -> None:
    upsert_model(db, "b", {"dtype": "float16"})
    upsert_model(db, "a", {"dtype": "float16"})
    clock.now += 1
    upsert_model(db, "b", {"dtype": "float32", "context": 1024})

    models = list_models(db)
    assert [(item.name, item.profile) for item in models] == [
        ("a", {"dtype": "float16"}),
        ("b", {"dtype": "float32", "context": 1024}),
    ]
    assert models[1].updated_at == clock.now
