"""What `/metrics` of the bookkeeper shows: its own counts, and what heads tell of themselves and of their tails.

GPU machines have no inbound port, so one address tells of all. Everything is read when a scrape comes: the series of a
head end with its presence.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from relay.errors import RelayRefused
from relay.installed import installed_version
from relay.keys import tail_name
from storage.database import Database
from storage.errors import StorageError
from storage.jobs import open_jobs
from tasks import heads, keys, queues
from tasks.figures import HeadFigures
from tasks.heads import HeadInfo
from tasks.metric_families import FAMILIES, Family
from tasks.status import BookkeeperStatus
from tasks.tally import Histogram, ModelTally, Tally

#: the family that every registered model has a sample of
_QUEUE = "shardq_queue_jobs"


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of the family of this name."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


class FiguresCollector(Collector):
    """Reads what a scrape shows. A queue server that does not answer leaves the bookkeeper's own counts."""

    def __init__(
        self, client: redis.Redis, database: Database, tally: Tally, status: Callable[[], BookkeeperStatus]
    ) -> None:
        self._client = client
        self._database = database
        self._tally = tally
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is shows when it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        samples = [*self._own(), *self._stored()]
        try:
            samples += self._queue_server()
        except (redis.RedisError, OSError):
            samples.append(Sample("shardq_queue_up", 0))
        samples += _outcomes(self._tally.models(), {sample.labels[0] for sample in samples if sample.name == _QUEUE})
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            by_name.setdefault(sample.name, []).append(sample)
        for family in FAMILIES:
            if family.name in by_name:
                yield _metric(family, by_name[family.name])

    def _own(self) -> Iterator[Sample]:
        status = self._status()
        yield Sample("shardq_bookkeeper_info", 1, (installed_version(),))
        yield Sample("shardq_bookkeeper_active", status.active)
        yield Sample("shardq_feeder_paused", status.feeder_paused)

    def _stored(self) -> list[Sample]:
        """What the database says, or that it says nothing."""
        try:
            jobs, size = open_jobs(self._database), self._database.num_bytes()
        except (StorageError, OSError):
            return [Sample("shardq_database_up", 0)]
        samples = [Sample("shardq_jobs", number, (model, str(state))) for (model, state), number in jobs.items()]
        samples += [Sample("shardq_database_up", 1), Sample("shardq_database_size_bytes", size)]
        if (file := self._database.sqlite_file) is not None:
            disk = shutil.disk_usage(file.absolute().parent)
            samples += [Sample("shardq_disk_size_bytes", disk.total), Sample("shardq_disk_free_bytes", disk.free)]
        return samples

    def _queue_server(self) -> list[Sample]:
        """All that is on the queue server, or nothing. Raises redis.RedisError."""
        states = heads.states(self._client)
        alive = [info for info in states.values() if info is not None]
        samples = [Sample("shardq_head_up", info is not None, (name,)) for name, info in states.items()]
        samples += [sample for info in alive for sample in head_samples(info)]
        samples += self._queues(states)
        memory: dict[str, Any] = self._client.info("memory")
        return [
            *samples,
            *self._lag(),
            Sample("shardq_queue_up", 1),
            Sample("shardq_redis_memory_used_bytes", int(memory.get("used_memory", 0))),
            Sample("shardq_redis_memory_max_bytes", int(memory.get("maxmemory", 0))),
        ]

    def _queues(self, states: dict[str, HeadInfo | None]) -> Iterator[Sample]:
        for model in heads.registered_models(self._client):
            takers = [name for name, info in states.items() if info is not None and info.model == model]
            taken = sum(queues.num_unacked(self._client, name) for name in takers)
            yield Sample(_QUEUE, queues.num_waiting(self._client, model), (model, "queued"))
            yield Sample(_QUEUE, taken, (model, "taken"))

    def _lag(self) -> Iterator[Sample]:
        yield Sample("shardq_bookkeeper_lag_records", self._client.xlen(keys.RESULTS))
        oldest: Any = self._client.xrange(keys.RESULTS, count=1)
        seconds, micros = self._client.time()
        since = int(oldest[0][0].partition(b"-")[0]) / 1000 if oldest else seconds + micros / 1e6
        yield Sample("shardq_bookkeeper_lag_seconds", max(0.0, seconds + micros / 1e6 - since))


def _outcomes(tallies: Mapping[str, ModelTally], registered: Collection[str]) -> Iterator[Sample]:
    """Of every registered model, from nothing on: `increase()` does not see a series' first value."""
    for model in sorted({*tallies, *registered}):
        tally = tallies.get(model) or ModelTally()
        for end, number in tally.ends().items():
            yield Sample("shardq_results", number, (model, end))
        yield Sample("shardq_time_to_first_token_seconds", tally.ttft, (model,))
        yield Sample("shardq_e2e_request_latency_seconds", tally.latency, (model,))


