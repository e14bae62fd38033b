"""The head makes itself known on the queue server and tells every two seconds what it works on."""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import redis

from relay.installed import installed_version
from relay.messages import FRAME_VERSION
from relay.profile import Profile
from tasks import heads
from tasks.connection import Outage, translated
from tasks.errors import HeadIdTaken
from tasks.figures import HeadFigures
from tasks.generation import known_versions
from tasks.heads import BEAT_S, PRESENCE_MS, HeadInfo

logger = logging.getLogger(__name__)

#: seconds between two attempts to claim an id whose last holder may just have died
_CLAIM_AGAIN_S = 1.0


@dataclass(frozen=True, slots=True)
class Identity:
    """What does not change while a head lives."""

    head_id: str
    #: served name
    model: str
    profile: Profile
    #: head and tail in one process
    whole: bool = False
    #: highest version of the tasks that its fronts take
    reads: int = 1


@dataclass(frozen=True, slots=True)
class Load:
    """What a head works on now; see `tasks.heads.HeadInfo`."""

    live: tuple[str, ...]
    consuming: bool
    running: int
    tokens_per_s: float
    figures: HeadFigures | None = None
    obstacle: str | None = None


class Presence:
    """A starting head's claim on its id, then the thread that keeps it known until `close`.

    The messages that an earlier process took under this id and never acknowledged go back to the queue.
    `on_taken` is called from the thread once another head has the id: this one was still for so long (a frozen machine)
    that its presence lapsed and a second one began. It must end.

    Raises:
        HeadIdTaken: another head is alive under the id. Waited out first: a dead one's presence lapses.
        QueueUnreachable, QueueRefused: the queue server.
    """

    def __init__(
        self,
        client: redis.Redis,
        identity: Identity,
        on_taken: Callable[[], None],
        *,
        beat_s: float = BEAT_S,
        patience_s: float = PRESENCE_MS / 1000 + 2,
    ) -> None:
        self._client = client
        self._identity = identity
        self._load: Callable[[], Load] = lambda: Load((), False, 0, 0.0, obstacle="it starts")
        self._slots = 0
        self._on_taken = on_taken
        self._taken = False
        self._beat_s = beat_s
        self._instance = uuid.uuid4().hex
        self._started_at = time.time()
        self._beats = 0
        self._closing = threading.Event()
        with translated():
            self._claim(patience_s)
            self.num_restored = heads.restore_unacked(client, identity.head_id)
        self._thread = threading.Thread(target=self._keep, name="head-presence", daemon=True)
        self._thread.start()

    @property
    def reads(self) -> int:
        """Highest version of the tasks that the head takes."""
        return self._identity.reads

    def starting(self, obstacle: str) -> None:
        """Tell what a head without slots waits for."""
        self._load = lambda: Load((), False, 0, 0.0, obstacle=obstacle)

    def working(self, slots: int, load: Callable[[], Load]) -> None:
        """Tell of an engine with so many slots from now on. `load` is called from the thread and must be quick."""
        self._slots, self._load = slots, load

    def close(self) -> None:
        """Withdraw; safe to call twice. Close the fronts before: what they hand back needs no restoring."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._thread.join()
        if not self._taken:
            self._withdraw()

    def check(self) -> None:
        """Raises HeadIdTaken once another head has the id."""
        if self._taken:
            raise HeadIdTaken(
                f"another head has taken the id {self._identity.head_id!r} while this one stood still; "
                "give one of the two another id (SHARDQ_HEAD_ID)"
            )

    def _claim(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        while True:
            try:
                return heads.claim(self._client, self._info())
            except HeadIdTaken:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(_CLAIM_AGAIN_S)

    def _keep(self) -> None:
        outage = Outage(logger, "this head looks dead from there, its jobs will be given to others")
        while not self._closing.wait(self._beat_s):
            try:
                self._taken = not heads.beat(self._client, self._info())
            except redis.RedisError as error:
                outage.failed(error)
                continue
            outage.over()
            if self._taken:
                logger.error("another head has taken the id %r: ending", self._identity.head_id)
                self._on_taken()
                return

    def _withdraw(self) -> None:
        try:
            heads.withdraw(self._client, self._identity.head_id)
        except redis.RedisError as error:
            logger.info("presence not withdrawn, it lapses by itself: %s", error)

    def _info(self) -> HeadInfo:
        identity, load = self._identity, self._load()
        self._beats += 1
        return HeadInfo(
            head_id=identity.head_id,
            instance=self._instance,
            model=identity.model,
            profile=identity.profile,
            slots=self._slots,
            live=load.live,
            consuming=load.consuming,
            running=load.running,
            tokens_per_s=load.tokens_per_s,
            started_at=self._started_at,
            beat=self._beats,
            whole=identity.whole,
            figures=load.figures,
            version=installed_version(),
            reads=identity.reads,
            knows=known_versions()[-1],
            frames=FRAME_VERSION,
            obstacle=load.obstacle,
        )
