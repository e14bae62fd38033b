"""Loading one half of a model: only its own layers ever come into memory.

A half is the library's own base model of a shortened config, built without memory on the meta device, into
which the wanted tensors are read one by one under shifted layer numbers, and quantised as they come.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired, TypedDict, Unpack

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel

from workers.engine import checkpoint
from workers.engine.attention import GROUPED, register_grouped_attention
from workers.engine.checkpoint import EMBEDDING, LM_HEAD
from workers.engine.dummy import DummyWeights
from workers.engine.families import Family, family_of, shorten
from workers.engine.quantization import Quantization, is_quantised, quantised, replace_linears
from workers.engine.shard import Capacity, HeadShard, Mode, TailShard, WholeModel
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported, SplitInvalid
from workers.memory import free_unused

Attention = Literal["sdpa", "eager"]
#: "dummy": random weights instead of the checkpoint's, see `workers.engine.dummy`
LoadFormat = Literal["auto", "dummy"]

#: where checkpoints keep the text model, longest first: multimodal ones nest it
PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
#: `init_empty_weights` patches torch for all threads, and two at a time would leave it patched
_ONE_AT_A_TIME = threading.Lock()
LAYER = re.compile(r"layers\.(\d+)\.(.+)")


class LoadOptions(TypedDict):
    """How a half is loaded: what `load_head`, `load_tail` and `load_whole` have in common."""

    slots: int
    #: positions a slot can hold, and most query tokens a row: see `Capacity`
    max_length: int
    max_query: int
    #: float32 by default
    dtype: NotRequired[torch.dtype | str]
    #: the CPU by default
    device: NotRequired[torch.device | str]
    #: None, the default, takes the fastest implementation that is right for the family
    attention: NotRequired[Attention | None]
    #: see `Mode`
    graphs: NotRequired[bool]
    exact: NotRequired[bool]
    load_format: NotRequired[LoadFormat]
    quantization: NotRequired[Quantization]


def load_head(directory: Path | str, split: int, **options: Unpack[LoadOptions]) -> HeadShard:
    """Embeddings and layers [0, split). Errors: ModelNotFound, ModelUnsupported, ModelDamaged, SplitInvalid."""
    plan = _plan(directory, options)
    check_split(split, plan.config.num_hidden_layers)
    base, short = _load_base(plan, 0, split, embeddings=True, final_norm=False)
    return HeadShard(base, short, plan.family, plan.capacity, eager=plan.eager, mode=plan.mode)


def load_tail(
    directory: Path | str, split: int, embedding: Tensor | None = None, **options: Unpack[LoadOptions]
) -> TailShard:
    """Layers [split, L), final norm and LM head; no embeddings, unless tied ones serve as LM head.

    `embedding`: the head's, if it is in this process: tied ones are shared with it, not read again. Errors as
    `load_head`.
    """
    plan = _plan(directory, options)
    check_split(split, plan.config.num_hidden_layers)
    base, short = _load_base(plan, split, plan.config.num_hidden_layers, embeddings=False, final_norm=True)
    if plan.family.embedding_scale is not None:
        setattr(base, plan.family.embedding_scale, 1.0)
    return TailShard(
        base, _load_lm_head(plan, embedding), short, plan.family, plan.capacity, eager=plan.eager, mode=plan.mode
    )


def load_whole(directory: Path | str, **options: Unpack[LoadOptions]) -> WholeModel:
    """All layers with embeddings and LM head: a drafter, or a model that fits one machine. Errors as `load_head`."""
    plan = _plan(directory, options)
    base, short = _load_base(plan, 0, plan.config.num_hidden_layers, embeddings=True, final_norm=True)
    lm_head = _load_lm_head(plan, base.get_parameter(EMBEDDING))
    return WholeModel(base, lm_head, short, plan.family, plan.capacity, eager=plan.eager, mode=plan.mode)


def check_complete(directory: Path | str) -> None:
    """Whether the model can be loaded whole: every tensor is there, in a file of the right size, in the right shape.

    Reads headers only. Errors as `load_head`.
    """
    plan = _plan(directory, LoadOptions(slots=1, max_length=1, max_query=1))
    wanted = _whole_shapes(plan)
    headers = {file: checkpoint.read_header(file)[1] for file in sorted({plan.files[name] for name in wanted})}
    for name, shape in wanted.items():
        entry = checkpoint.entry_of(name, plan.files[name], headers[plan.files[name]])
        checkpoint.check_shape(name, shape, torch.Size(entry["shape"]))


def check_names(directory: Path | str, names: Iterable[str]) -> None:
    """ModelDamaged unless these are all the tensors that the model of the config in `directory` needs."""
    plan = _plan(directory, LoadOptions(slots=1, max_length=1, max_query=1), dict.fromkeys(names, Path(directory)))
    _whole_shapes(plan)


def load_config(directory: Path | str) -> PreTrainedConfig:
    """The text model's config; ModelNotFound without one, ModelUnsupported for a type that is not allowed."""
    path = Path(directory)
    if not path.is_dir():
        raise ModelNotFound(f"model directory {path} does not exist")
    if not (path / "config.json").is_file():
        raise ModelNotFound(f"{path} has no config.json")
    try:
        content = json.loads((path / "config.json").read_text(encoding="utf-8"))
        family_of(content.get("text_config", content).get("model_type"))
        if "quantization_config" in content:
            raise ModelUnsupported(
                f"{path} is quantised already: take the model's original, unquantised weights, "
                "and let shardq quantise them with --quantization nf4 or int8"
            )
        config: PreTrainedConfig = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (ValueError, KeyError, AttributeError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelUnsupported(f"{path}/config.json cannot be read: {reason}") from error
    text: PreTrainedConfig = config.get_text_config(decoder=True)
    return text


def context_length(directory: Path | str) -> int:
    """The longest prompt + completion the model was made for, in tokens."""
    length: int = load_config(directory).max_position_embeddings
    return length


def check_split(split: int, num_layers: int) -> None:
    """SplitInvalid unless both halves get a layer."""
    if not 1 <= split < num_layers:
        raise SplitInvalid(f"split {split} is not between 1 and {num_layers - 1}: the model has {num_layers} layers")


@dataclass(frozen=True)
class _Plan:
    """What to load from where."""

    config: PreTrainedConfig
    family: Family
    files: dict[str, Path]
    #: what to take instead of what the files hold
    dummy: DummyWeights | None
    prefix: str
    dtype: torch.dtype
    device: torch.device
    capacity: Capacity
    eager: bool
    mode: Mode
    quantization: Quantization


def _plan(directory: Path | str, options: LoadOptions, files: dict[str, Path] | None = None) -> _Plan:
    """`files`: where the tensors are, if not where the directory says."""
    config = load_config(directory)
    family = family_of(config.model_type)
    capacity = Capacity(options["slots"], options["max_length"], options["max_query"])
    _check_position_scaling(config, capacity)
    dummy = DummyWeights(config) if options.get("load_format") == "dummy" else None
    if dummy is not None:
        files = dict.fromkeys(dummy.names, Path(directory))
    elif files is None:
        files = checkpoint.tensor_files(Path(directory))
    return _Plan(
        config=config,
        family=family,
        files=files,
        dummy=dummy,
        prefix=_text_prefix(files),
        dtype=torch_dtype(options.get("dtype", torch.float32)),
        device=torch.device(options.get("device", "cpu")),
        capacity=capacity,
        eager=attends_eagerly(config, family, options.get("attention")),
        mode=Mode(options.get("graphs", False), options.get("exact", False)),
        quantization=options.get("quantization", "none"),
    )


def torch_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """The dtype of this name; ModelUnsupported for one that weights cannot have."""
    if isinstance(dtype, torch.dtype):
        return dtype
    dtypes = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
    if dtype not in dtypes:
        raise ModelUnsupported(f"dtype {dtype!r} is not one of {', '.join(dtypes)}")
    return dtypes[dtype]


def attends_eagerly(config: PreTrainedConfig, family: Family, attention: Attention | None = None) -> bool:
    """Whether to attend eagerly; sdpa cannot cap attention scores."""
    if family.softcaps_scores and config.attn_logit_softcapping is not None:
        if attention == "sdpa":
            raise ModelUnsupported(f"{config.model_type} caps attention scores, which sdpa cannot")
        return True
    return attention == "eager"


def _text_prefix(files: dict[str, Path]) -> str:
    for prefix in PREFIXES:
        if any(name.startswith(f"{prefix}layers.") for name in files):
            return prefix
    raise ModelDamaged("the checkpoint has no decoder layers under a name that shardq knows")


def _check_position_scaling(config: PreTrainedConfig, capacity: Capacity) -> None:
    """Refuse position scaling that depends on length, unless every slot stays within the original context."""
    reach = capacity.max_length + capacity.max_query
    for parameters in _rope_parameters(config):
        kind = parameters.get("rope_type", "default")
        if kind not in ("dynamic", "longrope"):
            continue
        original = _original_context(config, parameters, kind)
        if reach > original:
            raise ModelUnsupported(
                f"{kind} position scaling depends on length beyond {original} tokens: "
                f"max_length {capacity.max_length} plus {capacity.max_query} for padding goes past that"
            )


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, Any]]:
    """The rope parameters of every layer type (one set of them for most models)."""
    parameters = config.to_dict().get("rope_parameters") or {}
    nested = [value for value in parameters.values() if isinstance(value, dict)]
    return nested or [parameters]


