"""The model a worker serves: where it lies, what identifies it, how each half is loaded."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from relay.profile import Profile
from workers import gpus
from workers.engine.fingerprint import fingerprint
from workers.engine.loader import LoadFormat, LoadOptions, load_head, load_tail
from workers.engine.shard import HeadShard, TailShard
from workers.engine.source import Part, resolve
from workers.errors import DeviceUnavailable, ModelUnsupported
from workers.memory import memory_watched
from workers.settings import Quantization, WorkerSettings, is_gpu

#: characters of what torch says of a device: it can be a page
_LONGEST_REASON = 200

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One half's view of the target model; both halves' views must agree in `profile` and `split`."""

    directory: Path
    profile: Profile
    #: first layer of the tail's half
    split: int
    num_layers: int
    device: str
    quantization: Quantization
    #: see `workers.settings.WorkerSettings`
    load_format: LoadFormat
    graphs: bool

    @classmethod
    def resolve(
        cls, settings: WorkerSettings, part: Part, progress: Callable[[str, int, int], None] | None = None
    ) -> ServedModel:
        """Find (convert, fetch) the model. Raises WorkerError."""
        check_device(settings.device)
        dummy = settings.load_format == "dummy"
        part = Part.DESCRIPTION if dummy else part
        found = resolve(settings.model, part, settings.given_split, progress=progress)
        if settings.max_length > found.context:
            raise ModelUnsupported(
                f"max_length {settings.max_length} is beyond the model's own context of {found.context} tokens"
            )
        profile = Profile(
            fingerprint=fingerprint(found.path, dummy=dummy),
            dtype=settings.dtype,
            quantization=settings.quantization,
            wire_dtype=settings.wire_dtype or settings.dtype,
            deterministic=settings.deterministic,
            context=settings.max_length,
        )
        return cls(
            found.path,
            profile,
            found.split,
            found.num_layers,
            device=settings.device,
            quantization=settings.quantization,
            load_format=settings.load_format,
            graphs=settings.graphs and is_gpu(settings.device),
        )

    def load_head(self, *, slots: int, max_query: int) -> HeadShard:
        """The first half, with a cache of `slots` slots."""
        log.info("loading layers 0 to %d of %s", self.split - 1, self.directory)
        with memory_watched(torch.device(self.device)):
            return load_head(self.directory, self.split, **self._options(slots, max_query))

    def load_tail(self, *, slots: int, max_query: int, embedding: torch.Tensor | None = None) -> TailShard:
        """The second half, with a cache of `slots` slots; `embedding` as in `workers.engine.loader.load_tail`."""
        log.info("loading layers %d to %d of %s", self.split, self.num_layers - 1, self.directory)
        with memory_watched(torch.device(self.device)):
            return load_tail(self.directory, self.split, embedding, **self._options(slots, max_query))

    def load_whole(self, *, slots: int, max_query: int) -> tuple[HeadShard, TailShard]:
        """Both halves; embeddings that are tied to the LM head are held once."""
        head = self.load_head(slots=slots, max_query=max_query)
        return head, self.load_tail(slots=slots, max_query=max_query, embedding=head.embedding)

    def _options(self, slots: int, max_query: int) -> LoadOptions:
        return LoadOptions(
            slots=slots,
            max_length=self.profile.context,
            max_query=max_query,
            dtype=self.profile.dtype,
            device=self.device,
            quantization=self.quantization,
            load_format=self.load_format,
            graphs=self.graphs,
            exact=self.profile.deterministic,
        )


def check_device(name: str) -> None:
    """DeviceUnavailable, with cause and cure, unless torch can put a tensor there and has code for it."""
    gpus.check_device(name)
    try:
        torch.empty(1, device=name)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0][:_LONGEST_REASON]
        raise DeviceUnavailable(f"device {name!r} cannot be used: {reason} (`cpu` works everywhere)") from error
    if torch.version.cuda is not None and is_gpu(name):
        problem = gpus.too_old(torch.cuda.get_device_capability(name), torch.cuda.get_arch_list())
        if problem is not None:
            raise DeviceUnavailable(f"device {name!r} cannot be used: {torch.cuda.get_device_name(name)} {problem}")
