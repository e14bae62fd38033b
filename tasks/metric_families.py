"""The names that `/metrics` exports, with their labels; `docs/metrics.md` lists them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: of everything that a head tells
HEAD = ("model", "head")
TAIL = ("model", "head", "tail")


@dataclass(frozen=True, slots=True)
class Family:
    """One metric."""

    #: without the `_total` that counters get
    name: str
    kind: Literal["gauge", "counter", "histogram"]
    labels: tuple[str, ...]
    text: str


FAMILIES = (
    Family("shardq:head_up", "gauge", ("head",), "1 for a living head, 0 until a dead one is forgotten."),
    Family("shardq:head_consuming", "gauge", HEAD, "1 if the head takes jobs: a tail is there."),
    Family("shardq:slots", "gauge", HEAD, "Texts decoded at the same time, at most."),
    Family("shardq:num_requests_running", "gauge", HEAD, "Texts that hold a slot."),
    Family("shardq:num_requests_waiting", "gauge", HEAD, "Texts at the head that wait for a slot."),
    Family("shardq:tokens_per_second", "gauge", HEAD, "Completion tokens per second over the last 5 s."),
    Family("shardq:lanes", "gauge", HEAD, "Rounds kept in flight."),
    Family("shardq:lanes_max", "gauge", HEAD, "Rounds in flight, at most."),
    Family("shardq:generation_tokens", "counter", HEAD, "Tokens committed to texts."),
    Family("shardq:prompt_tokens", "counter", HEAD, "Tokens of the prompts that got a slot."),
    Family("shardq:rounds", "counter", HEAD, "Rounds that were answered."),
    Family("shardq:row_rounds", "counter", HEAD, "Rows of those rounds."),
    Family("shardq:spec_decode_num_draft_tokens", "counter", HEAD, "Tokens drafted and sent."),
    Family("shardq:spec_decode_num_accepted_tokens", "counter", HEAD, "Drafted tokens that were accepted."),
    Family("shardq:spec_decode_acceptance_rate", "gauge", HEAD, "Accepted / drafted tokens over the last 10 s."),
    Family("shardq:spec_decode_tokens_per_round", "gauge", HEAD, "Tokens that a row's round commits, over 10 s."),
    Family("shardq:step_seconds", "counter", (*HEAD, "step"), "Seconds of frames by step: draft, head, link, tail."),
    Family("shardq:wire_bytes", "counter", (*HEAD, "direction"), "Bytes between head and tail: up, down."),
    Family("shardq:link_rtt_seconds", "gauge", HEAD, "An empty frame's way to the tail and back."),
    Family("shardq:link_bandwidth_bits_per_second", "gauge", HEAD, "Of the wire up, as frames of two sizes show it."),
    Family("shardq:gpu_memory_used_bytes", "gauge", (*HEAD, "side"), "Memory in use on the GPU of head or tail."),
    Family("shardq:gpu_memory_bytes", "gauge", (*HEAD, "side"), "All memory of that GPU."),
    Family("shardq:tail_up", "gauge", TAIL, "1 while the head works with this tail, 0 after it was lost."),
    Family("shardq:tail_uptime_seconds", "gauge", TAIL, "Since the tail's process was ready."),
    Family("shardq:tail_rows", "counter", TAIL, "Rows that the tail answered."),
    Family("shardq:tail_tokens", "counter", TAIL, "Tokens that the tail committed."),
    Family("shardq:tail_compute_seconds", "counter", TAIL, "Seconds that the tail worked on frames."),
    Family("shardq:queue_jobs", "gauge", ("model", "state"), "Jobs on the queue server: queued, or taken by a head."),
    Family("shardq:queue_up", "gauge", (), "1 if the queue server answered this scrape."),
    Family("shardq:redis_memory_used_bytes", "gauge", (), "Memory that the queue server uses."),
    Family("shardq:redis_memory_max_bytes", "gauge", (), "Its `maxmemory`; 0: no limit."),
    Family("shardq:results", "counter", ("finished_reason",), "Outcomes recorded, by how they ended."),
    Family("shardq:time_to_first_token_seconds", "histogram", (), "From a job's slot to its first token."),
    Family("shardq:e2e_request_latency_seconds", "histogram", (), "From a job's slot to its last token."),
    Family("shardq:feeder_paused", "gauge", (), "1 while nothing is fed: the queue server is short of memory."),
    Family("shardq:bookkeeper_active", "gauge", (), "1 for the bookkeeper at work, 0 for one that stands by."),
    Family("shardq:bookkeeper_lag_records", "gauge", (), "Records that wait to be written to the database."),
    Family("shardq:bookkeeper_lag_seconds", "gauge", (), "Age of the oldest of them."),
)
