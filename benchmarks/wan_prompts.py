"""What the jobs of `benchmarks.wan` ask: chats whose answers are long, many of them, all different."""

from __future__ import annotations

from tasks.generation import GenerationRequest

_TOPICS = (
    "a lighthouse keeper",
    "the history of bread",
    "how rivers form",
    "a robot that learns to paint",
    "the planets of the solar system",
    "growing tomatoes on a balcony",
    "a journey by train through the mountains",
    "the rules of chess",
)
_TASKS = (
    "Write a story about {}.",
    "Explain {} to a child, step by step.",
    "List ten facts about {}.",
    "Write a letter to a friend about {}.",
)

#: bytes of a system prompt that is about 300 tokens long for the tiny model, whose tokens are bytes
_SYSTEM = (
    "You are the assistant of a small public library in a harbour town. You answer briefly, politely and in plain "
    "words. You name a book where one fits, never invent one, and say so when you do not know. You do not talk about "
    "politics or about other visitors. Opening hours: Monday to Friday 9 to 18, Sat 10-14."
)


def chats(num: int, max_tokens: int) -> list[GenerationRequest]:
    """`num` greedy jobs with answers of up to `max_tokens` tokens. The first ones are the same for any `num`."""
    texts = [task.format(topic) for task in _TASKS for topic in _TOPICS]
    return [_chat(texts[n % len(texts)] + _repeat(n // len(texts)), max_tokens) for n in range(num)]


def _repeat(number: int) -> str:
    return f" Version {number + 1}." if number else ""


def _chat(text: str, max_tokens: int) -> GenerationRequest:
    return GenerationRequest(None, ({"role": "user", "content": text},), 0, max_tokens, temperature=0.0)


def equal_jobs(num: int, max_tokens: int) -> list[GenerationRequest]:
    """`num` jobs of exactly `max_tokens` tokens each, after prompts of equal length that begin differently."""
    return [
        GenerationRequest(f"{n:05}"[::-1] + " is this job", None, 0, max_tokens, temperature=0.0, ignore_eos=True)
        for n in range(num)
    ]


def with_system_prompt(num: int, max_tokens: int) -> list[GenerationRequest]:
    """`num` jobs behind one system prompt."""
    system = {"role": "system", "content": _SYSTEM}
    return [
        GenerationRequest(
            None,
            (system, {"role": "user", "content": f"Q{n}?"}),
            0,
            max_tokens,
            temperature=0.0,
            ignore_eos=True,
        )
        for n in range(num)
    ]
