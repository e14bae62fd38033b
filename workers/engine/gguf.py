"""Converting a GGUF file to a model directory with safetensors, config and tokenizer, once.

The weights are dequantised to float32 exactly. The tokenizer is rebuilt from the file's vocabulary and merges:
what generic converters make of them splits digits and text otherwise than the model was trained with.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from workers.engine.loader import check_names
from workers.errors import ModelDamaged, ModelNotFound, ModelUnsupported

#: told (what is being done, steps done, steps in all)
Progress = Callable[[str, int, int], None]

#: written beside the weights: what they were made from; a converted model's fingerprint
MANIFEST = "shardq-manifest.json"
#: raise it when weights come out otherwise: halves of such different versions must not meet
CONVERSION = 1
#: raise it when anything that is written changes, so that old conversions are made anew
REVISION = 2
#: bytes of weights per safetensors file, which is also the memory a conversion needs
SHARD_BYTES = 1 << 30

#: GGUF architecture -> (class of the causal model, whether query and key rows are stored in another order)
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", True),
    "qwen2": ("Qwen2ForCausalLM", False),
    "qwen3": ("Qwen3ForCausalLM", False),
}

NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
#: what the parts of a split file are called
PART_NAME = re.compile(r"(?P<stem>.+)-(?P<number>\d+)-of-(?P<count>\d+)\.gguf")
TENSOR_NAME = re.compile(r"(?:blk\.(?P<layer>\d+)\.)?(?P<part>\w+)\.(?P<kind>weight|bias)")

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
#: names of one way to split. With it whole tokens go before merges and, unless the file says otherwise, BOS goes before
#: every text, as in llama.cpp; no other way that is supported adds BOS by itself
LLAMA_3 = frozenset({"llama-bpe", "llama-v3", "llama3"})
#: how text is split before merging, by the file's `tokenizer.ggml.pre`
SPLITS = {
    "qwen2": rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}",
    **dict.fromkeys(LLAMA_3, rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"),
}
#: `tokenizer.ggml.token_type` of tokens that only the program writes, and of ones users defined
CONTROL, USER_DEFINED = 3, 4
#: metadata that names a token which ends a text: end of text, of a turn, of a message
END_KEYS = ("eos", "eot", "eom")
#: what such tokens are called where the metadata names one of them only
END_NAMES = frozenset(
    {
        "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|eot|>", "<|eom|>", "<|end|>", "<|end_of_turn|>", "<end_of_turn>",
        "<|END_OF_TURN_TOKEN|>", "<end_of_utterance>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "</s>", "<|eos|>", "<eos>",
        "<|endoftext|>", "<|end_of_text|>", "<｜end▁of▁sentence｜>", "<|endofturn|>",
    }
)  # fmt: skip


@dataclass(frozen=True)
class GGUFFile:
    """An opened GGUF file, or all parts of a split one."""

    path: Path
    #: one for each part; the first has the metadata
    readers: tuple[Any, ...]

    @classmethod
    def open(cls, path: Path) -> GGUFFile:
        """Map the file and, if it is part of a split one, all others.

        ModelNotFound if a part is absent, ModelDamaged if one is no GGUF, is cut off or belongs to another model,
        ModelUnsupported without the `gguf` package.
        """
        files = parts(path)
        opened = cls(path, tuple(_reader(file) for file in files))
        _check_parts(opened, files)
        return opened

    @cached_property
    def tokens(self) -> list[str]:
        """The vocabulary; ModelUnsupported without one."""
        tokens: list[str] | None = self.field("tokenizer.ggml.tokens")
        if tokens is None:
            raise ModelUnsupported(f"{self.path} has no tokenizer")
        return tokens

    @property
    def tensors(self) -> list[Any]:
        """The tensors of all parts."""
        return [tensor for reader in self.readers for tensor in reader.tensors]

    @property
    def architecture(self) -> str:
        """The model's type in GGUF terms; ModelUnsupported unless it can be converted."""
        name: str = self.field("general.architecture")
        if name not in ARCHITECTURES:
            allowed = ", ".join(sorted(ARCHITECTURES))
            raise ModelUnsupported(f"GGUF architecture {name!r} is not supported; supported: {allowed}")
        return name

    def field(self, key: str, default: Any = None) -> Any:
        """The value under a metadata key."""
        entry = self.readers[0].fields.get(key)
        return default if entry is None else entry.contents()

    def special(self, role: str) -> int | None:
        """The id of the token with this role, e.g. `eos`; None if the file names none that exists."""
        number: int | None = self.field(f"tokenizer.ggml.{role}_token_id")
        return number if number is not None and number < len(self.tokens) else None

    def setting(self, key: str, default: Any = None) -> Any:
        """A value of the architecture's own, e.g. `block_count`; ModelDamaged if absent without a default."""
        value = self.field(f"{self.architecture}.{key}", default)
        if value is None:
            raise ModelDamaged(f"{self.path} lacks {self.architecture}.{key}")
        return value


