"""`docs/protocol.md` lists every message with every field."""

from __future__ import annotations

from dataclasses import fields

import pytest

from relay import messages
from relay.messages import ErrorReason, VoidReason
from tests.documents import ROOT

TEXT = (ROOT / "docs" / "protocol.md").read_text(encoding="utf-8")
#: the table of messages: kind, message, who sends it, fields
TABLE = TEXT.partition("| kind | message |")[2].partition("\n\n")[0].splitlines()[2:]


@pytest.mark.parametrize(
    "kind",
    [
        *(messages.Hello, messages.Prefill, messages.Round, messages.Draft, messages.Release),
        *(messages.Welcome, messages.Verdict, messages.Accepted, messages.Void, messages.Error),
    ],
    ids=lambda kind: kind.__name__,
)
def test_every_field_of_a_message_is_in_its_row(kind: type) -> None:
    (listed,) = (cells[4] for row in TABLE if f"`{kind.__name__}`" in (cells := row.split("|"))[2])
    assert all(f"`{field.name}`" in listed for field in fields(kind))


@pytest.mark.parametrize("reason", [*ErrorReason, *VoidReason])
def test_every_reason_is_named(reason: str) -> None:
    assert f"`{reason}`" in TEXT
