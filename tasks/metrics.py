"""What `/metrics` of the bookkeeper shows: its own counts, and what heads tell of themselves and of their tails.

GPU machines have no inbound port, so one address tells of all. Everything is read when a scrape comes: the series of a
head end with its presence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import redis
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from relay.errors import RelayRefused
from relay.keys import tail_name
from tasks import heads, keys, queues
from tasks.figures import HeadFigures
from tasks.heads import HeadInfo
from tasks.metric_families import FAMILIES, Family
from tasks.status import BookkeeperStatus
from tasks.tally import Histogram, Tally


@dataclass(frozen=True, slots=True)
class Sample:
    """A value of the family of this name."""

    name: str
    value: float | Histogram
    labels: tuple[str, ...] = ()


class FiguresCollector(Collector):
    """Reads what a scrape shows. A queue server that does not answer leaves the bookkeeper's own counts."""

    def __init__(self, client: redis.Redis, tally: Tally, status: Callable[[], BookkeeperStatus]) -> None:
        self._client = client
        self._tally = tally
        self._status = status

    def describe(self) -> Iterable[Metric]:
        """Nothing: what there is shows when it is asked for."""
        return []

    def collect(self) -> Iterator[Metric]:
        samples = [*self._own()]
        try:
            samples += self._queue_server()
        except (redis.RedisError, OSError):
            samples.append(Sample("shardq:queue_up", 0))
        by_name: dict[str, list[Sample]] = {}
        for sample in samples:
            by_name.setdefault(sample.name, []).append(sample)
        for family in FAMILIES:
            if family.name in by_name:
                yield _metric(family, by_name[family.name])

    def _own(self) -> Iterator[Sample]:
        status = self._status()
        yield Sample("shardq:bookkeeper_active", status.active)
        yield Sample("shardq:feeder_paused", status.feeder_paused)
        for end, number in self._tally.ends().items():
            yield Sample("shardq:results", number, (end,))
        yield Sample("shardq:time_to_first_token_seconds", self._tally.ttft)
        yield Sample("shardq:e2e_request_latency_seconds", self._tally.latency)

    def _queue_server(self) -> list[Sample]:
        """All that is on the queue server, or nothing. Raises redis.RedisError."""
        states = heads.states(self._client)
        alive = [info for info in states.values() if info is not None]
        samples = [Sample("shardq:head_up", info is not None, (name,)) for name, info in states.items()]
        samples += [sample for info in alive for sample in head_samples(info)]
        samples += self._queues(states)
        memory: dict[str, Any] = self._client.info("memory")
        return [
            *samples,
            *self._lag(),
            Sample("shardq:queue_up", 1),
            Sample("shardq:redis_memory_used_bytes", int(memory.get("used_memory", 0))),
            Sample("shardq:redis_memory_max_bytes", int(memory.get("maxmemory", 0))),
        ]

    def _queues(self, states: dict[str, HeadInfo | None]) -> Iterator[Sample]:
        for model in heads.registered_models(self._client):
            takers = [name for name, info in states.items() if info is not None and info.model == model]
            taken = sum(queues.num_unacked(self._client, name) for name in takers)
            yield Sample("shardq:queue_jobs", queues.num_waiting(self._client, model), (model, "queued"))
            yield Sample("shardq:queue_jobs", taken, (model, "taken"))

    def _lag(self) -> Iterator[Sample]:
        yield Sample("shardq:bookkeeper_lag_records", self._client.xlen(keys.RESULTS))
        oldest: Any = self._client.xrange(keys.RESULTS, count=1)
        seconds, micros = self._client.time()
        since = int(oldest[0][0].partition(b"-")[0]) / 1000 if oldest else seconds + micros / 1e6
        yield Sample("shardq:bookkeeper_lag_seconds", max(0.0, seconds + micros / 1e6 - since))


