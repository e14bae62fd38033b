"""Heads and tails that do not fit, with real processes: every command says why, and what to do."""

from __future__ import annotations

import json

from tests.acceptance.system import System


def test_a_tail_that_does_not_fit_is_named_with_both_sides_wherever_one_looks(system: System) -> None:
    system.start_bookkeeper()
    system.start_tail(split=1)
    # one that has loaded its half, and one that has nothing to choose its split by
    system.start_head("fixed", split=2)
    system.start_head("auto", split="auto", dtype="float16", name="other")
    system.wait_until(lambda: len(obstacles(system)) == 2, "two heads that say what stands in their way")
    said = obstacles(system)
    assert "and head fixed differ: split: 1 ≠ 2 (give both the same --split)" in said["fixed"]
    assert "differ: dtype: float32 ≠ float16; wire_dtype: float32 ≠ float16" in said["auto"]
    assert said["auto"].endswith("(give both the same --dtype, --wire-dtype)")

    batch = system.submit([{"prompt": "Hi", "max_tokens": 1}])
    reason = f"head fixed takes no jobs: {said['fixed']}"
    assert reason in system.shardq("status", batch).stderr
    assert json.loads(system.shardq("status", batch, "--json").stdout)["obstacles"] == [reason]
    assert all(text in system.shardq("status").stderr for text in said.values())
    top = json.loads(system.shardq("top", "--once", "--json").stdout)
    assert set(top["obstacles"]) == {f"head {name} takes no jobs: {text}" for name, text in said.items()}
    findings = json.loads(system.shardq("doctor", "--json").stdout)
    warned = [finding["text"] for finding in findings if finding["grade"] in ("failed", "warning")]
    (fixed,) = (text for text in warned if text.startswith("fixed serves tiny with 8 slots, "))
    assert fixed.endswith(f"but takes no jobs: {said['fixed']}")
    (tail,) = (text for text in warned if "layers from 1, up to 8 slots, but head " in text)
    assert all(text in tail for text in said.values())


def obstacles(system: System) -> dict[str, str]:
    """What each head says keeps it from its tail."""
    return {head.head_id: head.obstacle for head in system.heads() if head.obstacle and "differ" in head.obstacle}
