"""The names that can be asked for: registered by heads on the queue server, remembered in the database."""

from __future__ import annotations

import redis

from storage.database import Database
from storage.jobs import awaited_models
from storage.served_models import list_models, upsert_model
from tasks.heads import registered_models


def model_names(client: redis.Redis, database: Database) -> list[str]:
    """Every name that may have jobs: registered now, or ever seen in the database. Sorted."""
    return sorted({*registered_models(client), *(row.name for row in list_models(database))})


def unheard_models(client: redis.Redis, database: Database) -> frozenset[str]:
    """The served names that waiting jobs ask for and no head has had yet."""
    return awaited_models(database).difference(model_names(client, database))


def mirror_models(client: redis.Redis, database: Database) -> int:
    """Copy the registered profiles into the database where they differ; returns how many did."""
    known = {row.name: row.profile for row in list_models(database)}
    changed = {
        name: profile.to_json()
        for name, profile in registered_models(client).items()
        if known.get(name) != profile.to_json()
    }
    for name, profile in changed.items():
        upsert_model(database, name, profile)
    return len(changed)
