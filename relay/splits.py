"""Where a model is cut, said by the heads that run it, for tails and heads that have not loaded anything yet."""

from __future__ import annotations

import logging
from typing import cast

from relay import keys
from relay.connections import Connections
from relay.presence import Beat
from relay.profile import Profile
from relay.settings import RelaySettings

log = logging.getLogger(__name__)

#: no model has more layers
MAX_SPLIT = 100_000


class RedisSplitClaim:
    """Keeps a key while its split is this head's own; implements `transport.SplitClaim`.

    Heads of one profile that cut alike keep the same key. It is never deleted, for another one may keep it: it lapses.
    """

    def __init__(self, connections: Connections, profile: Profile, split: int, settings: RelaySettings) -> None:
        """Raises `RelayUnreachable` or `RelayRefused` if the first write fails."""
        self._connections = connections
        self._profile = profile
        self._key = keys.split(profile)
        self._own = split
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._refresh()
        self._split = claimed_split(connections, profile) or split
        self._beat = Beat(f"split {split} of a model", settings.refresh_s, self._refresh)

    @property
    def split(self) -> int:
        return self._split

    def close(self) -> None:
        self._beat.stop()

    def _refresh(self) -> bool:
        with self._connections.translated():
            if self._connections.client.set(self._key, str(self._own), nx=True, px=self._ttl_ms):
                return True
        if claimed_split(self._connections, self._profile) == self._own:
            with self._connections.translated():
                self._connections.client.pexpire(self._key, self._ttl_ms)
        return True


def claimed_split(connections: Connections, profile: Profile) -> int | None:
    """The split that heads of this profile use; None if no head lives, or, with a logged reason, for what is none."""
    key = keys.split(profile)
    with connections.translated():
        data = cast("bytes | None", connections.client.get(key))
    if data is None:
        return None
    if not data.isdigit() or not 1 <= int(data[:10]) <= MAX_SPLIT or len(data) > 10:
        log.warning("%s holds no layer number, ignored", key)
        return None
    return int(data)