def head_samples(info: HeadInfo) -> Iterator[Sample]:
    """What a living head tells; of one without figures, what its presence alone says."""
    labels = (info.model, info.head_id)
    drafter = info.figures.drafter if info.figures else ""
    runs = (info.version, info.profile.dtype, info.profile.quantization, drafter)
    yield Sample("shardq_head_info", 1, (*labels, *runs))
    yield Sample("shardq_head_consuming", info.consuming, labels)
    yield Sample("shardq_slots", info.slots, labels)
    yield Sample("shardq_num_requests_running", info.running, labels)
    yield Sample("shardq_tokens_per_second", info.tokens_per_s, labels)
    if info.figures is not None:
        yield from _work(info.figures, labels)
        yield from _link(info.figures, labels)
        yield from _tail(info.figures, labels, consuming=info.consuming)


def _work(figures: HeadFigures, labels: tuple[str, str]) -> Iterator[Sample]:
    yield Sample("shardq_num_requests_waiting", figures.waiting, labels)
    yield Sample("shardq_lanes", figures.lanes, labels)
    yield Sample("shardq_lanes_max", figures.max_lanes, labels)
    yield Sample("shardq_generation_tokens", figures.tokens_total, labels)
    yield Sample("shardq_prompt_tokens", figures.prompt_tokens_total, labels)
    yield Sample("shardq_rounds", figures.rounds_total, labels)
    yield Sample("shardq_row_rounds", figures.row_rounds_total, labels)
    yield Sample("shardq_spec_decode_num_draft_tokens", figures.drafted_total, labels)
    yield Sample("shardq_spec_decode_num_accepted_tokens", figures.accepted_total, labels)
    yield from _measured("shardq_spec_decode_acceptance_rate", figures.acceptance, labels)
    yield from _measured("shardq_spec_decode_tokens_per_round", figures.tokens_per_round, labels)
    yield Sample("shardq_step_seconds", figures.draft_s_total, (*labels, "draft"))
    yield Sample("shardq_step_seconds", figures.head_s_total, (*labels, "head"))
    yield Sample("shardq_step_seconds", figures.link_s_total, (*labels, "link"))
    yield Sample("shardq_step_seconds", figures.tail_s_total, (*labels, "tail"))
    yield from _gpu(figures.gpu_used_bytes, figures.gpu_total_bytes, (*labels, "head"))


def _link(figures: HeadFigures, labels: tuple[str, str]) -> Iterator[Sample]:
    yield Sample("shardq_wire_bytes", figures.bytes_up_total, (*labels, "up"))
    yield Sample("shardq_wire_bytes", figures.bytes_down_total, (*labels, "down"))
    rtt_ms, mbit_per_s = figures.rtt_ms, figures.mbit_per_s_up
    yield from _measured("shardq_link_rtt_seconds", None if rtt_ms is None else rtt_ms / 1e3, labels)
    yield from _measured(
        "shardq_link_bandwidth_bits_per_second", None if mbit_per_s is None else mbit_per_s * 1e6, labels
    )


def _tail(figures: HeadFigures, labels: tuple[str, str], *, consuming: bool) -> Iterator[Sample]:
    if not figures.tail_id:
        return
    tail_labels = (*labels, stable_name(figures.tail_id))
    yield Sample("shardq_tail_up", consuming, tail_labels)
    if (tail := figures.tail) is not None:
        yield Sample("shardq_tail_uptime_seconds", tail.uptime_s, tail_labels)
        yield Sample("shardq_tail_rows", tail.rows, tail_labels)
        yield Sample("shardq_tail_tokens", tail.tokens, tail_labels)
        yield Sample("shardq_tail_compute_seconds", tail.compute_s, tail_labels)
        yield from _gpu(tail.gpu_used_bytes, tail.gpu_total_bytes, (*labels, "tail"))


def _gpu(used: int, total: int, labels: tuple[str, ...]) -> Iterator[Sample]:
    if total:
        yield Sample("shardq_gpu_memory_used_bytes", used, labels)
        yield Sample("shardq_gpu_memory_bytes", total, labels)


def _measured(name: str, value: float | None, labels: tuple[str, ...]) -> Iterator[Sample]:
    if value is not None:
        yield Sample(name, value, labels)


def stable_name(tail_id: str) -> str:
    """A tail's name without what differs from process to process: labels must stay few."""
    try:
        return tail_name(tail_id)
    except RelayRefused:
        return tail_id


def _metric(family: Family, samples: list[Sample]) -> Metric:
    labels = list(family.labels)
    if family.kind == "histogram":
        histograms = HistogramMetricFamily(family.name, family.text, labels=labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram)
            histograms.add_metric(sample.labels, sample.value.buckets(), sample.value.sum_s)
        return histograms
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily  # what is an info is a gauge, too
    found = kind(family.name, family.text, labels=labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        found.add_metric(sample.labels, float(sample.value))
    return found
