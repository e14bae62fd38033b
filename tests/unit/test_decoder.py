"""The fused layers against the library's, for every kind of model that they fit; kernels by Triton's interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests import interpreted
from tests.models import tiny_model
from workers.engine.loader import load_tail, load_whole

pytestmark = interpreted.needs_triton

KINDS = [("llama", None), ("qwen2", None), ("qwen2", 6), ("qwen3", None), ("mistral", 6)]
DEVICE = "cuda" if interpreted.HAS_GPU else "cpu"
SIZES = {"slots": 3, "max_length": 64, "max_query": 8}


@pytest.mark.parametrize(("family", "window"), KINDS)
def test_fused_layers_compute_what_the_librarys_do(tmp_path: Path, family: str, window: int | None) -> None:
    from workers.engine.decoder import Decoder, fits

    directory = tiny_model(tmp_path, family, layers=2, window=window)
    library, fused = (load_whole(directory, **SIZES, device=DEVICE) for _ in range(2))
    slots, starts = torch.tensor([2, 0]), torch.tensor([0, 0])
    tokens = torch.randint(0, 256, (2, 12), generator=torch.Generator().manual_seed(1))

    assert fits(fused._base, fused.config)
    with torch.inference_mode():
        decoder = Decoder(fused._base, fused.config, fused._cache)
        for begin, end in ((0, 8), (8, 9), (9, 12)):  # a prompt, a token, a draft; the last over what was rewound
            chunk = tokens[:, begin:end]
            expected = library.forward(chunk, slots, starts)
            rows = (tensor.to(DEVICE) for tensor in (chunk, slots, starts))
            result = decoder.forward(*rows, int(starts.max()) + end - begin)

            torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)
            starts = starts + torch.tensor([end - begin, max(0, end - begin - 1)])


def test_joined_weights_are_held_once(tmp_path: Path) -> None:
    from workers.engine.decoder import Decoder

    half = load_tail(tiny_model(tmp_path, "qwen2", layers=2), 1, **SIZES)
    before = half.num_weight_bytes

    decoder = Decoder(half._base, half.config, half._cache)

    attention = half._base.layers[0].self_attn
    assert half.num_weight_bytes == before
    assert attention.q_proj.weight.data_ptr() == decoder._layers[0].qkv.data_ptr()


@pytest.mark.parametrize("family", ["gemma2", "gemma3_text", "phi3", "granite", "cohere", "cohere2"])
def test_other_models_keep_the_librarys_layers(tmp_path: Path, family: str) -> None:
    from workers.engine.decoder import fits

    model = load_whole(tiny_model(tmp_path, family, layers=2), **SIZES)

    assert not fits(model._base, model.config)
