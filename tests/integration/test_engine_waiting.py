"""An engine with nothing to do waits for one thing, and whatever comes ends that wait at once."""

from __future__ import annotations

import threading
import time

import pytest

from tasks.generation import GenerationRequest
from tests.models import tiny_model
from tests.pair import Halves, Outcomes, options, session, tasks_for
from workers.head import engine as engine_module
from workers.head.drafters import make_drafter
from workers.head.engine import HeadEngine
from workers.head.intake import Intake


def test_a_job_wakes_an_engine_that_waits_and_waiting_costs_no_turns(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_module, "WAIT_S", 60.0)
    directory = tiny_model(tmp_path_factory.mktemp("model"), "llama")
    halves = Halves.load(directory, 2, slots=1, max_length=64)
    drafter = make_drafter(
        "none", target=directory, drafter=None, dtype="float32", device="cpu", slots=1, max_length=64
    )
    intake, outcomes, turns = Intake(halves.prompts, "head"), Outcomes(), []
    engine = HeadEngine(halves.head, drafter, intake, outcomes, options(slots=1, lanes=1))
    intake.wakes(engine.wake)
    tasks = tasks_for([GenerationRequest("Once", None, 0, 3, temperature=0.0, ignore_eos=True)] * 2)

    def work() -> None:
        while len(outcomes.finished) < len(tasks):
            turns.append(time.perf_counter())
            engine.step()

    with session(halves, 1, 1) as courier:
        engine.open(courier)
        worker = threading.Thread(target=work, daemon=True)
        worker.start()
        for task in tasks:
            time.sleep(0.5)
            intake.deliver(task)
        worker.join(30)
    assert len(outcomes.finished) == 2
    # a job has one prefill and two rounds, each of which costs a turn or two; the waits cost nothing
    assert len(turns) < 30
