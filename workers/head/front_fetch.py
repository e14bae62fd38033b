"""How a front's consumer fetches: several messages at a time, each written down as taken in the same step.

Kombu pops one message and then writes it down, in two round trips: whoever is killed in between, or gets the
first reply over a connection that has just died, loses it. Here one script on the server does both, for as many
messages as there are free threads. What its reply does not reach anybody with is claimed by nobody, and the
bookkeeper gives it back (`tasks.restorer`). An idle consumer waits for the queue's bell (`tasks.bell`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from queue import Empty
from time import monotonic
from typing import Any

import redis
from celery.worker.state import maybe_shutdown
from kombu.connection import Connection
from kombu.transport import redis as transport
from redis.exceptions import NoScriptError

from tasks import keys
from tasks.connection import Outage, as_task_error
from tasks.errors import QueueFull
from tasks.heads import restore_unacked
from workers.head.front_envelope import deliverable
from workers.head.front_settlements import Settlements

logger = logging.getLogger(__name__)

#: messages fetched at a time at most: the other fronts get some of a few, too
MOST_AT_ONCE = 4
#: milliseconds that an idle consumer waits for the bell before it looks again
LISTEN_MS = 1000
#: seconds before another attempt at a server that refuses to let us fetch
PAUSE_S = 1.0
#: seconds between two attempts to reach a queue server that went away
RECONNECT_S = 2

# Taking moves a message from a list to a hash: that must go on when memory is short, or nothing gets done.
# A message that is none of Celery's is put aside; it must not stop those behind it. A head that looks dead, because
# its engine hangs, gets nothing: it would hold what others could do.
_FETCH = """#!lua flags=allow-oom
local unacked, index, bell, rejected, presence = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local room = redis.call('GET', presence) and tonumber(ARGV[1]) or 0
local now = redis.call('TIME')
local taken_at = now[1] + now[2] / 1e6
local function read(raw)
  local properties = cjson.decode(raw)['properties']
  local info = properties['delivery_info']
  local place = cjson.encode({info['exchange'], info['routing_key']})
  return properties['delivery_tag'] .. '', '[' .. raw .. ',' .. string.sub(place, 2)
end
local taken = {}
for i = 6, #KEYS do
  while room > 0 do
    local raw = redis.call('RPOP', KEYS[i])
    if not raw then break end
    local ok, tag, note = pcall(read, raw)
    if ok then
      redis.call('HSET', unacked, tag, note)
      redis.call('ZADD', index, taken_at, tag)
      table.insert(taken, KEYS[i])
      table.insert(taken, raw)
      room = room - 1
    else
      redis.call('XADD', rejected, 'MAXLEN', 1000, '*', 'kind', 'message', 'json', raw)
    end
  end
