"""Files of requests: what is read, what is refused, and how the refusal reads."""

from __future__ import annotations

import gzip
import io
import json
import tracemalloc
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.errors import ParameterInvalid
from tasks.generation import DEFAULT_MAX_TOKENS, GenerationRequest
from tasks.openai_batch import Defaults, LineError, ParsedJob, parse_line, read_requests

NO_DEFAULTS = Defaults()


def read(data: bytes, defaults: Defaults = NO_DEFAULTS, **options: Any) -> list[ParsedJob | LineError]:
    return list(read_requests(io.BytesIO(data), defaults, **options))


def line(**fields: Any) -> bytes:
    return json.dumps(fields).encode()


def job(data: bytes, defaults: Defaults = NO_DEFAULTS) -> ParsedJob:
    parsed = parse_line(7, data, defaults, seeds=lambda: 4711)
    assert isinstance(parsed, ParsedJob), parsed
    return parsed


def error(data: bytes) -> LineError:
    parsed = parse_line(7, data, NO_DEFAULTS)
    assert isinstance(parsed, LineError), parsed
    assert "\n" not in str(parsed)
    assert len(str(parsed)) < 300
    return parsed


def chat(**body: Any) -> bytes:
    return line(custom_id="a", method="POST", url="/v1/chat/completions", body=body)


HELLO = [{"role": "user", "content": "hello"}]


def test_a_bare_prompt_gets_the_documented_defaults() -> None:
    parsed = job(line(prompt="hello"))

    assert parsed == ParsedJob(
        7,
        "line-7",
        None,
        "/v1/completions",
        GenerationRequest(prompt="hello", messages=None, seed=4711, max_tokens=DEFAULT_MAX_TOKENS),
    )
    assert parsed.request.temperature == 1.0


def test_both_forms_of_a_chat_request_read_alike() -> None:
    short = job(line(custom_id="a", messages=HELLO, max_tokens=9, model="m"))

    assert short == job(chat(messages=HELLO, max_tokens=9, model="m"))
    assert short.url == "/v1/chat/completions"
    assert short.request.messages == ({"role": "user", "content": "hello"},)


def test_the_short_form_calls_the_custom_id_id_as_well() -> None:
    assert job(line(prompt="p", id="x")).custom_id == "x"
    assert job(line(prompt="p", id="x", custom_id="x")).custom_id == "x"
    assert error(line(prompt="p", id="x", custom_id="y")).field == "id"


def test_every_supported_parameter_reaches_the_request() -> None:
    parsed = job(
        line(
            prompt="p",
            max_tokens=3,
            temperature=0,
            top_p=0.5,
            top_k=40,
            min_p=0.1,
            seed=-5,
            stop=["a", "b"],
            ignore_eos=True,
        )
    )

    assert parsed.request == GenerationRequest(
        prompt="p",
        messages=None,
        seed=-5,
        max_tokens=3,
        temperature=0.0,
        top_k=40,
        top_p=0.5,
        min_p=0.1,
        stop=("a", "b"),
        ignore_eos=True,
    )


def test_top_k_is_off_at_minus_one_and_zero() -> None:
    assert job(line(prompt="p", top_k=-1)).request.top_k == 0
    assert job(line(prompt="p", top_k=0)).request.top_k == 0


def test_a_single_stop_string_is_one_stop() -> None:
    assert job(line(prompt="p", stop="END")).request.stop == ("END",)
    assert job(line(prompt="p", stop=[])).request.stop == ()


def test_both_names_of_the_token_limit_mean_the_same() -> None:
    assert job(line(prompt="p", max_completion_tokens=5)).request.max_tokens == 5
    assert job(line(prompt="p", max_completion_tokens=5, max_tokens=5)).request.max_tokens == 5
    assert error(line(prompt="p", max_completion_tokens=5, max_tokens=6)).field == "max_completion_tokens"


def test_null_means_not_given() -> None:
    names = [
        "max_tokens",
        "temperature",
        "stop",
        "seed",
        "n",
        "logprobs",
        "tools",
        "response_format",
        "model",
    ]
    assert job(line(prompt="p", **dict.fromkeys(names))) == job(line(prompt="p"))


def test_a_prompt_may_be_token_ids_or_the_only_one_of_a_list() -> None:
    assert job(line(prompt=[1, 2, 3])).request.prompt == (1, 2, 3)
    assert job(line(prompt=[[1, 2, 3]])).request.prompt == (1, 2, 3)
    assert job(line(prompt=["p"])).request.prompt == "p"


