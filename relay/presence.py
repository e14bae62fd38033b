"""Who is there and who holds whom: a tail's presence key, a head's lease of a tail.

Both are kept by threads, so that neither a long prefill nor a slow model load lets them lapse; the tail's
presence also carries the pulse of its round loop, which a thread alone would not prove.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

import redis

from relay import keys
from relay.connections import Connections
from relay.errors import RelayError, RelayRefused
from relay.messages import FIRST_TOLD_FRAMES
from relay.plain import from_plain
from relay.settings import RelaySettings
from relay.transport import TailInfo

log = logging.getLogger(__name__)

#: life in seconds of a tail's epoch counter; `Presence.epoch` takes over where it was lost
EPOCH_TTL_S = 3600
#: far above any number of epochs, and exact in Redis' own scripts
MAX_EPOCH = 2**53 - 1
#: bytes of a presence; ours have about 400
MAX_PRESENCE_BYTES = 1 << 16
_GROWING = frozenset({TailInfo})
#: seconds after which a beat that failed is tried again: half a life must not pass for one broken connection
AGAIN_S = 0.5

# KEYS: presence, lease, epoch. ARGV: token, life in ms, epoch below the new one, the counter's life in s.
# The new epoch; 0 if someone else holds the lease, -1 if the tail is gone.
_LEASE = """
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
if not redis.call('SET', KEYS[2], ARGV[1], 'NX', 'PX', ARGV[2]) then return 0 end
local epoch = redis.call('INCR', KEYS[3])
if epoch <= tonumber(ARGV[3]) then
  epoch = tonumber(ARGV[3]) + 1
  redis.call('SET', KEYS[3], string.format('%d', epoch))
end
redis.call('EXPIRE', KEYS[3], ARGV[4])
return epoch
"""

# KEYS: presence, lease, epoch. ARGV: token, life in ms, the counter's life in s. 1 if the lease goes on.
_RENEW = """
if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
if redis.call('EXISTS', KEYS[1]) == 0 then return -1 end
redis.call('PEXPIRE', KEYS[2], ARGV[2])
redis.call('EXPIRE', KEYS[3], ARGV[3])
return 1
"""

# KEYS: lease. ARGV: token.
_RELEASE = """
if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end
return 0
"""


@dataclass(frozen=True, slots=True)
class Presence:
    """What stands in a presence key."""

    tail: TailInfo
    #: newest epoch the tail has seen; a server that lost its data starts counting above it
    epoch: int

    def to_json(self) -> bytes:
        t = self.tail
        # heads that know of one version only would refuse the field
        frames = {} if t.frames == FIRST_TOLD_FRAMES else {"frames": t.frames}
        return json.dumps(
            {
                "tail": t.tail,
                "profile": t.profile.to_json(),
                "split": t.split,
                "slots": t.slots,
                "max_query": t.max_query,
                "pulse": t.pulse,
                "room": None if t.room is None else asdict(t.room),
                "epoch": self.epoch,
                **frames,
            }
        ).encode()

    @classmethod
    def from_json(cls, tail: str, data: bytes) -> Presence | None:
        """The presence of `tail`, which a later version may have told; None, with a logged reason, if it is none."""
        try:
            if len(data) > MAX_PRESENCE_BYTES:
                raise ValueError(f"{len(data)} bytes are too many")
            value = json.loads(data)
            if not isinstance(value, dict):
                raise ValueError(f"expected an object, got {type(value).__name__}")
            epoch = value.pop("epoch")
            info = from_plain(TailInfo, {"frames": FIRST_TOLD_FRAMES, **value}, _GROWING)
            if type(epoch) is not int or not 0 <= epoch <= MAX_EPOCH:
                raise ValueError(f"expected an epoch from 0 to {MAX_EPOCH}")
        except (ValueError, KeyError, RecursionError) as error:
            log.warning("presence of tail %s is malformed, ignored: %s", tail, error)
            return None
        if info.tail != tail:
            log.warning("presence of tail %s claims to be %r, ignored", tail, info.tail[:100])
            return None
        return cls(info, epoch)


class Beat:
    """Calls `action` every `interval_s` on a thread of its own until stopped or `action` returns False."""

    def __init__(self, name: str, interval_s: float, action: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._action = action
        self._name = name
        self._stopped = threading.Event()
        self._failing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ends after the call in progress; safe to call twice and from the thread itself."""
        self._stopped.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        while not self._stopped.wait(min(self._interval_s, AGAIN_S) if self._failing else self._interval_s):
            try:
                if not self._action():
                    return
            except RelayError as error:
                # one line per outage, not one per attempt
                if not self._failing:
                    log.warning("%s: %s; trying on", self._name, error)
                self._failing = True
            except Exception:  # outermost loop of the thread; a missed beat shows in the TTL
                log.exception("%s failed", self._name)
            else:
                if self._failing:
                    log.info("%s: works again", self._name)
                self._failing = False