end
if #taken > 0 then return taken end
local last = redis.call('XREVRANGE', bell, '+', '-', 'COUNT', 1)
return {last[1] and last[1][1] or '0-0'}
"""
_FETCH_SHA = hashlib.sha1(_FETCH.encode(), usedforsecurity=False).hexdigest()


@dataclass(frozen=True, slots=True)
class Taker:
    """On whose behalf messages are fetched."""

    client: redis.Redis
    head_id: str
    settlements: Settlements
    #: highest version of the tasks that are taken: those of later ones stay for heads that read them
    reads: int = 1

    def lists(self, queue_name: str) -> list[str]:
        """The lists that messages are taken from, in this order."""
        return keys.ready_lists(queue_name, range(1, self.reads + 1))


def connection_class(taker: Taker) -> type[Connection]:
    """Kombu's connection with the fetching of this module, and with more patience and less delay.

    By itself it waits longer before each attempt to reconnect, up to half a minute: jobs would wait on when the
    outage is over.
    """

    class FetchingQoS(_FetchingQoS):
        settlements = taker.settlements

    class FetchingChannel(_FetchingChannel):
        QoS = FetchingQoS

    FetchingChannel.taker = taker

    class FetchingTransport(transport.Transport):
        Channel = FetchingChannel

    class FetchingConnection(Connection):
        def get_transport_cls(self) -> type[transport.Transport]:
            return FetchingTransport

        def _ensure_connection(
            self,
            errback: Any = None,
            max_retries: int | None = None,
            interval_start: float = RECONNECT_S,
            interval_step: float = 0,
            interval_max: float = RECONNECT_S,
            callback: Any = None,
            *others: Any,
            **options: Any,
        ) -> Any:
            first, longest = min(interval_start, RECONNECT_S), min(interval_max, RECONNECT_S)
            ensure: Any = super()._ensure_connection
            # Celery's heartbeat gives none, and would wait for the server although the front is to end
            callback = callback or maybe_shutdown
            return ensure(errback, max_retries, first, interval_step, longest, callback, *others, **options)

    return FetchingConnection


class _FetchingQoS(transport.QoS):
    """Counts what the whole front has taken, over all its connections, and leaves restoring to others."""

    settlements: Settlements

    def can_consume(self) -> bool:
        return not self.prefetch_count or self.room > 0

    @property
    def room(self) -> int:
        """Messages that may be fetched now."""
        if not self.prefetch_count:
            return 1
        return int(self.prefetch_count) - self.settlements.num_in_flight

    def append(self, message: Any, delivery_tag: str) -> None:
        """The script has written the message down."""

    def restore_unacked(self, client: Any = None) -> None:
        """A lost connection is no reason to deliver again what this front works on."""

    def restore_visible(self, start: int = 0, num: int = 10, interval: int = 10) -> None:
        """The bookkeeper does, by a steady clock."""


class _FetchingChannel(transport.Channel):
    """Sends and reads the script where kombu would a BRPOP, on the same connection of the same event loop."""

    #: kombu would restore what a closing channel has delivered; see `_FetchingQoS.restore_unacked`
    do_restore = False
    taker: Taker
    #: last ring of the bell that an empty look has seen: set while there is nothing to do but to listen
    _heard: bytes | None = None
    _listens = False
    _script_known = False
    _not_before = 0.0

    def __init__(self, *args: Any, **options: Any) -> None:
        self._outage = Outage(logger, "no jobs are taken")
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]

    def _queue_bind(self, *args: Any) -> None:
        """Note the queue's binding; a server that takes no writes must not end a front that can work without."""
        bind: Any = super()._queue_bind
        try:
            bind(*args)
        except redis.ResponseError as error:
            if not isinstance(as_task_error(error), QueueFull):
                raise
            self._outage.failed(error)

    def _brpop_start(self, timeout: float | None = None) -> None:
        queues = self._queue_cycle.consume(len(self.active_queues))
        if not queues or monotonic() < self._not_before:
            return
        self._in_poll = self.client.connection
        self._brpop_sent_at = monotonic()  # type: ignore[assignment]
        self._listens = self._heard is not None
        self.client.connection.send_command(*(self._listening(queues) if self._listens else self._fetching(queues)))

    def _listening(self, queues: Sequence[str]) -> tuple[Any, ...]:
        return ("XREAD", "BLOCK", LISTEN_MS, "STREAMS", keys.bell(queues[0]), self._heard)

    def _fetching(self, queues: Sequence[str]) -> tuple[Any, ...]:
        head_id = self.taker.head_id
        names = [keys.unacked(head_id), keys.unacked_index(head_id), keys.bell(queues[0]), keys.REJECTED]
        names.append(keys.head(head_id))
        names += self.taker.lists(queues[0])
        script = ("EVALSHA", _FETCH_SHA) if self._script_known else ("EVAL", _FETCH)
        return (*script, len(names), *names, min(self.qos.room, MOST_AT_ONCE))

    def _brpop_read(self, **options: Any) -> bool:
        try:
            reply = self._reply()
        finally:
            self._in_poll = False
            self._flush_brpop_reauth()  # type: ignore[no-untyped-call]
        if self._listens or len(reply) == 1:
            self._heard = None if self._listens else reply[0]
            raise Empty
        self._heard = None
        for name, raw in zip(reply[::2], reply[1::2], strict=True):
            self._hand_over(keys.queue_of(name.decode()), raw)
        return True

    def _reply(self) -> Any:
        try:
            # a name without a response callback: the reply as it is
            reply = self.client.parse_response(self.client.connection, "EVAL")
        except NoScriptError as error:
            self._script_known = False
            raise Empty from error
        except redis.ResponseError as error:
            self._outage.failed(error)
            self._heard, self._not_before = None, monotonic() + PAUSE_S
            raise Empty from error
        except self.connection_errors:
            self._heard = None
            self.client.connection.disconnect()
            raise
        self._outage.over()
        self._script_known = self._script_known or not self._listens
        return reply

    def _hand_over(self, queue: str, raw: bytes) -> None:
        """Give the message to the consumer; back to the queue if that stopped meanwhile."""
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as error:  # the server's decoder is less strict
            logger.error("left to the bookkeeper: a message that is no JSON: %s", type(error).__name__)
            return
        if not self._closing and queue in self.connection._callbacks:
            self.connection._deliver(deliverable(message), queue)
            return
        try:
            restore_unacked(self.taker.client, self.taker.head_id, [message["properties"]["delivery_tag"]])
        except redis.RedisError as error:
            logger.info("a message is not put back, the bookkeeper will do it: %s", error)
