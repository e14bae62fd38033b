"""A browser for tests: the system's Chromium, missing only where the developer has none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

#: looked for on PATH, in this order
NAMES = ("chromium", "chromium-browser", "google-chrome")


def find_chromium() -> str | None:
    """The browser's path: what SHARDQ_CHROMIUM says, else the first of `NAMES` on PATH; None without one."""
    names = (os.environ.get("SHARDQ_CHROMIUM"), *NAMES)
    return next((found for name in names if name and (found := shutil.which(name))), None)


@contextmanager
def running_browser() -> Iterator[Browser]:
    """A headless Chromium: the system's, else playwright's own. Without either, or playwright: skips, fails in CI."""
    try:
        from playwright.sync_api import sync_playwright
    except ModuleNotFoundError as error:
        _miss(f"{error.name} is not installed: run `pip install -c constraints.txt -e '.[dev]'`")
    # Chromium's sandbox refuses root.
    arguments = ["--no-sandbox"] if os.geteuid() == 0 else []
    with sync_playwright() as playwright:
        path = find_chromium() or playwright.chromium.executable_path
        if not Path(path).exists():
            _miss("no Chromium found: install one, or name it in SHARDQ_CHROMIUM")
        browser = playwright.chromium.launch(executable_path=path, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def _miss(reason: str) -> NoReturn:
    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)