class RedisAnnouncement:
    """Keeps a tail's presence key; implements `transport.Announcement`."""

    def __init__(
        self, connections: Connections, tail: TailInfo, epoch_seen: Callable[[], int], settings: RelaySettings
    ) -> None:
        """Raises `RelayUnreachable` or `RelayRefused` if the first refresh fails."""
        self._connections = connections
        self._tail = tail
        self._epoch_seen = epoch_seen
        self._ttl_ms = int(settings.ttl_s * 1000)
        self._pulse = tail.pulse
        self._lock = threading.Lock()
        self._closed = False
        self._refresh()
        self._beat = Beat(f"presence of tail {tail.tail}", settings.refresh_s, self._refresh)

    def pulse(self) -> None:
        self._pulse = time.time()

    def close(self) -> None:
        self._beat.stop()
        with self._lock:
            if self._closed:
                return
            self._closed = True
            try:
                # a tail has no right to DEL
                with self._connections.translated():
                    self._connections.client.set(keys.presence(self._tail.tail), b"", px=1)
            except RelayError as error:
                log.warning("presence of tail %s is left to expire: %s", self._tail.tail, error)

    def _refresh(self) -> bool:
        with self._lock:
            if self._closed:
                return False
            value = Presence(replace(self._tail, pulse=self._pulse), self._epoch_seen()).to_json()
            with self._connections.translated():
                self._connections.client.set(keys.presence(self._tail.tail), value, px=self._ttl_ms)
            return True


class RedisLease:
    """Keeps a head's lease; implements `transport.Lease`."""

    def __init__(
        self,
        connections: Connections,
        tail: TailInfo,
        token: str,
        epoch: int,
        settings: RelaySettings,
        taken_at: float,
    ) -> None:
        """`taken_at`: monotonic time just before the lease was taken."""
        self._connections = connections
        self._tail = tail
        self._token = token
        self._epoch = epoch
        self._ttl_s = settings.ttl_s
        self._renewed_at = taken_at
        self._ended = threading.Event()
        self._renew_script = connections.client.register_script(_RENEW)
        # twice as often as needed: this is also how the death of the tail is noticed
        self._beat = Beat(f"lease of tail {tail.tail}", settings.refresh_s / 2, self._renew)

    @property
    def tail(self) -> TailInfo:
        return self._tail

    @property
    def epoch(self) -> int:
        return self._epoch

    def held(self) -> bool:
        if time.monotonic() - self._renewed_at > self._ttl_s:
            self._ended.set()
        return not self._ended.is_set()

    def release(self) -> None:
        self._ended.set()
        self._beat.stop()
        try:
            with self._connections.translated():
                self._connections.client.eval(_RELEASE, 1, keys.lease(self._tail.tail), self._token)
                drop_epochs(self._connections.client, self._tail.tail, up_to=self._epoch)
        except RelayError as error:
            log.warning("lease of tail %s is left to expire: %s", self._tail.tail, error)

    def _renew(self) -> bool:
        before = time.monotonic()
        names = _lease_keys(self._tail.tail)
        with self._connections.translated():
            going_on = self._renew_script(keys=names, args=[self._token, int(self._ttl_s * 1000), EPOCH_TTL_S])
        # a lease that lapsed here stays lapsed, whatever the server says later
        if going_on == 1 and self.held():
            self._renewed_at = before
            return True
        if not self._ended.is_set():
            log.warning(
                "lease of tail %s ended: %s",
                self._tail.tail,
                "the tail is gone" if going_on == -1 else "lost it",
            )
        self._ended.set()
        return False


def take_lease(connections: Connections, head: str, tail: str, settings: RelaySettings) -> RedisLease | None:
    """Lease `tail` and remove its earlier epochs' streams; None if another head holds it or it is gone."""
    client = connections.client
    token = f"{head}/{secrets.token_hex(8)}"
    with connections.translated():
        data = cast("bytes | None", client.get(keys.presence(tail)))
        present = Presence.from_json(tail, data) if data else None
        if present is None:
            return None
        before = time.monotonic()
        arguments: list[Any] = [token, int(settings.ttl_s * 1000), present.epoch, EPOCH_TTL_S]
        epoch = int(cast(int, client.register_script(_LEASE)(keys=_lease_keys(tail), args=arguments)))
        if epoch <= 0:
            return None
        drop_epochs(client, tail, up_to=epoch - 1)
    return RedisLease(connections, present.tail, token, epoch, settings, before)


def living_tails(connections: Connections) -> list[TailInfo]:
    """All tails whose presence stands, by id."""
    client = connections.client
    with connections.translated():
        found = {key.decode(errors="replace") for key in client.scan_iter(match=keys.TAILS_PATTERN, count=1000)}
        names = sorted(key for key in found if keys.is_presence(key) and _is_tail(key.removeprefix(keys.presence(""))))
        values = cast("list[bytes | None]", client.mget(names)) if names else []
    tails = [(name.removeprefix(keys.presence("")), value) for name, value in zip(names, values, strict=True) if value]
    presences = [Presence.from_json(tail, value) for tail, value in tails]
    return [presence.tail for presence in presences if presence is not None]


def drop_epochs(client: redis.Redis, tail: str, up_to: int) -> None:
    """Remove the frame streams of a tail's epochs up to and with `up_to`; raises redis-py's errors."""
    found = (key.decode(errors="replace") for key in client.scan_iter(match=keys.links_pattern(tail), count=1000))
    old = [key for key in found if (epoch := keys.epoch_of(key)) is not None and epoch <= up_to]
    if old:
        client.unlink(*old)


def _is_tail(tail: str) -> bool:
    """Whether this can be a tail's id; keys and patterns are made from it."""
    try:
        keys.tail_name(tail)
    except RelayRefused:
        log.warning("presence of %r ignored: that is no tail's id", tail[:100])
        return False
    return True


def _lease_keys(tail: str) -> list[str]:
    return [keys.presence(tail), keys.lease(tail), keys.epoch(tail)]
