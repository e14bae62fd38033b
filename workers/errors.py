"""Errors of the workers.

WorkerError
├── ModelNotFound        the directory, file or hub id does not exist or has no usable weights
├── ModelUnsupported     the model exists, but its type or settings are not among the proven ones
├── ModelDamaged         the weights do not fit the config: tensors are missing or have another shape
├── SplitInvalid         the layer to cut at leaves one half without layers
├── DrafterInvalid       the settings ask for a drafter without saying which model
├── VocabularyMismatch   drafter and target map tokens to different ids
├── DeviceUnavailable    torch cannot use the device
├── OutOfMemory          a computation found no room, on its device or on the host
├── TraceUnwritable      the file for the timeline cannot be written
└── NoTail               no fitting tail was free in time
"""

from __future__ import annotations


class WorkerError(Exception):
    """Anything a head, tail or drafter refuses; the message is one line for the user."""


class ModelNotFound(WorkerError):
    """The model's directory, file or hub id does not exist, or holds no safetensors weights."""


class ModelUnsupported(WorkerError):
    """The model's type, position scaling or quantisation is outside of what was proven to work."""


class ModelDamaged(WorkerError):
    """The checkpoint lacks tensors that its config asks for, or has them in another shape."""


class SplitInvalid(WorkerError):
    """The split is not between 1 and the number of layers minus 1."""


class DrafterInvalid(WorkerError):
    """The settings do not describe a drafter that can be built."""


class VocabularyMismatch(WorkerError):
    """Drafter and target do not map the same tokens to the same ids."""


class DeviceUnavailable(WorkerError):
    """The device does not exist here, or torch was built without it."""


class OutOfMemory(WorkerError):
    """A computation found no room; the message says what was asked for and what was free, as far as known."""


class TraceUnwritable(WorkerError):
    """The file of the engine's timeline cannot be created."""


class NoTail(WorkerError):
    """No tail that fits this head was free; the message says what stood in the way."""