def test_several_prompts_in_a_line_are_refused_by_name() -> None:
    refused = error(line(prompt=["p", "q"]))
    assert (refused.field, refused.message) == (
        "prompt",
        "expected one prompt, got 2: give each its own line",
    )


def test_text_parts_are_joined_and_developer_means_system() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    parsed = job(line(messages=[{"role": "developer", "content": parts}, *HELLO]))

    assert parsed.request.messages is not None
    assert parsed.request.messages[0] == {"role": "system", "content": "ab"}


def test_an_answer_of_openai_can_be_a_message_again() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
    }
    assert job(line(messages=[*HELLO, answer, *HELLO])).request.messages is not None


def test_defaults_fill_what_a_line_leaves_open() -> None:
    defaults = Defaults.of(model="m", temperature=0.5, max_tokens=9, seed=1, top_p=None)

    filled = job(line(prompt="p", max_tokens=3), defaults)
    assert (filled.model, filled.request.temperature, filled.request.max_tokens) == ("m", 0.5, 3)
    assert filled.request.seed == 1
    assert job(line(prompt="p", seed=2, model="n"), defaults).model == "n"
    assert defaults.to_json() == {"model": "m", "temperature": 0.5, "max_tokens": 9, "seed": 1}


def test_defaults_are_checked_as_a_line_is() -> None:
    with pytest.raises(ParameterInvalid, match="temperature: expected a number from 0 to 2, got 3"):
        Defaults.of(temperature=3)


@pytest.mark.parametrize("options", [{"stop": "\udcff"}, {"stop": ["a\udcff"]}, {"model": "\udcff"}])
def test_defaults_are_texts_that_can_be_stored(options: dict[str, Any]) -> None:
    with pytest.raises(ParameterInvalid, match="expected a text"):
        Defaults.of(**options)


def test_a_missing_seed_is_drawn_per_line() -> None:
    jobs = [parsed for parsed in read(b'{"prompt":"p"}\n' * 20) if isinstance(parsed, ParsedJob)]
    seeds = {parsed.request.seed for parsed in jobs}

    assert len(seeds) == 20
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("value", ["10m", "600", 600, 600.0])
def test_both_forms_may_say_when_they_expire(value: object) -> None:
    short = job(line(custom_id="a", messages=HELLO, expires_in=value))
    openai = job(line(custom_id="a", url="/v1/chat/completions", body={"messages": HELLO}, expires_in=value))

    assert short == openai
    assert short.expires_in_s == 600.0
    assert short.new_job("m", 1000.0).expires_at == 1600.0


def test_a_line_that_says_nothing_expires_with_its_batch() -> None:
    assert job(line(prompt="p")).new_job("m", 1000.0).expires_at is None
    assert job(line(prompt="p", expires_in=None)).expires_in_s is None


@pytest.mark.parametrize("value", ["soon", "", "-1", 0, -1, True, "10y", 1e12, [], "1m 5s"])
def test_a_time_that_is_none_is_refused_with_the_forms_of_one(value: object) -> None:
    refused = error(line(prompt="p", expires_in=value))

    assert refused.field == "expires_in"
    assert refused.message.startswith("expected a duration such as 90s, 10m, 2h or 7d")


def test_the_time_to_expire_stands_beside_the_body() -> None:
    refused = error(chat(messages=HELLO, expires_in="10m"))

    assert (refused.field, refused.message) == ("expires_in", "expected beside body")


def test_a_parsed_line_survives_the_database_format() -> None:
    parsed = job(line(custom_id="ä", messages=HELLO, stop=["é"], seed=3))
    stored = parsed.new_job("m", 0.0)

    assert json.loads(stored.request) == json.loads(json.dumps(parsed.request.to_json()))
    assert GenerationRequest.from_json(json.loads(stored.request)) == parsed.request
    assert (stored.line, stored.custom_id, stored.model, stored.url) == (7, "ä", "m", "/v1/chat/completions")


NEUTRAL = {
    "n": 1,
    "best_of": 1,
    "stream": False,
    "presence_penalty": 0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": {},
    "logprobs": False,
    "top_logprobs": 0,
    "echo": False,
    "suffix": "",
    "user": "someone",
    "tools": [],
    "tool_choice": "auto",
    "response_format": {"type": "text"},
    "service_tier": "auto",
    "metadata": {"a": "b"},
    "store": True,
    "min_tokens": 0,
    "skip_special_tokens": True,
}


