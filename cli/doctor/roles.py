"""Whose machine this is: what has to work there, and what its account may see."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import StrEnum
from urllib.parse import urlsplit

from cli.doctor.findings import Finding, failed, warning
from relay.settings import RelaySettings
from tasks.settings import TaskSettings


class Role(StrEnum):
    """What a machine is there for."""

    #: both servers, the database and the bookkeeper work
    HOST = "host"
    #: its own head is alive and has a tail
    HEAD = "head"
    #: it can reach the wire server as the tail that it is
    TAIL = "tail"
    #: what is submitted is done: servers, database, bookkeeper and a head that takes jobs
    CLIENT = "client"
    #: it can reach the queue server
    FLOWER = "flower"


#: what `init-server` calls its accounts, up to the first hyphen
_BY_ACCOUNT = {
    "bookkeeper": Role.HOST,
    "head": Role.HEAD,
    "tail": Role.TAIL,
    "client": Role.CLIENT,
    "flower": Role.FLOWER,
}
#: variables that only one role has
_BY_VARIABLE = {"SHARDQ_TAIL_NAME": Role.TAIL, "SHARDQ_HEAD_ID": Role.HEAD}


@dataclass(frozen=True, slots=True)
class Place:
    """A role, and the accounts that its settings name."""

    role: Role
    #: how the role is known
    reason: str
    #: accounts of `init-server`, which see what their role needs; None: any other, which may see everything
    queue_account: str | None = None
    wire_account: str | None = None

    def lacks(self, check: str, text: str, *needed_by: Role) -> Finding:
        """Something is missing: without it these roles do not work, to the others it is worth a word."""
        return failed(check, text) if self.role in needed_by else warning(check, text)


def place_of(chosen: Role | None) -> Place:
    """The role that was chosen, else the one that the settings speak of: a client if they speak of none."""
    accounts = _account(TaskSettings().broker_url), _account(RelaySettings().url)
    if chosen is not None:
        return Place(chosen, "as --role says", *accounts)
    for account in filter(None, accounts):
        return Place(_of(account), f"by the account {account}", *accounts)
    for variable, role in _BY_VARIABLE.items():
        if os.environ.get(variable):
            return Place(role, f"by {variable}", *accounts)
    return Place(Role.CLIENT, "for nothing says otherwise", *accounts)


def _account(url: str) -> str | None:
    """The account in an address, if it is one of ours."""
    try:
        name = urlsplit(url).username or ""
    except ValueError:
        return None  # no address at all, which whoever uses it says
    return name if name.partition("-")[0] in _BY_ACCOUNT else None


def _of(account: str) -> Role:
    return _BY_ACCOUNT[account.partition("-")[0]]