def head_samples(info: HeadInfo) -> Iterator[Sample]:
    """What a living head tells; of one without figures, what its presence alone says."""
    labels = (info.model, info.head_id)
    yield Sample("shardq:head_consuming", info.consuming, labels)
    yield Sample("shardq:slots", info.slots, labels)
    yield Sample("shardq:num_requests_running", info.running, labels)
    yield Sample("shardq:tokens_per_second", info.tokens_per_s, labels)
    if info.figures is not None:
        yield from _work(info.figures, labels)
        yield from _link(info.figures, labels)
        yield from _tail(info.figures, labels, consuming=info.consuming)


def _work(figures: HeadFigures, labels: tuple[str, str]) -> Iterator[Sample]:
    yield Sample("shardq:num_requests_waiting", figures.waiting, labels)
    yield Sample("shardq:lanes", figures.lanes, labels)
    yield Sample("shardq:lanes_max", figures.max_lanes, labels)
    yield Sample("shardq:generation_tokens", figures.tokens_total, labels)
    yield Sample("shardq:prompt_tokens", figures.prompt_tokens_total, labels)
    yield Sample("shardq:rounds", figures.rounds_total, labels)
    yield Sample("shardq:row_rounds", figures.row_rounds_total, labels)
    yield Sample("shardq:spec_decode_num_draft_tokens", figures.drafted_total, labels)
    yield Sample("shardq:spec_decode_num_accepted_tokens", figures.accepted_total, labels)
    yield from _measured("shardq:spec_decode_acceptance_rate", figures.acceptance, labels)
    yield from _measured("shardq:spec_decode_tokens_per_round", figures.tokens_per_round, labels)
    yield Sample("shardq:step_seconds", figures.draft_s_total, (*labels, "draft"))
    yield Sample("shardq:step_seconds", figures.head_s_total, (*labels, "head"))
    yield Sample("shardq:step_seconds", figures.link_s_total, (*labels, "link"))
    yield Sample("shardq:step_seconds", figures.tail_s_total, (*labels, "tail"))
    yield from _gpu(figures.gpu_used_bytes, figures.gpu_total_bytes, (*labels, "head"))


def _link(figures: HeadFigures, labels: tuple[str, str]) -> Iterator[Sample]:
    yield Sample("shardq:wire_bytes", figures.bytes_up_total, (*labels, "up"))
    yield Sample("shardq:wire_bytes", figures.bytes_down_total, (*labels, "down"))
    rtt_ms, mbit_per_s = figures.rtt_ms, figures.mbit_per_s_up
    yield from _measured("shardq:link_rtt_seconds", None if rtt_ms is None else rtt_ms / 1e3, labels)
    yield from _measured(
        "shardq:link_bandwidth_bits_per_second", None if mbit_per_s is None else mbit_per_s * 1e6, labels
    )


def _tail(figures: HeadFigures, labels: tuple[str, str], *, consuming: bool) -> Iterator[Sample]:
    if not figures.tail_id:
        return
    tail_labels = (*labels, stable_name(figures.tail_id))
    yield Sample("shardq:tail_up", consuming, tail_labels)
    if (tail := figures.tail) is not None:
        yield Sample("shardq:tail_uptime_seconds", tail.uptime_s, tail_labels)
        yield Sample("shardq:tail_rows", tail.rows, tail_labels)
        yield Sample("shardq:tail_tokens", tail.tokens, tail_labels)
        yield Sample("shardq:tail_compute_seconds", tail.compute_s, tail_labels)
        yield from _gpu(tail.gpu_used_bytes, tail.gpu_total_bytes, (*labels, "tail"))


def _gpu(used: int, total: int, labels: tuple[str, ...]) -> Iterator[Sample]:
    if total:
        yield Sample("shardq:gpu_memory_used_bytes", used, labels)
        yield Sample("shardq:gpu_memory_bytes", total, labels)


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
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    found = kind(family.name, family.text, labels=labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram)
        found.add_metric(sample.labels, float(sample.value))
    return found
