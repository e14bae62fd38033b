"""Keys, rights, URLs and settings of the relay."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pydantic
import pytest

from relay import acl, keys
from relay.errors import RelayRefused, RelayUrlInvalid
from relay.guard import check_url, redact
from relay.settings import RelaySettings


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6380/0",
        "redis://127.8.9.1",
        "redis://localhost",
        "redis://[::1]:6379/0",
        "unix:///run/redis.sock",
        "redis://:secret@redis.example.org:6379/0",
        "rediss://tail:secret@203.0.113.7:6379/0",
    ],
)
def test_this_machine_and_servers_with_a_password_are_used(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "redis://redis.example.org",
        "rediss://redis.example.org",
        "redis://10.0.0.5:6379/0",
        "redis://user@10.0.0.5",
        "redis://:@10.0.0.5",
        "redis://0.0.0.0",
        "redis://localhost.example.org",
        "redis://127.0.0.1.example.org",
    ],
)
def test_a_server_elsewhere_without_password_is_refused(url: str) -> None:
    with pytest.raises(RelayRefused, match="without a password"):
        check_url(url)
    check_url(url, allow_insecure=True)


@pytest.mark.parametrize("url", ["", "localhost:6379", "http://localhost", "redis://localhost:port", "redis://[::1"])
def test_what_is_no_redis_url_is_refused_by_the_settings_name(url: str) -> None:
    with pytest.raises(RelayUrlInvalid, match="SHARDQ_BROKER_URL"):
        check_url(url, allow_insecure=True, setting="SHARDQ_BROKER_URL")


def test_a_password_never_shows_in_a_message() -> None:
    assert redact("redis://tail:s3cr%40et@host:1/0") == "redis://tail:***@host:1/0"
    with pytest.raises(RelayUrlInvalid) as refused:
        check_url("http://:s3cret@host")
    assert "s3cret" not in str(refused.value)


def test_a_tail_id_names_its_tail_and_its_process() -> None:
    first, second = keys.new_tail_id("gpu-b"), keys.new_tail_id("gpu-b")
    assert first != second
    assert keys.tail_name(first) == keys.tail_name(second) == "gpu-b"


@pytest.mark.parametrize("name", ["", "a:b", "a*", "a?", "[a]", "a b", "-a", "ä", "a" * 64])
def test_a_tail_name_that_would_break_keys_or_patterns_is_refused(name: str) -> None:
    with pytest.raises(RelayRefused, match="tail name"):
        keys.new_tail_id(name)


def test_a_tails_rights_cover_its_own_keys_only() -> None:
    rules = [rule for rule in acl.for_tail("b") if "~" in rule]

    def allowed(key: str) -> bool:
        return any(fnmatchcase(key, rule.partition("~")[2]) for rule in rules)

    assert allowed(keys.up("b-01234567", 3, 0))
    assert allowed(keys.down("b-01234567", 3, 0))
    assert allowed(keys.hello("b-01234567"))
    assert allowed(keys.presence("b-01234567"))
    assert not allowed(keys.lease("b-01234567"))
    assert not allowed(keys.epoch("b-01234567"))
    assert not allowed(keys.up("b-c-01234567", 3, 0))
    assert not allowed(keys.presence("b-c-01234567"))
    assert not allowed(keys.presence("bb-01234567"))


def test_the_epoch_of_a_key_is_known_for_frame_streams_only() -> None:
    assert keys.epoch_of(keys.up("b-01234567", 12, 3)) == 12
    assert keys.epoch_of(keys.hello("b-01234567")) is None
    assert keys.epoch_of(keys.epoch("b-01234567")) is None


def test_a_bad_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_RELAY_PATIENCE_S", "soon")
    with pytest.raises(pydantic.ValidationError, match="patience_s"):
        RelaySettings()


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_RELAY_URL", "redis://:x@host/0")
    monkeypatch.setenv("SHARDQ_RELAY_TTL_S", "4")
    settings = RelaySettings()
    assert (settings.url, settings.ttl_s) == ("redis://:x@host/0", 4.0)