def _original_context(config: PreTrainedConfig, parameters: dict[str, Any], kind: str) -> int:
    if kind == "dynamic":  # the library rescales beyond this, whatever the parameters say
        return int(config.max_position_embeddings)
    declared = parameters.get("original_max_position_embeddings")
    return int(declared or config.to_dict().get("original_max_position_embeddings") or config.max_position_embeddings)


def _load_base(
    plan: _Plan, first: int, last: int, *, embeddings: bool, final_norm: bool
) -> tuple[PreTrainedModel, PreTrainedConfig]:
    """The base model of layers [first, last) with its weights, and its config."""
    base, short = empty_base(plan.config, first, last, embeddings=embeddings, final_norm=final_norm, eager=plan.eager)
    replace_linears(base, plan.quantization, plan.dtype)
    wanted = _wanted(plan, base, first)
    fill(base, _read(plan, wanted), plan.device)
    return base, short


def empty_base(
    config: PreTrainedConfig, first: int, last: int, *, embeddings: bool, final_norm: bool, eager: bool
) -> tuple[Any, PreTrainedConfig]:
    """The base model of layers [first, last) with parameters that take no memory, and its config."""
    short = shorten(config, first, last)
    short.use_cache = True
    register_grouped_attention()
    # buffers such as rotary frequencies are not in the checkpoint, so they must be computed for real
    with _ONE_AT_A_TIME, init_empty_weights(include_buffers=False):
        base: Any = AutoModel.from_config(  # type: ignore[no-untyped-call]
            short, attn_implementation="eager" if eager else GROUPED, trust_remote_code=False
        )
    if not embeddings:
        base.embed_tokens = nn.Identity()
    if not final_norm:
        base.norm = nn.Identity()
    return base, short


