"""Head and tail as processes of their own, with what only a benchmark needs: `python -m benchmarks.gpu.processes head`.

All settings come from the environment, as those of `shardq head` and `shardq tail` do.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

from pydantic_settings import BaseSettings, SettingsConfigDict

from benchmarks.gpu.profiler import BusyMeter
from benchmarks.gpu.replay import ReplayDrafter, acceptance_for
from cli.errors import Interrupted
from cli.interruption import stop_on_signals
from cli.processes import die_with_parent
from tasks.logs import configure
from workers.engine.loader import load_config
from workers.head.drafters import Drafter
from workers.head.worker import load_drafter
from workers.head.worker import run as run_head
from workers.served import ServedModel
from workers.settings import HeadSettings, TailSettings
from workers.tail.worker import run as run_tail


class BenchSettings(BaseSettings):
    """What a process is told beside its settings."""

    model_config = SettingsConfigDict(env_prefix="SHARDQ_BENCH_", frozen=True)

    #: tokens per round that the replayed drafts give with drafts of fixed length; None: the drafter's own drafts
    tokens_per_round: float | None = None
    replayed_length: int = 8
    #: where it is written how busy the device was; see `benchmarks.gpu.profiler.BusyMeter`
    busy: Path | None = None


def main(part: str) -> None:
    """Run one half until it is told to end."""
    die_with_parent()
    configure("info", process=part)
    bench = BenchSettings()
    if bench.busy is not None:
        BusyMeter(bench.busy)
    with suppress(Interrupted), stop_on_signals("the benchmark is over") as stop:
        if part == "tail":
            run_tail(TailSettings(), stop)  # type: ignore[call-arg]
        else:
            make = _replaying(bench) if bench.tokens_per_round else load_drafter
            run_head(HeadSettings(), stop, make)  # type: ignore[call-arg]


def _replaying(bench: BenchSettings) -> Replaying:
    assert bench.tokens_per_round is not None
    return Replaying(acceptance_for(bench.tokens_per_round, bench.replayed_length))


class Replaying:
    """Makes a head's drafter: the one that its settings ask for, whose drafts are replaced."""

    def __init__(self, acceptance: float) -> None:
        self._acceptance = acceptance

    def __call__(self, settings: HeadSettings, served: ServedModel) -> Drafter:
        config = load_config(served.directory)
        step = 0 if config.tie_word_embeddings else 1
        real = load_drafter(settings, served)
        return ReplayDrafter(real, self._acceptance, step=step, vocabulary=config.vocab_size)


if __name__ == "__main__":
    main(sys.argv[1])