@pytest.mark.parametrize("name", NEUTRAL)
def test_a_parameter_at_its_neutral_value_changes_nothing(name: str) -> None:
    assert job(chat(messages=HELLO, **{name: NEUTRAL[name]})).request == job(chat(messages=HELLO)).request


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n", True),
        ("best_of", 3),
        ("stream", True),
        ("stream", 0),
        ("stream_options", {"include_usage": True}),
        ("logprobs", 0),
        ("top_logprobs", 2),
        ("echo", True),
        ("suffix", "x"),
        ("user", 5),
        ("tools", [{"type": "function"}]),
        ("tool_choice", "required"),
        ("response_format", {"type": "json_object"}),
        ("service_tier", "flex"),
        ("metadata", "x"),
    ],
)
def test_a_value_that_is_not_supported_is_refused_by_name(name: str, value: object) -> None:
    refused = error(chat(messages=HELLO, **{name: value}))
    assert refused.field == name
    assert refused.message.startswith("expected ")


@pytest.mark.parametrize(
    ("notes", "expected"),
    [
        ('{"a": [1e400]}', "expected an object with numbers up to 1.8e308, got an object"),
        ('{"a": ' + "[" * 101 + "]" * 101 + "}", "expected an object of at most 100 levels, got an object"),
    ],
)
def test_notes_that_cannot_be_written_as_they_were_read_are_refused(notes: str, expected: str) -> None:
    read = parse_line(1, f'{{"prompt": "x", "metadata": {notes}}}'.encode(), Defaults())
    assert read == LineError(1, "metadata", expected)


def test_notes_of_a_hundred_levels_come_back() -> None:
    notes = '{"a": ' + "[" * 99 + "]" * 99 + "}"
    read = parse_line(1, f'{{"prompt": "x", "metadata": {notes}}}'.encode(), Defaults())
    assert isinstance(read, ParsedJob)
    assert read.new_job("tiny", 0).metadata == notes.replace(" ", "")


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", 2.1, "a number from 0 to 2"),
        ("temperature", -0.1, "a number from 0 to 2"),
        ("temperature", "1", "a number from 0 to 2"),
        ("temperature", True, "a number from 0 to 2"),
        ("top_p", -0.1, "a number from 0 to 1"),
        ("top_p", 1.5, "a number from 0 to 1"),
        ("min_p", 2, "a number from 0 to 1"),
        ("top_k", -2, "an integer from 1 to 2147483647, or 0 or -1 for off"),
        ("top_k", 1.5, "an integer from 1 to 2147483647, or 0 or -1 for off"),
        ("max_tokens", 0, "an integer from 1 to 1000000"),
        ("max_tokens", 1.5, "an integer from 1 to 1000000"),
        ("max_tokens", 0.0, "an integer from 1 to 1000000"),
        ("max_tokens", 10**9, "an integer from 1 to 1000000"),
        ("seed", 2**63, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("seed", 2.0**53 + 2, "an integer from -9223372036854775808 to 9223372036854775807"),
        ("seed", "7", "an integer from -9223372036854775808 to 9223372036854775807"),
        ("ignore_eos", 1, "true or false"),
        ("stop", "", "a text or up to 16 texts, each of 1 to 1000 characters"),
        ("stop", ["a"] * 17, "a text or up to 16 texts, each of 1 to 1000 characters"),
        ("stop", ["a", 5], "a text or up to 16 texts, each of 1 to 1000 characters"),
        ("model", "", "a text of 1 to 512 characters without NUL"),
        ("model", 5, "a text of 1 to 512 characters without NUL"),
        ("custom_id", 17, "a text of 1 to 512 characters without NUL"),
        ("custom_id", "x\0", "a text of 1 to 512 characters without NUL"),
    ],
)
def test_a_wrong_value_names_field_and_range(name: str, value: object, expected: str) -> None:
    refused = error(line(prompt="p", **{name: value}))
    assert refused.field == name
    assert refused.message.startswith(f"expected {expected}, got ")


def test_a_message_may_have_a_name_that_templates_may_use() -> None:
    named = job(chat(messages=[{"role": "user", "content": "x", "name": "me"}, {"role": "user", "content": "y"}]))
    assert named.request.messages == (
        {"role": "user", "content": "x", "name": "me"},
        {"role": "user", "content": "y"},
    )
    assert job(chat(messages=[{**HELLO[0], "name": None}])) == job(chat(messages=HELLO))


