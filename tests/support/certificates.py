"""The tests' own certificate authority, and its certificates."""

import datetime as dt
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat


@dataclass(frozen=True)
class Pair:
    """A certificate and its key, in PEM."""

    certificate: Path
    key: Path


class Authority:
    """Signs certificates with its own root, whose certificate is `file`."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._folder = folder
        self._key = generate_private_key(SECP256R1())
        self._name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
        builder = _unsigned(self._name, self._key).issuer_name(self._name)
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        root = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        root = root.add_extension(usage, critical=True)
        root = root.add_extension(x509.SubjectKeyIdentifier.from_public_key(self._key.public_key()), critical=False)
        self.file = folder / f"{name}.pem"
        self.file.write_bytes(root.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))

    def sign(self, name: str, *addresses: str, days: int = 1) -> Pair:
        """Return a certificate for these IP addresses and host names, valid until `days` days from now.

        If `days` is 0 or less, the certificate expired yesterday.
        """
        key = generate_private_key(SECP256R1())
        builder = _unsigned(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), key, days)
        names = [_alternative_name(address) for address in addresses]
        if names:
            builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        builder = builder.add_extension(authority, critical=False)
        pair = Pair(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        signed = builder.issuer_name(self._name).sign(self._key, hashes.SHA256())
        pair.certificate.write_bytes(signed.public_bytes(Encoding.PEM))
        pair.key.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return pair


def _alternative_name(address: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(address))
    except ValueError:
        return x509.DNSName(address)


def _unsigned(name: x509.Name, key: EllipticCurvePrivateKey, days: int = 1) -> x509.CertificateBuilder:
    yesterday = dt.datetime.now(dt.UTC) - dt.timedelta(days=1)
    return (
        x509.CertificateBuilder()
        .subject_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(yesterday - dt.timedelta(days=1))
        .not_valid_after(yesterday + dt.timedelta(days=1 + days) if days > 0 else yesterday)
    )
