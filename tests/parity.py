"""What parity is tested on: prompts, sampling settings, and the ways a job may be run."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

from tasks.generation import GenerationRequest, TokenBias

#: rounding differs between shapes by up to 9e-5 of a logit in float32; texts that depend on less than this are no test
MIN_GAP = 1e-3

_CHATS = (
    "Name three fruits and a colour for each.",
    "Write a short poem about the sea.",
    "What is the capital of France? Answer in one sentence.",
    "Explain to a child why the sky is blue.",
    "List the numbers from 1 to 12.",
    "Write a Python function that reverses a string.",
    "Translate to French: good morning, my friend.",
    "How do I boil an egg?",
    "Tell me a joke about computers.",
    "Summarise: the cat sat on the mat, then it slept all day.",
    "What is 12 + 30?",
    "Repeat three times: red, green, blue.",
)
_TEXTS = (
    "Once upon a time, in a small village by the river,",
    "The three most important inventions of the last century are",
    "def fibonacci(n):\n    ",
    "Dear Sir or Madam,\n\nI am writing to",
    "Ingredients: 200 g flour, 100 g sugar, 2 eggs.\n\nMethod:",
    "In 1492, Columbus",
    "Q: What is the largest planet?\nA:",
    "1, 2, 4, 8, 16,",
    "The difference between a frog and a toad is",
    "<html>\n<head>\n<title>",
    "Monday, Tuesday, Wednesday,",
    "It was a dark and stormy night, and",
)


def greedy_requests(max_tokens: int) -> list[GenerationRequest]:
    """24 prompts, half of them chats, decoded greedily."""
    chats = [
        GenerationRequest(None, ({"role": "user", "content": text},), 0, max_tokens, temperature=0.0) for text in _CHATS
    ]
    texts = [GenerationRequest(text, None, 0, max_tokens, temperature=0.0) for text in _TEXTS]
    return [request for pair in zip(chats, texts, strict=True) for request in pair]


def sampled_requests(max_tokens: int, *, first_seed: int = 100) -> list[GenerationRequest]:
    """The same prompts with seeds of their own, under every filter and without."""
    settings: tuple[dict[str, Any], ...] = (
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"temperature": 0.8, "min_p": 0.05, "top_k": 50, "top_p": 0.95},
    )
    # With its own number as seed, the last text hangs on rounding once.
    seeds = [*range(first_seed, first_seed + 23), first_seed + 123]
    return [
        replace(request, seed=seed, **settings[number % len(settings)])
        for number, (seed, request) in enumerate(zip(seeds, greedy_requests(max_tokens), strict=True))
    ]


def processed_requests(max_tokens: int, *, eos: int, common: tuple[int, ...]) -> list[GenerationRequest]:
    """The same prompts, greedy and sampled, under every processor and all of them together.

    `common`: six tokens or more that texts without processors are full of, so that biases and stop tokens matter.
    """
    bias = (TokenBias(common[0], -4.0), TokenBias(common[1], 2.5), TokenBias(eos, 1.5))
    settings: tuple[dict[str, Any], ...] = (
        {"repetition_penalty": 1.3},
        {"presence_penalty": 4.0},
        {"frequency_penalty": 6.0},
        {"logit_bias": bias},
        {"min_tokens": 9, "logit_bias": (TokenBias(eos, 30.0),)},
        {"stop_token_ids": common[2:], "min_tokens": 5},
        {"repetition_penalty": 0.8, "presence_penalty": -0.5, "frequency_penalty": 0.9, "ignore_eos": True},
        {
            "repetition_penalty": 1.15,
            "presence_penalty": 0.6,
            "frequency_penalty": 0.3,
            "logit_bias": bias,
            "min_tokens": 12,
            "stop_token_ids": common[2:],
            "logprobs": 5,
        },
    )
    return [
        replace(request, **({"logprobs": 3} if number % 3 else {}) | settings[number % len(settings)])
        for number, request in enumerate(unprocessed_requests(max_tokens))
    ]


def unprocessed_requests(max_tokens: int) -> list[GenerationRequest]:
    """Eight greedy and eight sampled ones."""
    return [*greedy_requests(max_tokens)[:8], *sampled_requests(max_tokens)[8:16]]


class Way(NamedTuple):
    """One way to run the same jobs."""

    drafter: str
    draft_length: int
    concurrency: int


#: "model", also the hybrid's, is a copy of the target cut short, "self" the target
DRAFTERS = ("none", "ngram", "suffix", "model", "hybrid", "self")
DRAFT_LENGTHS = (0, 1, 4, 8)
CONCURRENCIES = (1, 8)
EVERY_WAY = [Way(*way) for way in product(DRAFTERS, DRAFT_LENGTHS, CONCURRENCIES)]
#: every pair of values of any two of the three occurs
PAIRWISE_WAYS = [
    Way(drafter, length, CONCURRENCIES[(number + index) % 2])
    for number, drafter in enumerate(DRAFTERS)
    for index, length in enumerate(DRAFT_LENGTHS)
]