def fill(base: Any, tensors: Iterable[tuple[str, Tensor]], device: torch.device) -> None:
    """Put every parameter of a base model in its place as it comes; beside the result one tensor is held."""
    for name, tensor in tensors:
        place: nn.Parameter = base.get_parameter(name)
        checkpoint.check_shape(name, place.shape, tensor.shape)
        owner, _, own_name = name.rpartition(".")
        parameter = nn.Parameter(tensor, False)
        if is_quantised(place):
            parameter = quantised(place, tensor, device)
            free_unused(device)  # quantising takes many times the tensor for a moment
        setattr(base.get_submodule(owner), own_name, parameter)
    for module in base.modules():
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(device))
    base.requires_grad_(False)
    base.eval()


def _read(plan: _Plan, wanted: Mapping[str, str]) -> Iterator[tuple[str, Tensor]]:
    """(new name, tensor) for every `wanted` stored name -> new name."""
    if plan.dummy is not None:
        return plan.dummy.read(wanted, plan.dtype, plan.device)
    return checkpoint.read_tensors(plan.files, wanted, plan.dtype, plan.device)


def _wanted(plan: _Plan, base: PreTrainedModel, first: int) -> dict[str, str]:
    """Stored name -> the model's own name, for every parameter of the half."""
    wanted = {}
    for name in base.state_dict():
        match = LAYER.fullmatch(name)
        stored = plan.prefix + (f"layers.{int(match[1]) + first}.{match[2]}" if match else name)
        if name == EMBEDDING and stored not in plan.files and plan.config.tie_word_embeddings:
            stored = _lm_head_name(plan)
        wanted[stored] = name
    missing = [stored for stored in wanted if stored not in plan.files]
    if missing:
        raise ModelDamaged(f"the checkpoint lacks {len(missing)} tensors{_of_layers(missing)}, first {missing[0]}")
    return wanted


