"""Which database this is.

The id is made with the tables and stays, in copies and restored backups, too: their jobs are the same jobs. What tells
the one that the bookkeeper writes from a copy of it is the *mark*, which the bookkeeper renews again and again: a copy
keeps an old one.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from sqlalchemy import Connection, select

from storage.database import Database
from storage.tables import identity


@dataclass(frozen=True, slots=True)
class Identity:
    """Of one database."""

    id: str
    #: the newest and the one before; None where no bookkeeper has written yet
    mark: str | None
    mark_before: str | None


def read_identity(db: Database) -> Identity:
    """As the database has it now."""
    with db.read() as connection:
        return _read(connection)


def renew_mark(db: Database) -> Identity:
    """Write a new random mark, for the bookkeeper that writes here; the identity with it."""
    with db.write() as connection:
        before = _read(connection)
        renewed = Identity(before.id, secrets.token_hex(8), before.mark)
        connection.execute(identity.update().values(mark=renewed.mark, mark_before=renewed.mark_before))
        return renewed


def _read(connection: Connection) -> Identity:
    row = connection.execute(select(identity)).one()
    return Identity(row.id, row.mark, row.mark_before)