def test_an_infinite_number_is_out_of_range() -> None:
    assert error(b'{"prompt": "p", "temperature": 1e999}').field == "temperature"


@pytest.mark.parametrize(
    ("data", "field", "message"),
    [
        (b"hello", None, "expected a JSON object: expecting value at character 1"),
        (b'{"prompt": "p"', None, "expected a JSON object: expecting ',' delimiter at character 15"),
        (b'["p"]', None, "expected a JSON object, got a list"),
        (b'"p"', None, 'expected a JSON object, got "p"'),
        (b"{}", "prompt", "expected prompt or messages, got neither"),
        (b'{"prompt": null}', "prompt", "expected prompt or messages, got neither"),
        (b'{"prompt": ""}', "prompt", 'expected a text or a list of token ids, not empty, got ""'),
        (b'{"prompt": 5}', "prompt", "expected a text or a list of token ids, not empty, got 5"),
        (
            b'{"prompt": [1, -1]}',
            "prompt",
            "expected a text or a list of token ids, not empty, got a list of",
        ),
        (b'{"prompt": "p", "messages": []}', "prompt", "expected prompt or messages, not both"),
        (b'{"prompt": "p", "temprature": 1}', "temprature", "unknown parameter; did you mean temperature?"),
        (b'{"prompt": "p", "xyzzy": 1}', "xyzzy", "unknown parameter"),
        (b'{"prompt": "p", "prompt": "q"}', "prompt", "expected each key once in an object"),
        (b'{"prompt": "p", "min_p": NaN}', None, "expected a JSON object: NaN is no JSON"),
        (b'{"prompt": "p", "min_p": -Infinity}', None, "expected a JSON object: -Infinity is no JSON"),
        (b'{"prompt": "\xff"}', None, "expected UTF-8, byte 0xff at position 13 is not"),
        (b'{"prompt": "\\ud800"}', None, "expected text, an escape is half of a surrogate pair"),
        (b'{"prompt": ' + b"9" * 5000 + b"}", None, "expected a JSON object: a number has too many digits"),
        (b"[" * 100_000, None, "expected a JSON object: nested too deeply"),
        (b'{"body": {"prompt": "p"}, "method": "GET"}', "method", 'expected "POST", got "GET"'),
        (b'{"body": {"prompt": "p"}, "url": "/v1/embeddings"}', "url", "expected /v1/chat/completions or "),
        (b'{"url": "/v1/completions"}', "body", "expected an object, got null"),
        (b'{"body": {"prompt": "p"}, "temperature": 1}', "temperature", "expected inside body"),
        (b'{"body": {"prompt": "p"}, "xyzzy": 1}', "xyzzy", "unknown field"),
        (b'{"body": {"prompt": "p"}, "url": "/v1/chat/completions"}', "messages", "expected for /v1/chat/c"),
        (
            b'{"body": {"messages": [1]}, "url": "/v1/completions"}',
            "prompt",
            "expected for /v1/completions, got",
        ),
        (b'{"messages": []}', "messages", "expected a list of messages, not empty, got an empty list"),
        (b'{"messages": ["hi"]}', "messages[0]", 'expected an object with role and content, got "hi"'),
    ],
)
def test_a_broken_line_says_what_was_expected(data: bytes, field: str | None, message: str) -> None:
    refused = error(data)
    assert refused.line == 7
    assert refused.field == field
    assert refused.message.startswith(message)