def _of_layers(names: Sequence[str]) -> str:
    """` of layers 3, 20 to 29`: the layers that these tensors belong to; nothing if they belong to none."""
    numbers = sorted({int(found[1]) for name in names if (found := checkpoint.LAYER.search(name))})
    begins = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    runs = [str(begin) if begin == end else f"{begin} to {end}" for begin, end in zip(begins, ends, strict=True)]
    return f" of layer{'s' if len(numbers) > 1 else ''} {', '.join(runs)}" if runs else ""


def _whole_shapes(plan: _Plan) -> dict[str, torch.Size]:
    """The stored name and shape of every tensor that the whole model needs. Raises ModelDamaged."""
    base, _ = empty_base(
        plan.config, 0, plan.config.num_hidden_layers, embeddings=True, final_norm=True, eager=plan.eager
    )
    shapes = {stored: base.get_parameter(name).shape for stored, name in _wanted(plan, base, 0).items()}
    shapes[_stored_lm_head(plan)] = torch.Size((plan.config.vocab_size, plan.config.hidden_size))
    return shapes


def _lm_head_name(plan: _Plan) -> str:
    """The LM head's stored name; multimodal checkpoints may keep it beside the nested text model."""
    for name in (LM_HEAD, f"language_model.{LM_HEAD}"):
        if name in plan.files:
            return name
    return LM_HEAD


def _stored_lm_head(plan: _Plan) -> str:
    """The name under which the LM head, or what it is tied to, is stored. Raises ModelDamaged."""
    stored = _lm_head_name(plan)
    if stored in plan.files:
        return stored
    if not plan.config.tie_word_embeddings:
        raise ModelDamaged(f"the checkpoint lacks {stored}, and its config does not tie the embeddings")
    return plan.prefix + EMBEDDING


def _load_lm_head(plan: _Plan, embedding: Tensor | None) -> nn.Linear:
    """The LM head: its own tensor if stored, else (tied) the embeddings, shared with `embedding` if given."""
    stored = _stored_lm_head(plan)
    if embedding is not None and plan.config.tie_word_embeddings and not _both_stored(plan):
        weight = embedding
    else:
        ((_, weight),) = _read(plan, {stored: "weight"})
    expected = torch.Size((plan.config.vocab_size, plan.config.hidden_size))
    checkpoint.check_shape(stored, expected, weight.shape)
    with torch.device("meta"):
        lm_head = nn.Linear(plan.config.hidden_size, plan.config.vocab_size, bias=False)
    lm_head.weight = nn.Parameter(weight, requires_grad=False)
    return lm_head


def _both_stored(plan: _Plan) -> bool:
    """Whether a tied model's checkpoint holds LM head and embeddings, which then may differ."""
    return _lm_head_name(plan) in plan.files and plan.prefix + EMBEDDING in plan.files
