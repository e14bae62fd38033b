"""The queue server of this installation: asked and told for the transport, with what it takes to do that."""

from __future__ import annotations

from contextlib import suppress

import redis

from cli.client.transport import Models
from cli.client.voice import Voice
from cli.reasons import System, look_around
from storage.database import Database
from tasks.connection import connect, ping, translated
from tasks.errors import QueueRefused, QueueUnreachable, TaskError
from tasks.feeder import feed_once
from tasks.heads import live_heads, wrong_database
from tasks.kept_database import refuse_other_database
from tasks.served import mirror_models, model_names
from tasks.settings import BookkeeperSettings
from tasks.stopper import Stopper


class QueueServer:
    """One connection, made when it is first needed. Raises the errors of `tasks` and `storage`."""

    def __init__(self, database: Database, settings: BookkeeperSettings) -> None:
        self._database = database
        self._settings = settings
        self._connection: redis.Redis | None = None
        self._stopper: Stopper | None = None

    def models(self) -> Models:
        """The names that are served, which the database then knows, too. Raises QueueRefused for the wrong database."""
        ping(self._client())
        with translated():
            if wrong := wrong_database(self._client()):
                raise QueueRefused(f"the queue server cannot be used: {wrong}")
            mirror_models(self._client(), self._database)
            known = model_names(self._client(), self._database)
        return Models(frozenset(known), known[0] if len(known) == 1 else None)

    def refuse_other_database(self, voice: Voice) -> None:
        """Raises OtherDatabase if a bookkeeper keeps another one; warns if none says which."""
        with translated():
            remark = refuse_other_database(self._client(), self._database)
        if remark:
            voice.warn(remark)

    def refuse_other_database_if_told(self) -> None:
        """As above, but what cannot be asked now is asked again when jobs are fed."""
        with suppress(QueueUnreachable), translated():
            refuse_other_database(self._client(), self._database)

    def feed(self) -> None:
        """One pass of the feeder."""
        feed_once(self._database, self._settings)

    def carry_out_stops(self) -> None:
        """One pass of the stopper."""
        with translated():
            if self._stopper is None:
                # One for all passes: it remembers since when it knows each stop.
                self._stopper = Stopper(self._database, self._client())
            self._stopper.turn()

    def system(self) -> System:
        """What lives now."""
        return look_around(self._settings, self._database)

    def tokens_per_s(self) -> float | None:
        """What all heads commit right now; None if that is not known."""
        try:
            with translated():
                return sum(head.tokens_per_s for head in live_heads(self._client()))
        except TaskError:
            return None

    def close(self) -> None:
        """Let go of the connection."""
        if self._connection is not None:
            self._connection.close()

    def _client(self) -> redis.Redis:
        """Not contacted yet. Raises QueueRefused for an unsafe address."""
        if self._connection is None:
            self._connection = connect(self._settings)
        return self._connection
