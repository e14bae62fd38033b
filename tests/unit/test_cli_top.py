"""How `shardq top` shows the system, on narrow and wide screens."""

from __future__ import annotations

from dataclasses import replace

import pytest
from rich.console import Console

from cli.top_reading import QueueDepth, Reading
from cli.top_view import WIDE, view
from tests.bookkeeping import head_info
from tests.live_figures import FIGURES

HEAD = replace(head_info("gpu-a", slots=16, live=("a.1", "a.2", "a.3")), figures=FIGURES)
READING = Reading((HEAD,), (QueueDepth("tiny", 1234, 3, 16),), True, 2, 5_000_000, 256_000_000)


def shown(reading: Reading, width: int, height: int | None = None) -> list[str]:
    console = Console(width=width, highlight=False, emoji=False, markup=False)
    with console.capture() as captured:
        console.print(view(reading, width=width, height=height))
    return captured.get().splitlines()


def test_everything_of_a_pair_fits_80_columns_uncut() -> None:
    lines = shown(READING, 80)
    text = "\n".join(lines)
    assert max(map(len, lines)) <= 80
    assert "…" not in text
    for part in ("3/16", "2/8", "12.5", "50%", "2.5", "86ms", "64", "gpu-b-01234567", "1,234", "2 records behind"):
        assert part in text


def test_a_wide_screen_shows_more() -> None:
    text = "\n".join(shown(READING, WIDE))
    assert "ngram" in text
    assert "7/14/57/21%" in text


def test_a_low_screen_shows_how_many_there_are_more() -> None:
    heads = tuple(replace(HEAD, head_id=f"gpu-{number}") for number in range(20))
    lines = shown(replace(READING, heads=heads), 80, 24)
    assert len(lines) <= 22
    assert sum("and 17 more" in line for line in lines) == 2


def test_heads_without_figures_and_an_empty_system_say_what_is_missing() -> None:
    assert "12.5" in "\n".join(shown(replace(READING, heads=(head_info(),)), 80))
    text = "\n".join(shown(Reading((), (), False, 0, 0, 0), 80))
    for part in ("no bookkeeper", "shardq head", "no model is served"):
        assert part in text


@pytest.mark.parametrize("width", [80, WIDE])
def test_names_of_any_length_break_no_line(width: int) -> None:
    long = replace(HEAD, head_id="h" * 60, model="m" * 100, figures=replace(FIGURES, tail_id="t" * 63 + "-01234567"))
    assert all(len(line) <= width for line in shown(replace(READING, heads=(long,)), width))
