"""The library's own processors for a request, in the order of `workers.engine.processors`."""

from __future__ import annotations

from collections import Counter

import torch
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from relay.messages import Sampling
from tasks.generation import GenerationRequest
from workers.engine import noise
from workers.engine.sampling import SamplingRows, filtered


def library_processors(request: GenerationRequest, num_prompt: int, ending: list[int]) -> LogitsProcessorList:
    """What `generate` shall do to logits for this request, its sampling apart."""
    found = LogitsProcessorList()
    if request.repetition_penalty != 1.0:
        found.append(RepetitionPenaltyLogitsProcessor(request.repetition_penalty))
    if request.presence_penalty or request.frequency_penalty:
        found.append(OutputPenalties(request.presence_penalty, request.frequency_penalty, num_prompt))
    if request.logit_bias:
        found.append(SequenceBiasLogitsProcessor([[[each.token], each.bias] for each in request.logit_bias]))
    if request.min_tokens and ending:
        found.append(MinNewTokensLengthLogitsProcessor(num_prompt, request.min_tokens, ending))
    return found


class OutputPenalties(LogitsProcessor):
    """Presence and frequency penalties by OpenAI's formula, token by token; the library has none."""

    def __init__(self, presence: float, frequency: float, num_prompt: int) -> None:
        self._presence, self._frequency, self._num_prompt = presence, frequency, num_prompt

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        scores = scores.clone()
        for row, ids in enumerate(input_ids.tolist()):
            for token, count in Counter(ids[self._num_prompt :]).items():
                scores[row, token] -= count * self._frequency + self._presence
        return scores


class SharedNoise(LogitsProcessor):
    """Makes a greedy search sample: filters, and the noise of seed and position on top."""

    def __init__(self, sampling: Sampling) -> None:
        self._rows = SamplingRows.from_rows([sampling])

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        position = torch.tensor([input_ids.shape[1]])
        return filtered(scores, self._rows) + noise.gumbel(self._rows.seed, position, scores.shape[-1])