@pytest.mark.parametrize(
    ("message", "field"),
    [
        ({"role": "tool", "content": "x"}, "messages[0].role"),
        ({"role": ["user"], "content": "x"}, "messages[0].role"),
        ({"content": "x"}, "messages[0].role"),
        ({"role": "user"}, "messages[0].content"),
        ({"role": "user", "content": []}, "messages[0].content"),
        ({"role": "user", "content": ["x"]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "messages[0].content[0]"),
        ({"role": "user", "content": [{"type": "text", "text": 5}]}, "messages[0].content[0]"),
        ({"role": "user", "content": "x", "name": ""}, "messages[0].name"),
        ({"role": "user", "content": "x", "name": 5}, "messages[0].name"),
        ({"role": "user", "content": "x", "weight": 1}, "messages[0].weight"),
        ({"role": "assistant", "content": "x", "tool_calls": [{}]}, "messages[0].tool_calls"),
    ],
)
def test_a_broken_message_is_named_by_its_place(message: dict[str, Any], field: str) -> None:
    assert error(line(messages=[message])).field == field


def test_bom_crlf_and_blank_lines_are_no_trouble() -> None:
    parsed = read(b'\xef\xbb\xbf{"prompt":"a"}\r\n\r\n  \n{"prompt":"b"}')

    assert [(item.line, item.custom_id) for item in parsed if isinstance(item, ParsedJob)] == [
        (1, "line-1"),
        (4, "line-4"),
    ]
    assert len(parsed) == 2


@pytest.mark.parametrize("data", [b"", b"\n\r\n  \n", b"\xef\xbb\xbf"])
def test_a_file_without_a_request_is_an_error_of_the_file(data: bytes) -> None:
    assert [str(item) for item in read(data)] == ["the file: holds no request: expected one JSON object a line"]


TWO = '{"prompt":"a"}\n{"prompt":"b"}\n'
PRETTY = '{\n  "custom_id": "a",\n  "prompt": "p"\n}\n'
ANTHROPIC = {"custom_id": "a", "params": {"model": "m", "max_tokens": 5, "messages": HELLO}}
GEMINI = {"key": "a", "request": {"contents": [{"parts": [{"text": "hello"}]}]}}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (gzip.compress(TWO.encode(), mtime=0), "is a gzip archive: unpack it with `gunzip`"),
        (b"PK\x03\x04\x14\x00 anything", "is a zip archive"),
        (b"PAR1\x15\x04\n anything", "is a parquet file"),
        (TWO.encode("utf-16"), "is UTF-16LE, expected UTF-8: convert it with `iconv -f UTF-16LE -t UTF-8`"),
        (b"\xfe\xff" + TWO.encode("utf-16-be"), "is UTF-16BE"),
        (TWO.encode("utf-16-le"), "is UTF-16LE"),
        (TWO.encode("utf-16-be"), "is UTF-16BE"),
        (TWO.encode("utf-32"), "is UTF-32, "),
        (TWO.encode("utf-32-le"), "is UTF-32LE"),
        (TWO.encode("utf-32-be"), "is UTF-32BE"),
        (json.dumps([{"prompt": "a"}, {"prompt": "b"}]).encode(), "is one JSON list"),
        (json.dumps([{"prompt": "a"}], indent=2).encode(), "is one JSON list"),
        (b'\xef\xbb\xbf[{"prompt": "a"},\n{"prompt": "b"}]', "is one JSON list"),
        (PRETTY.encode() * 2, "has one object over several lines"),
        (b'{"messages": [\n {"role": "user", "content": "x"}]}\n', "has one object over several lines"),
        (b"id,prompt\n1,hello\n2,bye\n", "looks like csv"),
        (b"Write a poem.\n\nWrite a song, too.\n", "looks like plain text"),
        ((json.dumps(ANTHROPIC) + "\n").encode() * 2, "holds lines for Anthropic's batches"),
        ((json.dumps(GEMINI) + "\n").encode() * 2, "holds lines for Gemini's batches"),
    ],
)
def test_a_file_of_another_kind_is_named_once_for_what_it_is(data: bytes, message: str) -> None:
    (refused,) = [str(item) for item in read(data)]
    assert refused.startswith(f"the file: {message}")
    assert len(refused) < 200


@pytest.mark.parametrize(
    "odd",
    [b"# a remark", b'["p"]', b'{"prompt": "cut off', b'{"custom_id": "x",', json.dumps(ANTHROPIC).encode()],
)
def test_an_odd_line_before_good_ones_hides_none_of_them(odd: bytes) -> None:
    parsed = read(odd + b"\n" + b'{"prompt":"a"}\n{"prompt":"b"}\n')
    assert [isinstance(item, ParsedJob) for item in parsed] == [False, True, True]


@pytest.mark.parametrize(
    ("url", "endpoint"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/completions", "/v1/completions"),
        ("https://api.openai.com/v1/chat/completions", "/v1/chat/completions"),
        ("http://localhost:8000/v1/completions/", "/v1/completions"),
        ("https://me.openai.azure.com/openai/deployments/d/chat/completions?api-version=1", "/v1/chat/completions"),
    ],
)
def test_an_address_of_an_endpoint_means_that_endpoint(url: str, endpoint: str) -> None:
    body = {"messages": HELLO} if "chat" in endpoint else {"prompt": "p"}
    assert job(line(url=url, body=body)).url == endpoint


