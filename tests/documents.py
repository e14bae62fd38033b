"""What the documents say to type: their shell blocks, and the `shardq` lines in them."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click

from cli.main import shardq

ROOT = Path(__file__).parents[1]
#: everything that people read
DOCUMENTS = sorted(
    [
        *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "deploy").rglob("*.md"),
    ]
)

_FENCE = re.compile(r"^```(\w*)\s*$")
_NOT_RUN = re.compile(r"<!-- not run: (.+?) -->")
#: what ends a command's words
_ENDS = re.compile(r"[|;&<>()]+")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block of a document."""

    document: Path
    #: of its first line, from 1
    line: int
    language: str
    text: str
    #: why the documents' tests do not run it: the comment `<!-- not run: … -->` on the line before
    not_run: str | None

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def shell_blocks(document: Path) -> Iterator[Block]:
    """The blocks marked `sh`, in order."""
    return (block for block in blocks(document) if block.language == "sh")


def blocks(document: Path) -> Iterator[Block]:
    """All fenced blocks, in order."""
    lines = document.read_text(encoding="utf-8").splitlines()
    start: int | None = None
    language = ""
    for index, line in enumerate(lines):
        fence = _FENCE.match(line.strip())
        if fence is None:
            continue
        if start is None:
            start, language = index, fence[1]
            continue
        text = "\n".join(lines[start + 1 : index])
        yield Block(document, start + 2, language, text, _reason(lines[start - 1]) if start else None)
        start = None
    assert start is None, f"{document} ends within a block"


def _reason(line: str) -> str | None:
    found = _NOT_RUN.search(line)
    return found[1] if found else None


def shardq_lines(text: str) -> Iterator[list[str]]:
    """The words after `shardq` of every command of it in a script; here-documents are left out."""
    script = re.sub(r"<<'?(\w+)'?.*?^\1$", "", text, flags=re.MULTILINE | re.DOTALL).replace("\\\n", " ")
    for line in script.splitlines():
        words = _words(line)
        for index, word in enumerate(words):
            if word == "shardq" and (index == 0 or _begins_command(words[index - 1], words)):
                yield _until_end(words[index + 1 :])


def _words(line: str) -> list[str]:
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    return list(lexer)


def _begins_command(before: str, words: list[str]) -> bool:
    """Whether what follows this word is a command: after `|` or `&&`, a variable, or the host of an ssh."""
    return bool(_ENDS.fullmatch(before)) or "=" in before or "ssh" in words or before in ("time", "exec", "then", "do")


def _until_end(words: list[str]) -> list[str]:
    for index, word in enumerate(words):
        if _ENDS.fullmatch(word):
            return words[:index]
    return words


def check_words(words: list[str]) -> None:
    """Parse `shardq <words>` as the command itself would, without running it. Raises click.ClickException."""
    command: click.Command = shardq
    context = click.Context(shardq, info_name="shardq")
    rest = words
    while True:
        rest = _check_options(command, context, list(rest))
        if not isinstance(command, click.Group) or not rest:
            break
        name, found, rest = command.resolve_command(context, rest)
        assert found is not None
        command, context = found, click.Context(found, parent=context, info_name=name)
    if rest:
        raise click.UsageError(f"too many arguments: {rest}")


def _check_options(command: click.Command, context: click.Context, words: list[str]) -> list[str]:
    """What is left of the words; their values must be of the right types, files need not exist."""
    if isinstance(command, click.Group):
        context.allow_interspersed_args = False
    if {"--help", "-h"} & set(words):
        return []
    values, rest, _ = command.make_parser(context).parse_args(words)
    for parameter in command.params:
        value = values.get(parameter.name or "")
        # click ≥ 8.3 has a sign of its own for what was not given
        if value is None or type(value).__name__ == "Sentinel":
            if parameter.required:
                raise click.MissingParameter(ctx=context, param=parameter)
        elif not isinstance(parameter.type, click.Path | click.File):
            parameter.type_cast_value(context, value)
    return rest
