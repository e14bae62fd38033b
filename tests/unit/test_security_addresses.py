"""Which servers are talked to, how their certificates are verified, and what of an address may be shown."""

from __future__ import annotations

import ssl
import traceback
from pathlib import Path

import pytest

from relay.errors import RelayRefused, RelayUrlInvalid
from relay.guard import check_url, redact
from relay.streams import RedisRelay
from relay.tls import address_of, distrusts
from tasks.app import make_app
from tasks.connection import connect
from tasks.errors import QueueRefused
from tasks.publish import Publisher
from tasks.settings import TaskSettings
from workers.settings import HeadSettings

ELSEWHERE = "redis://198.51.100.7:6379/0"


@pytest.fixture
def authority(tmp_path: Path) -> Path:
    path = tmp_path / "ca.crt"
    path.write_text("a certificate")
    return path


@pytest.mark.parametrize(
    "url",
    [
        "redis://this-machine",
        "redis://localhost.",
        "redis://localhost.localdomain",
        "redis://ip6-localhost",
        "redis://127.1",
        "redis://0",
        "redis://0.0.0.0",
        "redis://[::]",
        "redis://[::ffff:10.0.0.5]",
        "redis://[fe80::1]",
        "redis://[2001:db8::1]:6379",
        "rediss://10.0.0.5",
        "redis://user@10.0.0.5",
        "redis://user:@10.0.0.5",
    ],
)
def test_without_a_password_only_what_can_but_be_this_machine_is_used(url: str) -> None:
    with pytest.raises(RelayRefused, match="without a password"):
        check_url(url)


@pytest.mark.parametrize("url", ["redis://LOCALHOST", "redis://[::1]", "redis://127.0.0.53", "redis:///0", "unix:///r"])
def test_this_machine_needs_no_password(url: str) -> None:
    check_url(url)


@pytest.mark.parametrize(
    "query", ["host=evil.example.org", "port=1", "password=x", "username=x", "credential_provider=os.system", "db=1"]
)
def test_an_address_cannot_be_changed_behind_its_question_mark(query: str) -> None:
    with pytest.raises(RelayUrlInvalid, match=query.partition("=")[0]):
        check_url(f"redis:///0?{query}")


def test_every_way_to_a_server_refuses_an_open_one_elsewhere() -> None:
    settings = TaskSettings(broker_url=ELSEWHERE)
    for way in (connect, make_app, Publisher):
        with pytest.raises(QueueRefused, match="SHARDQ_BROKER_URL"):
            way(settings)
    with pytest.raises(RelayRefused, match="SHARDQ_RELAY_URL"):
        RedisRelay(ELSEWHERE)


def test_celery_started_by_hand_refuses_an_open_server_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    import tasks.app

    monkeypatch.setenv("SHARDQ_BROKER_URL", ELSEWHERE)
    monkeypatch.delitem(vars(tasks.app), "app", raising=False)
    with pytest.raises(QueueRefused):
        _ = tasks.app.app


