"""The head process of a model that fits one machine: `shardq head --whole`."""

from __future__ import annotations

import threading
import time
from contextlib import ExitStack, closing

from relay.transport import TailInfo
from tasks import connection, heads
from tasks.settings import TaskSettings
from workers.engine.source import Part
from workers.head.room import head_machine
from workers.head.session import TailSearch
from workers.head.worker import LOADING, assembled, known, load_drafter, offer
from workers.progress import log_progress
from workers.room import checked_slots
from workers.served import ServedModel
from workers.settings import HeadSettings
from workers.whole.link import DirectRelay

#: what the half that is no process of its own is called in logs
_TAIL = "in-this-process"


def run(settings: HeadSettings, stop: threading.Event) -> None:
    """Serve as head and tail in one until `stop` is set; needs the queue server only.

    Raises:
        WorkerError: the model, the drafter or the device cannot be used.
        TaskError: the queue server refuses or does not answer; the head's id or served name is taken.
    """
    tasks = TaskSettings(broker_url=settings.broker_url, allow_insecure=settings.allow_insecure)
    with closing(connection.connect(tasks)) as client, ExitStack() as cleanup:
        connection.ping(client)
        described = ServedModel.resolve(settings, Part.DESCRIPTION, log_progress)
        presence = cleanup.enter_context(known(client, settings, described, stop))
        slots = checked_slots(head_machine(settings, described.directory), settings.slots, described.split)
        settings = settings.model_copy(update={"split": described.split, "slots": slots})
        presence.starting(LOADING)
        served = ServedModel.resolve(settings, Part.WHOLE, log_progress)
        with connection.translated():
            heads.register_profile(client, settings.served_name, served.profile)
        head, tail = served.load_whole(slots=slots, max_query=settings.max_query)
        info = TailInfo(_TAIL, served.profile, served.split, slots, settings.max_query, time.time())
        search = TailSearch(DirectRelay(info, tail), offer(settings, served))
        with assembled(settings, served, presence, client, head, load_drafter, search, stop) as worker:
            worker.serve(search, stop, None)
