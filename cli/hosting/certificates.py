"""Certificates for the two Redis servers: made here, or given."""

from __future__ import annotations

import ipaddress
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from cli.errors import CliError

if TYPE_CHECKING:
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey, EllipticCurvePublicKey


@dataclass(frozen=True, slots=True)
class Certificates:
    """What a server shows and what its clients verify it with, in PEM."""

    certificate: bytes
    key: bytes
    #: None: signed by an authority that every machine knows
    authority: bytes | None


def given(certificate: Path, key: Path, authority: Path | None) -> Certificates:
    """The user's own. Raises CliError for files that cannot be read or do not belong together."""
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
        if authority is not None:
            ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(authority)
        read = authority.read_bytes() if authority is not None else None
        return Certificates(certificate.read_bytes(), key.read_bytes(), read)
    except ssl.SSLError as error:
        raise CliError(f"{certificate} and {key} are no certificate and its key: {error.reason}") from error
    except OSError as error:
        raise CliError(f"cannot read {error.filename or certificate}: {error.strerror}") from error


def make(names: Sequence[str], days: int) -> Certificates:
    """An authority of its own and a server certificate for `names` (host names and addresses), for `days` days.

    The authority's key is thrown away: nobody can ever sign another certificate with it.
    """
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    authority_key, server_key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    # the machines' clocks may differ
    start = datetime.now(UTC) - timedelta(days=1)
    end = start + timedelta(days=days + 1)
    authority = _authority(authority_key.public_key(), start, end).sign(authority_key, hashes.SHA256())
    server = _server(server_key.public_key(), authority, names, start, end).sign(authority_key, hashes.SHA256())
    return Certificates(
        certificate=server.public_bytes(serialization.Encoding.PEM),
        key=_private_pem(server_key),
        authority=authority.public_bytes(serialization.Encoding.PEM),
    )


def _private_pem(key: EllipticCurvePrivateKey) -> bytes:
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _authority(key: EllipticCurvePublicKey, start: datetime, end: datetime) -> x509.CertificateBuilder:
    from cryptography import x509

    name = _name("shardq authority")
    return (
        _begun(name, name, key, start, end)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )


def _server(
    key: EllipticCurvePublicKey, authority: x509.Certificate, names: Sequence[str], start: datetime, end: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509
    from cryptography.x509.oid import ExtendedKeyUsageOID

    issuer_key = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _begun(_name("shardq server"), authority.subject, key, start, end)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(name) for name in names]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(issuer_key),
            critical=False,
        )
    )


def _begun(
    subject: x509.Name, issuer: x509.Name, key: EllipticCurvePublicKey, start: datetime, end: datetime
) -> x509.CertificateBuilder:
    from cryptography import x509

    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(start)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    from cryptography import x509

    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )


def _name(text: str) -> x509.Name:
    from cryptography import x509

    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])


def _alternative(name: str) -> x509.GeneralName:
    from cryptography import x509

    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)
