"""`docs/models.md`: its table is computed, its command lines are those of the table."""

from __future__ import annotations

import re

import pytest

from scripts.models_page import PAGE, RECIPES, Card, Recipe, Sized, head_slots, tail_slots, with_table
from tests.documents import shardq_lines, shell_blocks
from workers.engine.families import FAMILIES

TEXT = PAGE.read_text(encoding="utf-8")


def test_the_table_is_what_make_docs_writes() -> None:
    assert "| Qwen2.5-7B-Instruct |" in TEXT
    assert with_table(TEXT) == TEXT, "run `make docs`"


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.target.hub_id)
def test_the_command_lines_of_a_model_say_what_its_row_does(recipe: Recipe) -> None:
    lines = [line for block in shell_blocks(PAGE) for line in shardq_lines(block.text)]
    halves = [line for line in lines if recipe.target.hub_id in line and str(recipe.split) in line]
    assert {line[0] for line in halves} == {"head", "tail"}
    sized = Sized.of(recipe)
    for line in halves:
        options = dict(zip(line[1::2], line[2::2], strict=True))
        assert int(options["--split"]) == recipe.split
        assert int(options["--max-length"]) == recipe.max_length
        assert options.get("--quantization", "none") == recipe.quantization
        assert int(options["--slots"]) <= min(head_slots(sized, Card()), tail_slots(sized, Card()))
        if line[0] == "head" and recipe.drafter is not None:
            assert options["--drafter-model"] == recipe.drafter.hub_id


def test_every_model_type_that_works_is_named() -> None:
    for kind in FAMILIES:
        assert re.search(rf"`{kind}`", TEXT), kind
