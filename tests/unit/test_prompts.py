"""From a request to a job: the sampling that travels, and what is refused before it does."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from tokenizers.processors import TemplateProcessing

from relay.fields import MAX_BARRED, MAX_BIASES, MAX_HISTORY
from relay.messages import History, Sampling
from tasks.generation import LONG_CHARACTERS, FailureType, GenerationRequest, TokenBias
from tests.models import EOS_ID, VOCABULARY, byte_tokenizer, smollm2_directory
from tests.pair import tasks_for
from workers.engine.tokenizer import load_tokenizer
from workers.head.jobs import Job
from workers.head.prompts import Encoder, PromptReader, PromptRejected

REQUEST = GenerationRequest((1, 2, 2, 3), None, 7, max_tokens=20)


def read(request: GenerationRequest = REQUEST, *, eos: tuple[int, ...] = (EOS_ID,), context: int = 64) -> Job:
    reader = PromptReader(tokenizer=byte_tokenizer(), eos=eos, vocab_size=VOCABULARY, context=context)
    return reader.read(tasks_for([request])[0])


def test_a_request_that_asks_for_nothing_more_has_no_processors() -> None:
    job = read()
    assert job.sampling == Sampling(1.0, 0, 1.0, 0.0, 7)
    assert (job.sampling.has_processors, job.history, job.likelihoods) == (False, None, None)


@pytest.mark.parametrize(
    ("changes", "barred", "free_from"),
    [
        ({"min_tokens": 5}, (EOS_ID,), 9),
        ({"min_tokens": 5, "stop_token_ids": (9, 3, 9)}, (3, 9, EOS_ID), 9),
        ({"min_tokens": 5, "stop_token_ids": (9,), "ignore_eos": True}, (9,), 9),
        ({"min_tokens": 5, "ignore_eos": True}, (), 0),
        ({"min_tokens": 0, "stop_token_ids": (9,)}, (), 0),
        ({"min_tokens": 10**12}, (EOS_ID,), 64),
    ],
)
def test_what_would_end_a_text_is_barred_while_it_is_shorter_than_its_minimum(
    changes: dict[str, Any], barred: tuple[int, ...], free_from: int
) -> None:
    sampling = read(replace(REQUEST, **changes)).sampling
    assert (sampling.barred, sampling.free_from) == (barred, free_from)


def test_an_end_of_sequence_id_that_the_model_has_no_logit_for_is_not_barred() -> None:
    assert read(replace(REQUEST, min_tokens=5), eos=(EOS_ID, VOCABULARY)).sampling.barred == (EOS_ID,)


def test_a_history_tells_what_the_penalties_count_and_no_more() -> None:
    job = read(replace(REQUEST, repetition_penalty=1.1))
    job.commit((5, 5))
    assert job.history == History((1, 2, 3), (5, 5))
    job = read(replace(REQUEST, frequency_penalty=0.5))
    job.commit((5, 5))
    assert job.history == History((), (5, 5))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"stop_token_ids": (3, VOCABULARY)}, f"stop_token_ids: token id {VOCABULARY} is not in 0..{VOCABULARY - 1}"),
        ({"logit_bias": (TokenBias(70_000, 1.0),)}, f"logit_bias: token id 70000 .* vocabulary of {VOCABULARY}"),
        ({"logit_bias": (TokenBias(-1, 1.0),)}, "logit_bias: token id -1"),
        ({"logit_bias": (TokenBias(1, 1.0),) * (MAX_BIASES + 1)}, "logit_bias: expected at most 1024, got 1025"),
        ({"logprobs": 21}, "logprobs: expected at most 20, got 21"),
    ],
)
def test_what_no_frame_or_vocabulary_has_room_for_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PromptRejected, match=message) as refused:
        read(replace(REQUEST, **changes))
    assert refused.value.failure is FailureType.INVALID_PROMPT


def test_more_stop_tokens_than_may_be_barred_are_refused_with_a_minimum_only() -> None:
    reader = PromptReader(tokenizer=byte_tokenizer(), eos=(), vocab_size=5000, context=64)
    request = replace(REQUEST, stop_token_ids=tuple(range(MAX_BARRED + 1)))
    assert reader.read(tasks_for([request])[0]).sampling.barred == ()
    with pytest.raises(PromptRejected, match="stop_token_ids: expected at most 1024, got 1025"):
        reader.read(tasks_for([replace(request, min_tokens=1)])[0])


def test_a_text_longer_than_a_frame_may_tell_is_refused_with_penalties_only() -> None:
    request = replace(REQUEST, max_tokens=10**6)
    assert read(request, context=10**6).sampling == read().sampling
    with pytest.raises(PromptRejected, match=f"tokens that penalties count: expected at most {MAX_HISTORY}"):
        read(replace(request, presence_penalty=0.5), context=10**6)


def refusal(request: GenerationRequest, context: int = 64) -> PromptRejected:
    with pytest.raises(PromptRejected) as refused:
        read(request, context=context)
    return refused.value


@pytest.mark.parametrize(
    ("prompt", "messages"), [("1" * 5000, None), (None, ({"role": "user", "content": "1" * 5000},))]
)
def test_what_cannot_fit_is_refused_before_it_is_tokenised(
    prompt: str | None, messages: tuple[dict[str, Any], ...] | None
) -> None:
    refused = refusal(replace(REQUEST, prompt=prompt, messages=messages))
    assert refused.failure is FailureType.CONTEXT_LENGTH
    assert re.match(r"the prompt has at least 5\d\d\d tokens, the served context is 64 ", str(refused))


def test_what_may_fit_is_counted_exactly() -> None:
    refused = refusal(replace(REQUEST, prompt="e" * 64))
    assert refused.failure is FailureType.CONTEXT_LENGTH
    assert str(refused).startswith("the prompt has 64 tokens, ")
    assert read(replace(REQUEST, prompt="e" * 63)).num_prompt == 63


@pytest.mark.parametrize("prompt", ["Once upon a time", " <|im_start|> é你😀\n\n", "e\u0301"])
def test_a_prompt_has_the_tokens_that_the_tokenizer_gives_it(prompt: str) -> None:
    tokenizer = load_tokenizer(smollm2_directory())
    reader = PromptReader(tokenizer=tokenizer, eos=(), vocab_size=len(tokenizer), context=64)
    job = reader.read(tasks_for([replace(REQUEST, prompt=prompt)])[0])
    assert job.tokens == tokenizer(prompt)["input_ids"]


def test_a_beginning_of_sequence_is_put_before_a_prompt_and_not_before_a_chat() -> None:
    tokenizer = byte_tokenizer()
    begin = ("<|endoftext|>", 256)
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(f"{begin[0]} $A", special_tokens=[begin])
    reader = PromptReader(tokenizer=tokenizer, eos=(), vocab_size=VOCABULARY, context=64)
    chat = replace(REQUEST, prompt=None, messages=({"role": "user", "content": "a"},))
    prompt, messages = (reader.read(task).tokens for task in tasks_for([replace(REQUEST, prompt="a"), chat]))
    assert prompt == tokenizer("a")["input_ids"] == [256, *byte_tokenizer()("a")["input_ids"]]
    assert messages[0] == byte_tokenizer()("<|im_start|>")["input_ids"][0]


def test_many_threads_read_at_the_same_time() -> None:
    reader = PromptReader(tokenizer=byte_tokenizer(), eos=(), vocab_size=VOCABULARY, context=10**6)
    numbers = (1, 1000, LONG_CHARACTERS) * 2
    tasks = tasks_for([replace(REQUEST, prompt="é" * number) for number in numbers])
    with ThreadPoolExecutor(8) as threads:
        assert [job.num_prompt for job in threads.map(reader.read, tasks)] == [2 * number for number in numbers]


class Paced:
    """A tokenizer that notes how many threads are in it, and ends a long text when it is let."""

    def __init__(self, may_end: threading.Event, begun: threading.Event) -> None:
        self.may_end, self.begun, self.most, self.within = may_end, begun, 0, 0

    def __deepcopy__(self, memo: object) -> Paced:
        return Paced(self.may_end, self.begun)

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        self.within += 1
        self.most = max(self.most, self.within)
        if len(text) >= LONG_CHARACTERS:
            self.begun.set()
            assert self.may_end.wait(30)
        self.within -= 1
        return {"input_ids": [len(text)]}


def test_a_short_text_waits_for_no_long_one_and_no_tokenizer_has_two_threads() -> None:
    may_end, begun = threading.Event(), threading.Event()
    tokenizer = Paced(may_end, begun)
    encoder = Encoder(tokenizer)
    with ThreadPoolExecutor(4) as threads:
        long = [threads.submit(encoder, "x" * (LONG_CHARACTERS + more), add_special_tokens=True) for more in range(2)]
        assert begun.wait(30)
        assert list(threads.map(lambda text: encoder(text, True), ["a", "ab"] * 50)) == [[1], [2]] * 50
        assert not any(future.done() for future in long)
        may_end.set()
        assert [future.result(30) for future in long] == [[LONG_CHARACTERS], [LONG_CHARACTERS + 1]]
    assert tokenizer.most == 1


def test_a_stop_string_that_is_a_special_token_ends_a_text() -> None:
    mark = byte_tokenizer()("<|im_start|>")["input_ids"][0]
    job = read(replace(REQUEST, stop=("\n<|im_start|>",), ignore_eos=True))
    assert job.commit((65, EOS_ID, *byte_tokenizer()("\n")["input_ids"], mark, 66))[0] == 4
    assert job.completion.text == byte_tokenizer().decode([65])


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' + 5 }}", 'the chat template failed: TypeError: can only concatenate str (not "int") to str'),
        ("{{ missing.field }}", "the chat template failed: UndefinedError: 'missing' is undefined"),
        ("{{ 1 / 0 }}", "the chat template failed: ZeroDivisionError: division by zero"),
        ("{% for message in", "the chat template failed: TemplateSyntaxError: "),
        ("{{ messages.append(1) }}", "the chat template failed: SecurityError: "),
        ("{{ range(10 ** 9) }}", "the chat template failed: OverflowError: "),
        ("{{ strftime_now(1) }}", "the chat template failed: TypeError: "),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "the chat template failed: RecursionError: "),
        ("{{ raise_exception('two users\\nin a row') }}", "the chat template refuses the messages: two users in a row"),
    ],
)
def test_whatever_a_chat_template_raises_is_told_as_its_own(template: str, message: str) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = template
    reader = PromptReader(tokenizer=tokenizer, eos=(), vocab_size=VOCABULARY, context=64)
    chat = replace(REQUEST, prompt=None, messages=({"role": "user", "content": "a"},))
    with pytest.raises(PromptRejected) as refused:
        reader.read(tasks_for([chat])[0])
    assert refused.value.failure is FailureType.INVALID_PROMPT
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)
