"""Reads the frames of one stream, with a read always waiting at the server."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from relay.connections import TRANSIENT, Connections, Line
from relay.errors import LinkLost
from relay.writer import FIRST_ENTRY_ID, FRAME_FIELD

log = logging.getLogger(__name__)

#: most frames taken with one read
_COUNT = 16


class FrameReader:
    """The reading end of one stream: a thread that hands every frame to `deliver`, in order, each once."""

    def __init__(
        self,
        connections: Connections,
        key: str,
        *,
        block_s: float,
        patience_s: float,
        deliver: Callable[[bytes], None],
        lost: Callable[[LinkLost], None],
    ) -> None:
        """`lost` is called at most once, `deliver` never after it."""
        self._key = key
        self._block_ms = max(1, int(block_s * 1000))
        self._deliver = deliver
        self._lost = lost
        self._line = Line(connections, patience_s)
        self._last_id: bytes = FIRST_ENTRY_ID
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name=f"reader {key}", daemon=True)

    def open(self) -> None:
        """Connect; raises `RelayUnreachable` or `RelayRefused`."""
        self._line.open()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop soon, from any thread."""
        self._line.hang_up()

    def join(self) -> None:
        """Wait for the thread's end after `stop`."""
        if self._thread.ident is None:
            self._line.drop()
        elif threading.current_thread() is not self._thread:
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            while not self._line.hung_up:
                try:
                    self._read()
                except TRANSIENT as error:
                    self._line.reopen(error)
        except LinkLost as error:
            self._end(error)
        except Exception as error:  # outermost loop of the thread
            if not self._line.hung_up:
                log.exception("reader of %s failed", self._key)
            self._end(LinkLost(f"{self._key}: {error}"))
        finally:
            self._line.drop()

    def _end(self, error: LinkLost) -> None:
        if not self._line.hung_up:
            self._lost(error)

    def _read(self) -> None:
        connection = self._line.connection
        command = ("XREAD", "COUNT", _COUNT, "BLOCK", self._block_ms, "STREAMS", self._key, self._last_id)
        connection.send_command(*command, check_health=False)
        reply = connection.read_response()
        self._line.answered()
        for _, entries in reply or ():
            for entry_id, fields in entries:
                self._take(entry_id, fields)

    def _take(self, entry_id: bytes, fields: list[bytes] | None) -> None:
        self._last_id = entry_id
        sequence = int(entry_id.split(b"-")[0])
        if sequence != self._sequence + 1:
            log.warning("%s: entries %d to %d are missing", self._key, self._sequence + 1, sequence - 1)
        self._sequence = sequence
        if not fields or len(fields) != 2 or fields[0] != FRAME_FIELD:
            log.warning("%s: entry %d is no frame, dropped", self._key, sequence)
            return
        self._deliver(fields[1])
