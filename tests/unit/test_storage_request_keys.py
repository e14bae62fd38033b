"""Digests of requests and profiles."""

from __future__ import annotations

import json

import pytest

from storage.request_keys import profile_key, request_key


def key(model: str = "m", **fields: object) -> str:
    return request_key(model, json.dumps({"prompt": "p", "seed": 1, "temperature": 1.0, **fields}))


def test_a_key_is_a_digest_of_sha256() -> None:
    assert len(key()) == 64
    assert key() == key()


def test_every_field_of_a_sampled_request_matters() -> None:
    variants = [key(), key(model="n"), key(prompt="q"), key(seed=2), key(temperature=0.5), key(stop=["x"])]
    assert len(set(variants)) == len(variants)


@pytest.mark.parametrize("temperature", [0, 0.0, 1e-6])
def test_the_seed_matters_unless_decoding_is_greedy(temperature: float) -> None:
    assert key(temperature=temperature, seed=1) == key(temperature=temperature, seed=2)


def test_a_request_without_temperature_is_sampled() -> None:
    assert request_key("m", '{"seed": 1}') != request_key("m", '{"seed": 2}')


def test_order_and_escapes_do_not_matter() -> None:
    assert request_key("m", '{"a":1,"b":"\\u00e9"}') == request_key("m", '{"b": "é", "a": 1}')
    assert profile_key('{"a":1,"b":2}') == profile_key('{"b":2, "a":1}') != profile_key('{"b":2, "a":2}')


def test_a_lone_surrogate_has_a_key() -> None:
    assert request_key("m", '{"prompt":"\\ud800"}') != request_key("m", '{"prompt":"\\ud801"}')


@pytest.mark.parametrize("text", ["[]", "1", '"x"', "{", ""])
def test_what_is_no_json_object_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        request_key("m", text)
