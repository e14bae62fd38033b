"""Everything the relay raises on purpose.

RelayError
├── FrameInvalid        bytes that are no frame, or a message that cannot become one
├── LinkLost            an epoch's transport broke or was ended by the other side; a new epoch is needed
├── RelayUnreachable    the server does not answer; trying again later may help
├── RelayRefused        the server, or shardq itself, refuses this access; trying again will not help
│   └── RelayUrlInvalid the address cannot be understood
└── EmbeddedRedisFailed the embedded server could not be found or started
"""

from __future__ import annotations


class RelayError(Exception):
    """Base of the relay's errors."""


class FrameInvalid(RelayError):
    """These bytes are not a well-formed frame, or this message does not fit into one."""


class LinkLost(RelayError):
    """The transport of an epoch is gone for good."""


class RelayUnreachable(RelayError):
    """The Redis server cannot be reached or does not answer in time."""


class RelayRefused(RelayError):
    """Wrong password, missing rights, or an address shardq refuses to use."""


class RelayUrlInvalid(RelayRefused):
    """Not a Redis URL."""


class EmbeddedRedisFailed(RelayError):
    """No server binary, or it did not come up."""
