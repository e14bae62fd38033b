"""Batches from Python and from notebooks: `from shardq import Client`. `docs/python.md` shows how.

What stands here is the client of the package `cli`, which the command line uses, too.
"""

from shardq.ours import come_first

come_first()

from cli.client.batch import Batch
from cli.client.client import Client
from cli.client.installation import local
from cli.client.transport import Transport
from cli.errors import (
    ConfigInvalid,
    InputRefused,
    Interrupted,
    NotFound,
    PackageMissing,
    Refused,
    SettingInvalid,
    ShardqError,
    Unavailable,
)

__all__ = [
    "Batch",
    "Client",
    "ConfigInvalid",
    "InputRefused",
    "Interrupted",
    "NotFound",
    "PackageMissing",
    "Refused",
    "SettingInvalid",
    "ShardqError",
    "Transport",
    "Unavailable",
    "local",
]