def parts(path: Path) -> tuple[Path, ...]:
    """The files of the model in this one: itself or, if its name is that of a part, all parts in order.

    ModelNotFound if one is absent.
    """
    match = PART_NAME.fullmatch(path.name)
    numbers = range(1, int(match["count"]) + 1) if match else range(0)
    if match is None or int(match["number"]) not in numbers:
        if not path.is_file():
            raise ModelNotFound(f"GGUF file {path} does not exist")
        return (path,)
    files = []
    for number in numbers:
        file = path.with_name(f"{match['stem']}-{number:0{len(match['number'])}}-of-{match['count']}.gguf")
        if not file.is_file():  # a name may promise a million parts: the first that is absent is enough
            raise ModelNotFound(f"{file} is missing: {path.name} is one of {len(numbers)} parts")
        files.append(file)
    return tuple(files)


def model_name(path: Path) -> str:
    """What the file is called, without its ending and without the number of a part."""
    match = PART_NAME.fullmatch(path.name)
    return match["stem"] if match else path.stem


def _reader(path: Path) -> Any:
    try:
        from gguf import GGUFReader
    except ImportError as error:
        raise ModelUnsupported("reading .gguf files needs the package gguf: pip install gguf") from error
    try:
        return GGUFReader(path)
    except (ValueError, IndexError, KeyError, OSError) as error:
        raise ModelDamaged(f"{path} is not a readable GGUF file, or was cut off: {error}") from error


def _check_parts(file: GGUFFile, files: Sequence[Path]) -> None:
    """ModelDamaged unless these are all parts of one file, each once."""
    count = file.field("split.count", 1)
    if count > 1 and count != len(files):
        raise ModelDamaged(
            f"{file.path} is one of {count} parts, which are found by their names: "
            f"expected {model_name(file.path)}-00001-of-{count:05}.gguf and so on"
        )
    for index, (reader, each) in enumerate(zip(file.readers, files, strict=True)):
        number = reader.fields.get("split.no")
        if number is not None and number.contents() != index:
            raise ModelDamaged(f"{each} says that it is part {number.contents() + 1}: its name is that of another part")
    names = [tensor.name for tensor in file.tensors]
    total = file.field("split.tensors.count", len(names))
    if len(set(names)) != total or len(names) != total:
        raise ModelDamaged(f"the parts of {file.path} are of different models: {len(names)} tensors, expected {total}")


def convert(source: Path, directory: Path, sha256: str, progress: Progress | None = None) -> None:
    """Write the model in the GGUF file `source`, or in all its parts, into the existing, empty `directory`.

    `sha256` is that of the content. Needs about SHARD_BYTES of memory. Errors: ModelNotFound, ModelDamaged,
    ModelUnsupported.
    """
    report = progress or (lambda what, done, total: None)
    file = GGUFFile.open(source)
    config = model_config(file)
    _write_json(directory / "config.json", config)
    check_names(directory, [stored_name(tensor.name) for tensor in file.tensors])
    _write_json(directory / "generation_config.json", _generation_config(file))
    build_tokenizer(file).save_pretrained(directory)
    _write_weights(file, config, directory, report)
    _write_json(directory / MANIFEST, {"source": source.name, "sha256": sha256, "conversion": CONVERSION})


