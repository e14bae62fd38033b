"""The bell of a queue: rung when messages come in, heard by consumers that wait for some.

Only a wait is saved: without it an idle consumer looks again each second.
"""

from __future__ import annotations

from collections.abc import Iterable

import redis

from tasks import keys


def ring(client: redis.Redis, queue_names: Iterable[str]) -> None:
    """Wake the idle consumers of these queues. One round trip."""
    pipeline = client.pipeline(transaction=False)
    for name in queue_names:
        pipeline.xadd(keys.bell(name), {"rung": ""}, maxlen=1, approximate=False)
    pipeline.execute()
