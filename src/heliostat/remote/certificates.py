"""The certificates of one cluster: its authority, the key of its members, the certificate of its clients.

Only `tls.make` imports this module, because it needs `cryptography`."""

from __future__ import annotations

from datetime import datetime
from ipaddress import ip_address

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

Key = ec.EllipticCurvePrivateKey
# The keys are deleted with the cluster, so no date limits them: the clocks of the hosts may differ.
NOT_BEFORE, NOT_AFTER = datetime(2000, 1, 1), datetime(9999, 12, 31, 23, 59, 59)
CLIENT_ADDRESSES = ("127.0.0.1", "127.0.0.2", "::1")
USAGES = (
    "digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement",
    "key_cert_sign", "crl_sign", "encipher_only", "decipher_only",
)  # fmt: skip


def make(cluster_id: str) -> tuple[bytes, bytes, bytes, bytes]:
    """(the authority's certificate, its key, the members' key, the clients' certificate), as PEM."""
    key, member_key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    name = _name(f"heliostat {cluster_id}")
    authority = _builder(name, name, key, is_authority=True).sign(key, SHA256())
    both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
    addresses = [x509.IPAddress(ip_address(ip)) for ip in CLIENT_ADDRESSES]
    client = (
        _builder(name, _name("client"), member_key, is_authority=False)
        .add_extension(x509.ExtendedKeyUsage(both), critical=False)
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost"), *addresses]), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key()), critical=False)
        .sign(key, SHA256())
    )
    return (
        authority.public_bytes(Encoding.PEM),
        _pem(key),
        _pem(member_key),
        client.public_bytes(Encoding.PEM),
    )


def _builder(issuer: x509.Name, subject: x509.Name, key: Key, is_authority: bool) -> x509.CertificateBuilder:
    """The common part of both kinds of certificates."""
    used = "key_cert_sign" if is_authority else "digital_signature"
    usage = x509.KeyUsage(**{kind: kind == used for kind in USAGES})
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(NOT_BEFORE)
        .not_valid_after(NOT_AFTER)
        .add_extension(x509.BasicConstraints(is_authority, 0 if is_authority else None), critical=True)
        .add_extension(usage, critical=True)
        .add_extension(identifier, critical=False)
    )


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(key: Key) -> bytes:
    return key.private_bytes(Encoding.PEM, PrivateFormat.TraditionalOpenSSL, NoEncryption())
