"""Kernels without a GPU: to be imported before them."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch

HAS_GPU = torch.cuda.is_available()
if not HAS_GPU:
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when a kernel is defined

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not for this platform")
