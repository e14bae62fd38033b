"""The head process: engine, local socket, Celery fronts, and the search for a tail."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import redis

from relay.errors import LinkLost
from relay.streams import RedisRelay
from relay.transport import Relay, SplitClaim
from tasks import connection, heads
from tasks.settings import TaskSettings
from workers.agreement import HeadsChoice
from workers.engine.shard import HeadShard
from workers.engine.source import Part, resolve
from workers.engine.tokenizer import end_ids, load_tokenizer, overlooked_end, shown
from workers.errors import NoTail
from workers.head.channel import EngineServer, private_address
from workers.head.courier import GIVE_UP_AFTER_S, Courier, TailSilent
from workers.head.drafters import Drafter, make_drafter
from workers.head.engine import HeadEngine
from workers.head.following import FollowWatch
from workers.head.fronts import Fronts, concurrency
from workers.head.intake import Intake
from workers.head.options import EngineOptions
from workers.head.presence import Identity, Load, Presence
from workers.head.prompts import PromptReader
from workers.head.room import head_machine
from workers.head.session import HeadOffer, Session, TailSearch
from workers.head.stops import StopWatch
from workers.head.trace import open_trace
from workers.pauses import exempt_loaded
from workers.progress import log_progress
from workers.room import checked_slots
from workers.served import ServedModel, check_device
from workers.settings import HeadSettings

log = logging.getLogger(__name__)

#: jobs whose tail died go back to the queue, for other heads, when no tail was found for this long
HAND_BACK_AFTER_S = 60.0
#: longest a head waits for one answer, after tails that were silent for shorter times
MAX_PATIENCE_S = 600.0


#: what a head waits for while it loads
LOADING = "it loads the model"

#: makes the drafter of a head
MakeDrafter = Callable[[HeadSettings, ServedModel], Drafter]


def run(settings: HeadSettings, stop: threading.Event, make: MakeDrafter | None = None) -> None:
    """Serve as a head until `stop` is set; `make` gives another drafter than `load_drafter`.

    Raises:
        WorkerError: the model, the drafter or the device cannot be used, or no tail was found in time.
        TaskError: the queue server refuses or does not answer; the head's id or served name is taken.
        RelayError: the relay refuses or does not answer.
    """
    tasks = TaskSettings(broker_url=settings.broker_url, allow_insecure=settings.allow_insecure)
    with (
        closing(connection.connect(tasks)) as client,
        closing(_relay(settings)) as relay,
        ExitStack() as cleanup,
    ):
        connection.ping(client)
        relay.ping()
        takes_fewer = settings.slots == "auto"
        described = ServedModel.resolve(settings, Part.DESCRIPTION, log_progress)
        presence = cleanup.enter_context(known(client, settings, described, stop))
        settled = settle(relay, settings, described, stop, presence.starting)
        if settled is None:
            return
        settings, claim = settled
        cleanup.callback(claim.close)
        presence.starting(LOADING)
        served = ServedModel.resolve(settings, Part.HEAD, log_progress)
        with connection.translated():
            heads.register_profile(client, settings.served_name, served.profile)
        shard = served.load_head(slots=settings.num_slots, max_query=settings.max_query)
        search = TailSearch(relay, offer(settings, served, takes_fewer=takes_fewer))
        with assembled(settings, served, presence, client, shard, make or load_drafter, search, stop) as worker:
            worker.serve(search, stop, settings.tail_timeout_s)


@contextmanager
def known(
    client: redis.Redis, settings: HeadSettings, described: ServedModel, stop: threading.Event
) -> Iterator[Presence]:
    """A head's presence from its start on: whoever looks sees what it waits for. Raises TaskError."""
    name = settings.served_name
    with connection.translated():
        reads = heads.readable_version(client, name)
    identity = Identity(settings.head_id, name, described.profile, settings.whole, reads)
    with closing(Presence(client, identity, stop.set)) as presence:
        yield presence


def offer(settings: HeadSettings, served: ServedModel, *, takes_fewer: bool = False) -> HeadOffer:
    """What a head with these settings asks of a tail; `takes_fewer`: it uses fewer slots beside a smaller tail."""
    return HeadOffer(
        head=settings.head_id,
        profile=served.profile,
        split=served.split,
        slots=settings.num_slots,
        lanes=settings.link_lanes,
        max_query=settings.max_query,
        takes_fewer=takes_fewer,
    )


