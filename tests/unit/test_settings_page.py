"""`docs/settings.md` says what the settings are, and all of them."""

from __future__ import annotations

import re
from pathlib import Path

from cli.catalogue import all_settings
from scripts.settings_page import PAGE, page

ROOT = Path(__file__).parents[2]

#: set by one process of ours for another, by `init-server` for Docker, or by a benchmark for its own
INTERNAL = re.compile(
    r"SHARDQ_(FRONT_\w+|BENCH_\w+|PARENT_PID|FROM_FILE|SERVER_DIR|HOST|UID|GID|CONTAINER_CA|(QUEUE|WIRE)_LIMIT|WEB_PORT|WHEELS_URL|X|COMPLETE|RELAY)"
)


def test_the_page_is_what_make_docs_writes() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run `make docs`"


def test_every_setting_has_a_meaning_on_the_page() -> None:
    rows = {row.split("<br>")[0]: row for row in page().splitlines() if row.startswith("| `")}
    for key, setting in all_settings().items():
        row = rows[f"| `{key}`"]
        assert f"`{setting.variable}`" in row
        assert len(row.split(" | ")[-1]) > len("| "), f"{key} has no comment `#:` above it"


def test_every_variable_in_the_code_is_on_the_page() -> None:
    text = page()
    for package in ("cli", "relay", "shardq", "storage", "tasks", "workers"):
        for path in (ROOT / package).rglob("*.py"):
            for name in re.findall(r"\bSHARDQ_[A-Z][A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")):
                assert INTERNAL.fullmatch(name) or f"`{name}`" in text, f"{path.name}: {name}"
