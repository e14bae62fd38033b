"""Weights in 4 or 8 bits, through bitsandbytes, one tensor at a time.

Only the linear layers of the decoder blocks are quantised; embeddings, norms and LM head stay as they are, which is
what transformers does by default. The layers are those that transformers' `from_pretrained` puts there, and hold the
same bits:

- `nf4`: 4-bit normal floats with a float32 scale per block of 64 weights (Dettmers and others 2023, arXiv 2305.14314),
  without quantising the scales again, multiplied in the compute dtype;
- `int8`: LLM.int8() (arXiv 2208.07339) with a scale per output row of the weights and per token of the activations.
  Its outlier threshold is 0, not the library's 6: above 0, which columns are multiplied in 16 bits depends on all
  tokens of a forward, so a job's text would depend on its batch mates.
"""

from __future__ import annotations

import logging
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor, nn

from workers.errors import ModelUnsupported

Quantization = Literal["none", "nf4", "int8"]

#: weights that share a scale in nf4
BLOCK_SIZE = 64
#: activations of LLM.int8() from this magnitude on are multiplied in 16 bits; 0: none
OUTLIER_THRESHOLD = 0.0


def replace_linears(base: nn.Module, quantization: Quantization, dtype: torch.dtype) -> None:
    """Put quantised layers, still without memory, in the place of all linear ones of a base model on meta."""
    if quantization == "none":
        return
    linear4bit = _library(quantization).nn.Linear4bit
    # it says at every layer of every forward that activations are cast on their way to 8 bits
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)
    integrations: Any = import_module("transformers.integrations")
    config = library_config(quantization, dtype)
    integrations.replace_with_bnb_linear(base, modules_to_not_convert=[], quantization_config=config)
    layers: list[Any] = [module for module in base.modules() if isinstance(module, linear4bit)]
    for layer in layers:
        # Where a CPU multiplies bfloat16 itself, the library packs the weights anew at their first use. That wants rows
        # in multiples of 32, rounds scales to bfloat16, and computes in it whatever the dtype is.
        layer.support_avx512bf16_for_cpu = False


def library_config(quantization: Quantization, dtype: torch.dtype) -> Any:
    """What `AutoModelForCausalLM.from_pretrained` is told for an uncut model with the same weights."""
    transformers: Any = import_module("transformers")
    if quantization == "nf4":
        return transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=dtype,
            bnb_4bit_use_double_quant=False,
        )
    return transformers.BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=OUTLIER_THRESHOLD)


def is_quantised(parameter: nn.Parameter) -> bool:
    """Whether this place wants quantised values."""
    return _kind(parameter) in ("Params4bit", "Int8Params")


def quantised(place: nn.Parameter, weight: Tensor, device: torch.device) -> nn.Parameter:
    """The parameter for a place of `replace_linears`, from the whole weight [out, in] in the compute dtype."""
    layers = _library(_kind(place)).nn
    attributes = dict(place.__dict__)
    if _kind(place) == "Params4bit":
        parameter: nn.Parameter = layers.Params4bit(weight, requires_grad=False, **attributes)
    else:
        attributes.pop("SCB", None)
        parameter = layers.Int8Params(weight.to("cpu"), requires_grad=False, **attributes)
    return parameter.to(device)  # type: ignore[return-value]  # this quantises


def stored_bytes(module: nn.Module) -> int:
    """Bytes of a module's parameters, the scales and tables of quantised ones included."""
    return sum(_bytes_of(each) for each in module.modules())


def _bytes_of(module: nn.Module) -> int:
    """Of the module's own parameters, without its children's."""
    own = sum(parameter.nbytes for parameter in module.parameters(recurse=False))
    weight = module._parameters.get("weight")
    if weight is None or not is_quantised(weight):
        return own
    if _kind(weight) == "Params4bit":
        state = vars(weight)["quant_state"]
        return own + int(state.absmax.nbytes) + int(state.code.nbytes)
    return own + 4 * int(weight.shape[0])  # a float32 scale per row, with the parameter or, once it ran, the module


def _kind(parameter: nn.Parameter) -> str:
    """The parameter's class, by name: nobody needs bitsandbytes to ask."""
    return type(parameter).__name__


def _library(what: str) -> Any:
    try:
        return import_module("bitsandbytes")
    except ImportError as error:
        raise ModelUnsupported(f"{what} weights need bitsandbytes: pip install 'shardq[gpu]' ({error})") from error