def model_config(file: GGUFFile) -> dict[str, Any]:
    """The model's config.json. Position scaling is refused: GGUF stores it in ways that differ by version."""
    architecture = file.architecture
    shapes = {tensor.name: [int(n) for n in tensor.shape] for tensor in file.tensors}
    if "token_embd.weight" not in shapes:
        raise ModelDamaged(f"{file.path} lacks the tensor token_embd.weight")
    scaling = file.field(f"{architecture}.rope.scaling.type", "none")
    if "rope_freqs.weight" in shapes or scaling != "none":
        raise ModelUnsupported(f"{file.path} scales positions, which is not supported in GGUF files")
    hidden, heads = file.setting("embedding_length"), file.setting("attention.head_count")
    return {
        "architectures": [ARCHITECTURES[architecture][0]],
        "model_type": architecture,
        "vocab_size": shapes["token_embd.weight"][1],
        "hidden_size": hidden,
        "intermediate_size": file.setting("feed_forward_length"),
        "num_hidden_layers": file.setting("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.setting("attention.head_count_kv", heads),
        "head_dim": file.setting("attention.key_length", hidden // heads),
        "hidden_act": "silu",
        "rms_norm_eps": _short_float(file.setting("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": file.setting("context_length"),
        "rope_parameters": {"rope_type": "default", "rope_theta": file.setting("rope.freq_base", 10000.0)},
        "tie_word_embeddings": "output.weight" not in shapes,
        "bos_token_id": file.special("bos"),
        "eos_token_id": file.special("eos"),
        "pad_token_id": file.special("padding"),
        "dtype": "float32",
    }


def _generation_config(file: GGUFFile) -> dict[str, Any]:
    """generation_config.json, with every token that ends a text."""
    ends = end_ids(file)
    return {
        "bos_token_id": file.special("bos"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends,
        "pad_token_id": file.special("padding"),
    }


def end_ids(file: GGUFFile) -> list[int]:
    """Every token that ends a text, ascending: those that the metadata names, and those that are called so.

    One that also stands for what the vocabulary lacks may come up amid a text: its name alone makes it no end.
    """
    tokens, kinds = file.tokens, file.field("tokenizer.ggml.token_type", [])
    named = {
        number
        for number, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if token in END_NAMES and kind in (CONTROL, USER_DEFINED)
    }
    declared = {number for key in END_KEYS if (number := file.special(key)) is not None}
    return sorted((named - {file.special("unknown")}) | declared)


def build_tokenizer(file: GGUFFile) -> PreTrainedTokenizerFast:
    """The byte-level BPE tokenizer of the file, with its special tokens and chat template.

    It adds no token of its own unless texts begin with BOS, as the file or the way to split says.
    """
    if file.field("tokenizer.ggml.model") != "gpt2":
        raise ModelUnsupported(f"{file.path} has no byte-level BPE tokenizer, the only kind that can be converted")
    tokens = file.tokens
    split = file.field("tokenizer.ggml.pre", "gpt-2")
    merges = [tuple(pair.split(" ", 1)) for pair in file.field("tokenizer.ggml.merges")]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    bpe = models.BPE(vocab=vocabulary, merges=merges, ignore_merges=split in LLAMA_3)
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(split)
    tokenizer.decoder = decoders.ByteLevel()
    if split == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    _add_special_tokens(tokenizer, tokens, file.field("tokenizer.ggml.token_type", []))
    names = {
        role: tokens[number]
        for role, key in (
            ("bos_token", "bos"),
            ("eos_token", "eos"),
            ("unk_token", "unknown"),
            ("pad_token", "padding"),
        )
        if (number := file.special(key)) is not None
    }
    if file.field("tokenizer.ggml.add_bos_token", split in LLAMA_3):
        if "bos_token" not in names:
            raise ModelDamaged(f"{file.path} wants BOS before every text and names no token for it")
        bos = names["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A $B", special_tokens=[(bos, vocabulary[bos])]
        )
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **names
    )
    fast.chat_template = file.field("tokenizer.chat_template")
    return fast


def _pre_tokenizer(split: str) -> pre_tokenizers.PreTokenizer:
    """How the named scheme splits text before merging."""
    if split == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    if split == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if split not in SPLITS:
        allowed = ", ".join(sorted([*SPLITS, "gpt-2", "smollm"]))
        raise ModelUnsupported(f"GGUF tokenizer {split!r} is not supported; supported: {allowed}")
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLITS[split]), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _add_special_tokens(tokenizer: Tokenizer, tokens: list[str], kinds: list[int]) -> None:
    added = [
        AddedToken(token, normalized=False, special=kind == CONTROL)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)


def _write_weights(file: GGUFFile, config: dict[str, Any], directory: Path, report: Progress) -> None:
    """The tensors in files of at most SHARD_BYTES (or one tensor), with an index if there are several."""
    tensors = file.tensors
    groups = _groups([int(tensor.n_elements) * 4 for tensor in tensors], SHARD_BYTES)
    weight_map: dict[str, str] = {}
    done = 0
    for number, group in enumerate(groups, start=1):
        name = "model.safetensors" if len(groups) == 1 else f"model-{number:05}-of-{len(groups):05}.safetensors"
        shard: dict[str, Tensor] = {}
        for index in group:
            stored, weights = _read_tensor(tensors[index], config)
            shard[stored] = weights
            weight_map[stored] = name
            done += 1
            report("converting weights", done, len(tensors))
        save_file(shard, directory / name, metadata={"format": "pt"})
    if len(groups) > 1:
        total = sum(int(tensor.n_elements) * 4 for tensor in tensors)
        index_json = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(directory / "model.safetensors.index.json", index_json)


def _groups(sizes: list[int], limit: int) -> list[list[int]]:
    """Indices of `sizes` in order, grouped so that no group of several exceeds `limit`."""
    groups: list[list[int]] = []
    filled = limit + 1
    for index, size in enumerate(sizes):
        if filled + size > limit:
            groups.append([])
            filled = 0
        groups[-1].append(index)
        filled += size
    return groups


def _read_tensor(tensor: Any, config: dict[str, Any]) -> tuple[str, Tensor]:
    """One tensor's name in the model directory and its float32 values."""
    from gguf import dequantize

    match = _matched(tensor.name)
    weights = np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
    reordered = ARCHITECTURES[config["model_type"]][1]
    if reordered and match["part"] in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if match["part"] == "attn_q" else "num_key_value_heads"]
        weights = _halves_from_pairs(weights, heads)
    return stored_name(tensor.name), torch.from_numpy(np.array(weights, copy=True))


def stored_name(name: str) -> str:
    """`blk.3.ffn_up.weight` -> `model.layers.3.mlp.up_proj.weight`; ModelUnsupported for a name that is not known."""
    match = _matched(name)
    layer = f"model.layers.{match['layer']}." if match["layer"] else ""
    return f"{layer}{NAMES[match['part']]}.{match['kind']}"


def _matched(name: str) -> re.Match[str]:
    match = TENSOR_NAME.fullmatch(name)
    if match is None or match["part"] not in NAMES:
        raise ModelUnsupported(f"GGUF tensor {name!r} belongs to no supported model")
    return match


def _halves_from_pairs(weights: Any, heads: int) -> Any:
    """Rows of rotated pairs (0, 1), (2, 3), ... per head, into the order (0, n/2), (1, n/2 + 1), ..."""
    shape = weights.shape
    paired = weights.reshape(heads, shape[0] // heads // 2, 2, *shape[1:])
    return paired.swapaxes(1, 2).reshape(shape)


def _short_float(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747e-06 is 1e-05."""
    return float(str(np.float32(value)))


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