def test_a_certificate_is_verified_for_its_host_by_default() -> None:
    address = address_of("rediss://a:b@host:1/0")
    assert address.verifies
    assert address.tls == {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_check_hostname": True}


@pytest.mark.parametrize("query", ["ssl_cert_reqs=none", "ssl_check_hostname=false"])
def test_verification_is_only_switched_off_in_so_many_words(query: str) -> None:
    assert not address_of(f"rediss://a:b@host:1/0?{query}").verifies


@pytest.mark.parametrize("query", ["ssl_cert_reqs=optional", "ssl_cert_reqs=no", "ssl_check_hostname=perhaps"])
def test_a_half_way_of_verifying_is_refused(query: str) -> None:
    with pytest.raises(RelayUrlInvalid, match="must be one of"):
        address_of(f"rediss://a:b@host:1/0?{query}")


def test_a_private_authority_comes_from_the_setting_or_the_address(authority: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.crt"
    other.write_text("another")
    assert address_of("rediss://:p@h/0", authority).tls["ssl_ca_certs"] == str(authority)
    assert address_of(f"rediss://:p@h/0?ssl_ca_certs={other}", authority).tls["ssl_ca_certs"] == str(other)


def test_a_missing_authority_is_named_before_anything_is_sent() -> None:
    with pytest.raises(RelayUrlInvalid, match=r"SHARDQ_TLS_CA: /nowhere/ca\.crt"):
        address_of("rediss://:p@h/0", Path("/nowhere/ca.crt"))
    with pytest.raises(RelayUrlInvalid, match=r"SHARDQ_BROKER_URL: /nowhere/ca\.crt"):
        address_of("rediss://:p@h/0?ssl_ca_certs=/nowhere/ca.crt", setting="SHARDQ_BROKER_URL")


def test_an_authority_that_cannot_be_read_is_not_taken_for_the_servers_fault(
    authority: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: Path, mode: str = "r") -> None:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(RelayUrlInvalid, match=r"SHARDQ_TLS_CA: .*ca\.crt \(ssl_ca_certs\) cannot be read: Permission"):
        address_of("rediss://:p@h/0", authority)


@pytest.mark.parametrize("path", ["/x", "/0/1", "/-1", "/0x1", "//0"])
def test_a_database_that_is_no_number_is_not_taken_for_0(path: str) -> None:
    with pytest.raises(RelayUrlInvalid, match="the database at its end must be a number"):
        check_url(f"redis://127.0.0.1:6379{path}")


def test_tls_parameters_without_tls_are_refused() -> None:
    with pytest.raises(RelayUrlInvalid, match="rediss://"):
        address_of("redis://:p@h/0?ssl_cert_reqs=required")


def test_celery_and_flower_verify_as_everybody_else(authority: Path) -> None:
    for url in ("rediss://a:p@h:1/0", f"rediss://a:p@h:1/0?ssl_ca_certs={authority}"):
        configuration = make_app(TaskSettings(broker_url=url, tls_ca=authority)).conf
        for option in (configuration.broker_use_ssl, configuration.redis_backend_use_ssl):
            assert option["ssl_cert_reqs"] is ssl.CERT_REQUIRED
            assert option["ssl_check_hostname"] is True
            assert option["ssl_ca_certs"] == str(authority)
    assert not make_app(TaskSettings(broker_url="redis://:p@h:1/0")).conf.broker_use_ssl


def test_kombu_is_given_a_socket_file_by_the_name_it_knows() -> None:
    app = make_app(TaskSettings(broker_url="unix:///run/shardq/redis.sock"))
    assert app.connection_for_write().as_uri() == "redis+socket:///run/shardq/redis.sock"


@pytest.mark.parametrize(
    "password", ["s3cret", "s3cret/x", "s3cret#x", "s3cret?x", "s3cret@x", "x:s3cret", "s3cret%40", "s3cret x"]
)
def test_a_password_never_shows_whatever_is_in_it(password: str) -> None:
    for url in (
        f"redis://user:{password}@host:6379/0",
        f"rediss://:{password}@h",
        f"http://:{password}@h",
        f"unix://:{password}@/x",
    ):
        assert "s3cret" not in redact(url)
    with pytest.raises(RelayUrlInvalid) as refused:
        check_url(f"http://user:{password}@host")
    assert "s3cret" not in str(refused.value)


def test_the_error_about_a_malformed_address_has_no_cause_that_quotes_it() -> None:
    url = "rediss://client:s3cret#@host:6379/0"
    with pytest.raises(RelayUrlInvalid) as refused:
        check_url(url)
    assert "s3cret" not in "".join(traceback.format_exception(refused.value))


def test_settings_do_not_show_addresses_in_reprs_and_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SHARDQ_BROKER_URL", "redis://:s3cret@h")
    monkeypatch.setenv("SHARDQ_RELAY_URL", "redis://:s3cret@h")
    assert "s3cret" not in repr(TaskSettings())
    assert "s3cret" not in repr(HeadSettings(model="m"))
    with pytest.raises(ValueError, match="model") as refused:
        HeadSettings()  # type: ignore[call-arg]
    assert "s3cret" not in str(refused.value) + repr(refused.value)


def test_only_a_certificate_that_is_not_accepted_counts_as_distrust() -> None:
    def raised(cause: Exception) -> Exception:
        try:
            try:
                raise cause
            except OSError:
                # as redis-py does: the cause is only the context
                raise ConnectionError("Error 1 connecting")  # noqa: B904
        except ConnectionError as error:
            return error

    assert distrusts(raised(ssl.SSLCertVerificationError("self-signed")))
    assert not distrusts(raised(ssl.SSLEOFError("reset in the handshake")))
    assert not distrusts(raised(TimeoutError()))
