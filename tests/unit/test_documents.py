"""What the documents say exists: commands, options, links."""

from __future__ import annotations

import re
from pathlib import Path

import click
import pytest

from tests.documents import DOCUMENTS, ROOT, check_words, shardq_lines, shell_blocks


def name_of(document: Path) -> str:
    return str(document.relative_to(ROOT))


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_shardq_line_of_a_document_is_one_that_shardq_takes(document: Path) -> None:
    for block in shell_blocks(document):
        for words in shardq_lines(block.text):
            try:
                check_words(words)
            except click.ClickException as error:
                pytest.fail(f"{block}: shardq {' '.join(words)}: {error.format_message()}")


@pytest.mark.parametrize(
    "words",
    [["frobnicate"], ["submit"], ["submit", "x", "--frobnicate"], ["head", "--dtype", "int4"], ["list", "x"]],
    ids=" ".join,
)
def test_a_line_that_shardq_would_not_take_is_found(words: list[str]) -> None:
    with pytest.raises(click.ClickException):
        check_words(words)


def test_shardq_lines_are_found_wherever_a_shell_would_run_them() -> None:
    script = """\
cat > x <<'EOF'
shardq is not run here
EOF
A=1 shardq list --json | head -1   # shardq in a comment
ssh HOST shardq submit - < x && shardq status \\
    nightly
echo shardq
"""
    assert list(shardq_lines(script)) == [["list", "--json"], ["submit", "-"], ["status", "nightly"]]


def anchors(document: Path) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    titles = re.findall(r"^#+ (.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=name_of)
def test_every_link_of_a_document_leads_somewhere(document: Path) -> None:
    text = re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", target):
            continue
        path, _, anchor = target.partition("#")
        file = (document.parent / path).resolve() if path else document
        assert file.exists(), f"{name_of(document)}: {target}"
        assert not anchor or anchor in anchors(file), f"{name_of(document)}: {target}"


def test_every_document_is_in_the_index() -> None:
    index = (ROOT / "docs" / "README.md").read_text(encoding="utf-8")
    for document in (ROOT / "docs").glob("*.md"):
        assert document.name == "README.md" or f"]({document.name})" in index, document.name
