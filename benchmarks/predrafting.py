"""What drafting while a verdict is on its way could gain: `python -m benchmarks.predrafting`.

While a single prompt's round crosses the ocean the head is idle, and the drafter could go on behind its own draft,
as if all of it were accepted. That saves the next draft's time in those rounds whose draft was accepted whole (and
whose next token the drafter guessed as well). So of a round's time it saves at most

    share of rounds with a wholly accepted draft  x  share of the time that drafting takes

which is what is measured here, one prompt at a time at 86 ms, drafters from poor to perfect: n-grams, the target's
first layers alone, and the target itself.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from benchmarks.rig import Way, rig
from benchmarks.wan import RTT_MS, say
from benchmarks.wan_prompts import chats
from tests.models import smollm2_directory

#: layers of the target that draft, beside its embeddings, norm and LM head
FEW_LAYERS = 20


def first_layers(model: Path, directory: Path, layers: int) -> Path:
    """A model of the first `layers` layers of `model`, with its tokenizer, in `directory`."""
    config = AutoConfig.from_pretrained(model)
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]
    AutoModelForCausalLM.from_pretrained(model, config=config).save_pretrained(directory)
    for file in model.iterdir():
        if file.suffix == ".json" and not (directory / file.name).exists():
            (directory / file.name).write_bytes(file.read_bytes())
    return directory


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Measure what pre-drafting could gain.")
    parser.add_argument("--tokens", type=int, default=48, help="of each of the two prompts' answers")
    tokens = parser.parse_args().tokens
    torch.set_num_threads(1)
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    print("| drafter | tokens per round | drafting, share of the time | drafts accepted whole | gain at most |")
    print("|---|---|---|---|---|")
    with ExitStack() as stack:
        model = smollm2_directory()
        few = first_layers(model, Path(stack.enter_context(tempfile.TemporaryDirectory())), FEW_LAYERS)
        ready = stack.enter_context(rig(model, slots=1, max_length=256))
        drafters = {"n-grams": None, f"the target's first {FEW_LAYERS} of 30 layers": few, "the target itself": model}
        for name, drafter in drafters.items():
            say(name)
            kind = "model" if drafter else "ngram"
            result = ready.run(chats(2, tokens), Way(slots=1, rtt_ms=RTT_MS, drafter=kind, drafter_model=drafter))
            spent = sum(outcome.metrics.draft_s for outcome in result.outcomes if outcome.metrics)
            share = spent / result.wall_s
            whole = result.traffic.num_whole_drafts / max(1, result.traffic.num_drafted_rows)
            per_round = result.mean("tokens_per_round") or 1.0
            print(f"| {name} | {per_round:.2f} | {share:.1%} | {whole:.1%} | {share * whole:.1%} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
