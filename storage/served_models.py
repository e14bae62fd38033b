"""Served models as the database remembers them: a name and the one profile all its heads have."""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select
from sqlalchemy.dialects import postgresql, sqlite

from storage.database import Database
from storage.request_keys import profile_key
from storage.tables import model


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A served model."""

    name: str
    #: the profile as plain JSON values
    profile: dict[str, Any]
    updated_at: float


def upsert_model(db: Database, name: str, profile: dict[str, Any]) -> None:
    """Store or replace the profile (plain JSON values) of the served model `name`."""
    values = {"name": name, "profile": json.dumps(profile), "updated_at": db.now()}
    with db.write() as connection:
        insert = sqlite.insert if connection.dialect.name == "sqlite" else postgresql.insert
        changes = {key: value for key, value in values.items() if key != "name"}
        connection.execute(
            insert(model).values(values).on_conflict_do_update(index_elements=[model.c.name], set_=changes)
        )


def list_models(db: Database) -> list[ModelRow]:
    """All served models ever seen, by name."""
    with db.read() as connection:
        rows = connection.execute(select(model).order_by(model.c.name)).all()
    return [ModelRow(row.name, json.loads(row.profile), row.updated_at) for row in rows]


def profile_keys(connection: Connection, names: Collection[str]) -> dict[str, str]:
    """The digests of the profiles these served names have now; names without a profile are left out."""
    query = select(model.c.name, model.c.profile).where(model.c.name.in_(names)).order_by(model.c.name)
    return {row.name: profile_key(row.profile) for row in connection.execute(query)}
