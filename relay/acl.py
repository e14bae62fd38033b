"""Who may do what on the wire server: the least that a tail, a head and an onlooker need.

Rules are those of `ACL SETUSER`, without account and password; they need Redis 7, or any Valkey. The queue
server's are in `tasks.acl`. Use database 0: no rule holds `SELECT`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

#: what every connection does before its work; none of it names a key. Comes first: it takes away again. Not named one
#: by one, because a server refuses to start with a name it does not know (`CLIENT SETINFO` is of 7.2).
LOGIN = ("+@connection", "-@admin", "-@dangerous", "-select")


@dataclass(frozen=True, slots=True)
class Grant:
    """Commands with the only keys and channels they may be used on; several grants never mix.

    A script is checked twice: `EVAL` needs its keys in a grant of its own, and every command inside it needs
    the right that it would need outside.
    """

    commands: tuple[str, ...]
    #: patterns of keys that may be read and written
    keys: Sequence[str] = ()
    #: patterns of keys that may only be read, only be written
    reads: Sequence[str] = ()
    writes: Sequence[str] = ()
    #: patterns of channels
    channels: Sequence[str] = ()

    def rule(self) -> str:
        """As a selector of `ACL SETUSER`."""
        patterns = [
            *(f"~{key}" for key in self.keys),
            *(f"%R~{key}" for key in self.reads),
            *(f"%W~{key}" for key in self.writes),
            *(f"&{channel}" for channel in self.channels),
        ]
        return f"({' '.join([*(f'+{command}' for command in self.commands), *patterns])})"


#: `shardq doctor --link`, for those who may send large frames anyway
_PROBING = Grant(("xadd", "xread", "expire"), keys=("shardq:probe:*",))


def for_tail(name: str) -> list[str]:
    """All that a tail called `name` needs: its own ids' links and presence, none of another name.

    It reads what heads send up and where they cut their models, writes what goes down, and keeps its presence. It
    may measure its way here. It cannot look for other tails, take a lease, delete anything or run a script.
    """
    some_id = f"{name}-????????"
    return [
        *LOGIN,
        f"%R~shardq:link:{some_id}:*:up",
        f"%W~shardq:link:{some_id}:*:down",
        f"%W~shardq:tail:{some_id}",
        *("+xread", "+xadd", "+set"),
        Grant(("get",), reads=("shardq:split:*",)).rule(),
        _PROBING.rule(),
    ]


def for_head() -> list[str]:
    """All that a head needs: find tails, lease one, open epochs, send up and read what comes down.

    It cannot read what goes up, its own or another head's, nor forge a tail's presence.
    """
    return [
        *LOGIN,
        "%R~shardq:tail:*",
        "~shardq:split:*",
        "~shardq:tail:*:lease",
        "~shardq:link:*:epoch",
        "%W~shardq:link:*:up",
        "~shardq:link:*:down",
        *("+xread", "+xadd", "+set", "+get", "+mget", "+incr", "+scan", "+exists"),
        *("+expire", "+pexpire", "+del", "+unlink", "+script|load"),
        # the leases' scripts look at the presence, too
        Grant(("eval", "evalsha"), keys=("shardq:tail:*", "shardq:link:*:epoch")).rule(),
        _PROBING.rule(),
    ]


def for_onlooker() -> list[str]:
    """See which tails there are, as `shardq doctor` does; no frame can be read."""
    return [*LOGIN, "%R~shardq:tail:*", *("+get", "+mget", "+scan")]


def user(name: str, password_sha256: str, rules: Sequence[str]) -> str:
    """A line of an ACL file: `name` with these rights and no others. `password_sha256` in hex."""
    return " ".join([f"user {name} on", f"#{password_sha256}", "sanitize-payload resetchannels -@all", *rules])


#: the first line of an ACL file: without a name nobody gets in
NOBODY = "user default off resetpass resetkeys resetchannels -@all"
