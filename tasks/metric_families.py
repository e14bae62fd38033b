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
    #: "info": a gauge that is 1, for what its labels say
    kind: Literal["gauge", "counter", "histogram", "info"]
    labels: tuple[str, ...]
    text: str


FAMILIES = (
    Family("shardq_head_up", "gauge", ("head",), "1 for a living head, 0 until a dead one is forgotten."),
    Family("shardq_head_info", "info", (*HEAD, "version", "dtype", "quantization", "drafter"), "What a head runs."),
    Family("shardq_head_consuming", "gauge", HEAD, "1 if the head takes jobs: a tail is there."),
    Family("shardq_slots", "gauge", HEAD, "Texts decoded at the same time, at most."),
    Family("shardq_num_requests_running", "gauge", HEAD, "Texts that hold a slot."),
    Family("shardq_num_requests_waiting", "gauge", HEAD, "Texts at the head that wait for a slot."),
    Family("shardq_tokens_per_second", "gauge", HEAD, "Completion tokens per second over the last 5 s."),
    Family("shardq_lanes", "gauge", HEAD, "Rounds kept in flight."),
    Family("shardq_lanes_max", "gauge", HEAD, "Rounds in flight, at most."),
    Family("shardq_generation_tokens", "counter", HEAD, "Tokens committed to texts."),
    Family("shardq_prompt_tokens", "counter", HEAD, "Tokens of the prompts that got a slot."),
    Family("shardq_rounds", "counter", HEAD, "Rounds that were answered."),
    Family("shardq_row_rounds", "counter", HEAD, "Rows of those rounds."),
    Family("shardq_spec_decode_num_draft_tokens", "counter", HEAD, "Tokens drafted and sent."),
    Family("shardq_spec_decode_num_accepted_tokens", "counter", HEAD, "Drafted tokens that were accepted."),
    Family("shardq_spec_decode_acceptance_rate", "gauge", HEAD, "Accepted / drafted tokens over the last 10 s."),
    Family("shardq_spec_decode_tokens_per_round", "gauge", HEAD, "Tokens that a row's round commits, over 10 s."),
    Family(
        "shardq_step_seconds", "counter", (*HEAD, "step"), "Seconds by step: draft, head, link, tail (and waiting)."
    ),
    Family("shardq_wire_bytes", "counter", (*HEAD, "direction"), "Bytes between head and tail: up, down."),
    Family("shardq_link_rtt_seconds", "gauge", HEAD, "An empty frame's way to the tail and back."),
    Family("shardq_link_bandwidth_bits_per_second", "gauge", HEAD, "Of the wire up, as frames of two sizes show it."),
    Family("shardq_gpu_memory_used_bytes", "gauge", (*HEAD, "side"), "Memory in use on the GPU of head or tail."),
    Family("shardq_gpu_memory_bytes", "gauge", (*HEAD, "side"), "All memory of that GPU."),
    Family("shardq_tail_up", "gauge", TAIL, "1 while the head works with this tail, 0 after it was lost."),
    Family("shardq_tail_uptime_seconds", "gauge", TAIL, "Since the tail's process was ready."),
    Family("shardq_tail_rows", "counter", TAIL, "Rows that the tail answered."),
    Family("shardq_tail_tokens", "counter", TAIL, "Tokens that the tail committed."),
    Family("shardq_tail_compute_seconds", "counter", TAIL, "Seconds that the tail worked on frames."),
    Family("shardq_queue_jobs", "gauge", ("model", "state"), "Jobs on the queue server: queued, or taken by a head."),
    Family("shardq_queue_up", "gauge", (), "1 if the queue server answered this scrape."),
    Family("shardq_redis_memory_used_bytes", "gauge", (), "Memory that the queue server uses."),
    Family("shardq_redis_memory_max_bytes", "gauge", (), "Its `maxmemory`; 0: no limit."),
    Family("shardq_results", "counter", ("model", "finished_reason"), "Outcomes recorded, by how they ended."),
    Family("shardq_time_to_first_token_seconds", "histogram", ("model",), "From a job's slot to its first token."),
    Family("shardq_e2e_request_latency_seconds", "histogram", ("model",), "From a job's slot to its last token."),
    Family("shardq_jobs", "gauge", ("model", "state"), "Jobs that have not ended: waiting, queued, running."),
    Family("shardq_database_up", "gauge", (), "1 if the database answered this scrape."),
    Family("shardq_database_size_bytes", "gauge", (), "What the database takes on its disk."),
    Family("shardq_disk_size_bytes", "gauge", (), "Size of the disk with the database; SQLite only."),
    Family("shardq_disk_free_bytes", "gauge", (), "What is free on it; SQLite only."),
    Family("shardq_bookkeeper_info", "info", ("version",), "What the bookkeeper runs."),
    Family("shardq_feeder_paused", "gauge", (), "1 while nothing is fed: the queue server is short of memory."),
    Family("shardq_bookkeeper_active", "gauge", (), "1 for the bookkeeper at work, 0 for one that stands by."),
    Family("shardq_bookkeeper_lag_records", "gauge", (), "Records that wait to be written to the database."),
    Family("shardq_bookkeeper_lag_seconds", "gauge", (), "Age of the oldest of them."),
)