@pytest.mark.parametrize("url", ["/v1/embeddings", "/v1/chat", "chat/completions", "https://x/v1/responses", 5, ""])
def test_an_address_of_something_else_is_refused(url: object) -> None:
    assert error(line(url=url, body={"prompt": "p"})).field == "url"


@pytest.mark.parametrize("name", ["text", "params", "request", "contents"])
def test_a_line_without_a_source_names_what_stands_in_its_place(name: str) -> None:
    refused = error(line(temperature=1, **{name: "x"}))
    assert str(refused) == f"line 7: {name}: unknown field: expected prompt or messages"


def test_a_control_character_is_said_to_be_at_one_place() -> None:
    assert error(b'{"prompt": "a\x01"}').message == "expected a JSON object: invalid control character at character 14"


def test_a_repeated_custom_id_names_both_lines() -> None:
    parsed = read(b'{"prompt":"a","id":"x"}\n{"prompt":"b"}\n{"prompt":"c","id":"x"}\n')

    assert str(parsed[2]) == 'line 3: custom_id: expected a name of its own, "x" is that of line 1'


def test_a_given_custom_id_may_not_be_another_lines_generated_one() -> None:
    parsed = read(b'{"prompt":"a","id":"line-2"}\n{"prompt":"b"}\n')
    assert isinstance(parsed[1], LineError)


def test_all_bad_lines_are_reported_and_the_good_ones_between_them_are_read() -> None:
    parsed = read(b'{"prompt":"a"}\nnope\n{"prompt":"b"}\n{"prompt":"\xfe"}\n{"prompt":"c"}\n')
    assert [isinstance(item, LineError) for item in parsed] == [False, True, False, True, False]


def test_a_line_over_the_limit_is_skipped_without_being_held() -> None:
    long = b'{"prompt":"' + b"x" * 30_000_000 + b'"}\n'
    stream = io.BytesIO(long + b'{"prompt":"b"}\n')
    tracemalloc.start()
    parsed = list(read_requests(stream, NO_DEFAULTS, max_line_bytes=1000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert str(parsed[0]) == "line 1: expected at most 1000 bytes a line"
    assert isinstance(parsed[1], ParsedJob)
    assert peak < 5_000_000


def test_a_line_at_the_limit_is_read() -> None:
    data = b'{"prompt":"a"}'
    assert isinstance(read(data + b"\n" + data, max_line_bytes=len(data))[0], ParsedJob)
    assert isinstance(read(data + b"\n" + data, max_line_bytes=len(data))[1], ParsedJob)


def test_memory_grows_by_no_more_than_200_bytes_a_line() -> None:
    class Endless(io.RawIOBase):
        """`count` lines made as they are read."""

        def __init__(self, count: int) -> None:
            self.left = count

        def readable(self) -> bool:
            return True

        def readline(self, size: int | None = -1, /) -> bytes:
            self.left -= 1
            return b'{"prompt":"hello","max_tokens":5}\n' if self.left >= 0 else b""

    tracemalloc.start()
    count = sum(1 for _ in read_requests(cast("BinaryIO", Endless(20_000)), NO_DEFAULTS))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert count == 20_000
    assert peak < 20_000 * 200


def test_our_example_file_holds_sixteen_valid_requests() -> None:
    with (Path(__file__).parents[2] / "examples" / "prompts.jsonl").open("rb") as stream:
        parsed = list(read_requests(stream, NO_DEFAULTS))

    assert len(parsed) == 16
    assert all(isinstance(item, ParsedJob) for item in parsed)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_raise(data: bytes) -> None:
    assert all(isinstance(item, ParsedJob | LineError) for item in read(data))


NAMES = st.sampled_from(
    ["prompt", "messages", "custom_id", "id", "body", "url", "method", "model", "stop", "seed", "top_k"]
) | st.sampled_from(["n", "temperature", "logit_bias", "role", "content", "type", "text", "\ud800", "\x00"])
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["POST", "user", "text", "/v1/completions", "/v1/chat/completions", "\ud800", "p"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES | st.text(max_size=3), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=500, deadline=None)
@given(st.dictionaries(NAMES, VALUES, max_size=5))
def test_arbitrary_objects_never_raise_and_messages_can_be_printed(value: dict[str, Any]) -> None:
    for item in read(json.dumps(value).encode()):
        if isinstance(item, LineError):
            assert str(item).encode()
            assert "\n" not in str(item)
        else:
            assert item.new_job("m", 0.0).request.encode()
            assert -(2**63) <= item.request.seed < 2**63
