"""Several completions of a prompt, from the file to the results, through real processes."""

from __future__ import annotations

import json
from contextlib import nullcontext
from typing import Any

from cli.errors import ExitCode
from tasks.seeds import choice_seed
from tests.acceptance.system import System

SEVERAL: dict[str, Any] = {
    "custom_id": "several",
    "prompt": "One of them said to the others: ",
    "seed": 3,
    "max_tokens": 20,
}
NUM = 3


def choices(line: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = line["response"]["body"]["choices"]
    return found


def test_each_choice_is_the_text_of_a_line_with_its_seed(whole_system: System) -> None:
    singles = [
        {**SEVERAL, "custom_id": f"single-{choice}", "n": 1, "seed": choice_seed(3, choice)} for choice in range(NUM)
    ]
    chat = {
        "custom_id": "chat",
        "messages": [{"role": "user", "content": "Hello"}],
        "max_tokens": 5,
        "ignore_eos": True,
    }
    batch = whole_system.submit([SEVERAL, *singles, chat], "--n", str(NUM))
    assert whole_system.wait_for(batch).counts.completed == 5
    result = whole_system.shardq("results", batch, "--json")
    assert result.returncode == ExitCode.OK, result.stderr
    lines = {line["custom_id"]: line for line in map(json.loads, result.stdout.splitlines())}

    several = choices(lines["several"])
    assert [choice["index"] for choice in several] == [0, 1, 2]
    for number, choice in enumerate(several):
        (single,) = choices(lines[f"single-{number}"])
        assert (choice["text"], choice["finish_reason"]) == (single["text"], single["finish_reason"])
    assert len({choice["text"] for choice in several}) == NUM

    body = lines["chat"]["response"]["body"]
    assert [choice["message"]["role"] for choice in body["choices"]] == ["assistant"] * NUM
    assert body["usage"]["completion_tokens"] == 5 * NUM
    table = whole_system.shardq("results", batch, "--format", "table").stdout
    assert table.count("(+ 2 choices)") == 2
    csv = whole_system.shardq("results", batch, "--format", "csv").stdout.splitlines()
    assert csv[0].endswith(",num_choices")


def test_a_killed_head_changes_no_choice(whole_system: System) -> None:
    lengths = [4, 60, 60, 60]
    rows = [
        {**SEVERAL, "custom_id": f"job-{n}", "seed": n, "n": 4, "max_tokens": length, "ignore_eos": True}
        for n, length in enumerate(lengths)
    ]
    written = []
    for kill in (False, True):
        with whole_system.slow() if kill else nullcontext():
            batch = whole_system.submit(rows)
            if kill:
                whole_system.wait_for(batch, completed=1)
                whole_system.kill_head()
        if kill:
            assert whole_system.progress(batch).counts.num_open > 0
            whole_system.start_head()
        assert whole_system.wait_for(batch).counts.completed == len(rows)
        jobs = whole_system.jobs(batch)
        assert all(job.duplicate_records == 0 for job in jobs)
        written.append([(job.text, job.choices) for job in jobs])
    assert written[0] == written[1]


def test_a_line_with_every_parameter_and_options_for_the_others_run_to_their_ends(whole_system: System) -> None:
    everything = {
        "presence_penalty": 0.5,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 5},
        "min_tokens": 2,
        "stop_token_ids": [10],
        "logprobs": 2,
        "n": 2,
        "best_of": 2,
        "max_tokens": 8,
    }
    options = (
        *(
            "--presence-penalty",
            "0.1",
            "--frequency-penalty",
            "0.1",
            "--repetition-penalty",
            "1.2",
            "--min-tokens",
            "1",
        ),
        *("--logit-bias", "65=-5", "--logit-bias", "66=1.5", "--stop-token-id", "11", "--stop-token-id", "12"),
        *("--n", "3", "--logprobs", "--top-logprobs", "1", "--max-tokens", "8"),
    )
    batch = whole_system.submit([{"prompt": "line", **everything}, {"prompt": "options"}], *options)
    assert whole_system.wait_for(batch).counts.completed == 2
    assert [job.num_choices for job in whole_system.jobs(batch)] == [2, 3]
    assert all((job.completion_tokens or 0) <= 8 * job.num_choices for job in whole_system.jobs(batch))