def settle(
    relay: Relay,
    settings: HeadSettings,
    described: ServedModel,
    stop: threading.Event,
    tell: Callable[[str], object] = lambda obstacle: None,
) -> tuple[HeadSettings, SplitClaim] | None:
    """The settings with split and slots as numbers, and the word that keeps the split; None once `stop` is set.

    Nothing is loaded before; `tell` is told what is waited for. Raises WorkerError, for lack of memory too, and
    RelayError.
    """
    machine = head_machine(settings, described.directory)
    split: int | None = described.split
    if settings.split == "auto":
        choice = HeadsChoice(relay, described.profile, machine.sizes, lambda: machine.room(settings.slots), tell)
        split = choice.wait(stop, settings.tail_timeout_s)
    if split is None:
        return None
    slots = checked_slots(machine, settings.slots, split)
    claim = relay.claim_split(described.profile, split)
    if settings.split == "auto" and claim.split != split:  # another head was quicker
        split = claim.split
        claim.close()
        claim = relay.claim_split(described.profile, split)  # keep the word that is kept, not the one we came with
        slots = checked_slots(machine, settings.slots, split)
    return settings.model_copy(update={"split": split, "slots": slots}), claim


def _relay(settings: HeadSettings) -> RedisRelay:
    return RedisRelay(settings.relay_url, allow_insecure=settings.allow_insecure, compress=settings.wire_compress)


@contextmanager
def assembled(
    settings: HeadSettings,
    served: ServedModel,
    presence: Presence,
    client: redis.Redis,
    shard: HeadShard,
    make: MakeDrafter,
    search: TailSearch,
    stop: threading.Event,
) -> Iterator[HeadWorker]:
    """Load what is left to load, open the socket, start the fronts; at the end jobs go back to the queue.

    The presence tells of the engine, and of what keeps `search` from a tail; it ends here. Raises HeadIdTaken at the
    end if another head has this one's id.
    """
    drafter = make(settings, served)
    prompts = _prompts(served, shard.vocab_size)
    exempt_loaded()
    intake, authkey = Intake(prompts, settings.head_id), secrets.token_bytes(32)
    with (
        closing(open_trace(settings.trace)) as trace,
        private_address() as address,
        closing(EngineServer(address, authkey, intake.deliver)) as server,
    ):
        engine = HeadEngine(
            shard,
            drafter,
            intake,
            server,
            engine_options(settings, served.profile.wire_dtype),
            trace,
        )
        intake.wakes(engine.wake)

        def load() -> Load:
            figures = engine.figures()
            return Load(
                server.live(), server.consuming, figures.running, figures.tokens_per_s, figures, search.obstacle
            )

        presence.working(settings.num_slots, load)
        # The fronts close before the presence ends: what they hand back needs no restoring by others.
        with (
            closing(engine),
            closing(presence),
            closing(StopWatch(client, server.live, engine.stop)),
            closing(FollowWatch(client, server.live, engine.shown, engine.wake)),
            closing(_fronts(settings, address, authkey, presence.reads)) as fronts,
        ):
            try:
                yield HeadWorker(engine, server, fronts, lossless=settings.whole)
            except BaseException:
                server.close()  # the fronts see an engine that died over its jobs: that counts as one try of each
                raise
            engine.hand_back_all()
            presence.check()


def _prompts(served: ServedModel, vocab_size: int) -> PromptReader:
    """The model's tokenizer and ends; says at which tokens texts end, and which end may be missing."""
    tokenizer = load_tokenizer(served.directory)
    ends = end_ids(served.directory, tokenizer)
    log.info("texts end at %s", shown(tokenizer, ends))
    overlooked = overlooked_end(tokenizer, ends)
    if overlooked is not None:
        log.warning("%s", overlooked)
    return PromptReader(tokenizer=tokenizer, eos=ends, vocab_size=vocab_size, context=served.profile.context)


def engine_options(settings: HeadSettings, wire_dtype: str) -> EngineOptions:
    """What of the settings concerns the engine."""
    return EngineOptions(
        head_id=settings.head_id,
        slots=settings.num_slots,
        draft_length=settings.draft_length,
        max_draft_length=settings.max_draft_length,
        lanes=settings.link_lanes,
        adapt_lanes=settings.lanes == "auto" and not settings.whole,
        prefill_chunk=settings.chunk_tokens,
        prefix_reuse=settings.prefix_reuse,
        wire_dtype=wire_dtype,
        whole=settings.whole,
        prefill_per_turn=settings.prefill_per_turn,
        drafts_apart_on=settings.drafts_apart_on,
        drafter=settings.drafter,
        ends_at=settings.stops_at,
    )


def _fronts(settings: HeadSettings, address: str, authkey: bytes, reads: int) -> Fronts:
    return Fronts(
        settings,
        address,
        authkey,
        model=settings.served_name,
        count=settings.fronts,
        concurrency_total=concurrency(settings.num_slots),
        grace_s=settings.grace_s,
        reads=reads,
    )


def load_drafter(settings: HeadSettings, served: ServedModel) -> Drafter:
    """The drafter the settings ask for. Raises WorkerError."""
    directory = None
    if settings.drafter in ("model", "hybrid") and settings.drafter_model is not None:
        check_device(settings.draft_device)
        part = Part.DESCRIPTION if settings.load_format == "dummy" else Part.WHOLE
        directory = resolve(settings.drafter_model, part, progress=log_progress).path
    return make_drafter(
        settings.drafter,
        target=served.directory,
        drafter=directory,
        dtype=settings.drafter_dtype or settings.dtype,
        device=settings.draft_device,
        slots=settings.num_slots,
        max_length=settings.max_length,
        load_format=settings.load_format,
        graphs=settings.draft_graphs,
        quantization=settings.drafter_quantization,
    )


class HeadWorker:
    """The life of one head over its sessions with tails."""

    def __init__(self, engine: HeadEngine, server: EngineServer, fronts: Fronts, *, lossless: bool = False) -> None:
        """`lossless`: frames cannot get lost and tails cannot fall silent, however long an answer takes."""
        self._engine = engine
        self._server = server
        self._fronts = fronts
        self._lossless = lossless
        #: how long a frame may stay unanswered in the next epoch
        self.patience_s = GIVE_UP_AFTER_S

    def serve(self, search: TailSearch, stop: threading.Event, tail_timeout_s: float | None) -> None:
        """Take jobs whenever there is a tail, until `stop` is set. Raises NoTail if none comes in time."""
        session = search.wait(stop, tail_timeout_s)
        if session is None and not stop.is_set():
            raise NoTail(f"{search.obstacle}; gave up after {tail_timeout_s:g} s")
        while session is not None:
            if not self._work_over(session, stop):
                search.failed(session.lease.tail.tail)
            session = self._next_session(search, stop)

    def _work_over(self, session: Session, stop: threading.Event) -> bool:
        """Step the engine until it was stopped and drained (True) or the session is lost (False)."""
        log.info("epoch %d on tail %s: taking jobs", session.lease.epoch, session.lease.tail.tail)
        try:
            self._engine.open(self._courier(session), session.slots, tail_id=session.lease.tail.tail)
            while not stop.is_set():
                self._server.set_consuming(self._engine.wants_jobs)
                self._step(session)
                if self._engine.has_closed:
                    log.info("too little time is left for another job: ending")
                    stop.set()
            self._drain(session)
            return True
        except LinkLost as error:
            # A slow tail must not be given up again and again at the same frame: the next one gets longer.
            silent = isinstance(error, TailSilent)
            self.patience_s = min(2 * self.patience_s, MAX_PATIENCE_S) if silent else GIVE_UP_AFTER_S
            log.warning("lost tail %s: %s", session.lease.tail.tail, error)
            return False
        finally:
            self._server.set_consuming(False)
            session.close()

    def _courier(self, session: Session) -> Courier:
        vocab_size = self._engine.vocab_size
        if self._lossless:
            return Courier(session.link, resend_after_s=math.inf, give_up_after_s=math.inf, vocab_size=vocab_size)
        return Courier(session.link, give_up_after_s=self.patience_s, vocab_size=vocab_size)

    def _step(self, session: Session) -> None:
        if not session.lease.held():
            raise LinkLost("the lease lapsed or the tail is gone")
        self._engine.step()

    def _drain(self, session: Session) -> None:
        """Let the running jobs finish within the grace period; the others, and what is left, go back to the queue."""
        self._server.set_consuming(False)
        self._engine.hand_back_waiting()
        drain = threading.Thread(target=self._fronts.close, name="drain", daemon=True)
        drain.start()
        while drain.is_alive():
            self._step(session)

    def _next_session(self, search: TailSearch, stop: threading.Event) -> Session | None:
        """Wait for a tail; jobs that waited with us for too long go back to the queue meanwhile."""
        session = search.wait(stop, HAND_BACK_AFTER_S, self._engine.apply_stops)
        if session is None and not stop.is_set():
            log.warning("no tail for %g s: handing every job back", HAND_BACK_AFTER_S)
            self._engine.hand_back_all()
            session = search.wait(stop, None, self._give_back)
        return session

    def _give_back(self) -> None:
        """A front that was still waiting for a job's lease may have brought it since."""
        self._engine.apply_stops()
        self._engine.hand_back_all()
