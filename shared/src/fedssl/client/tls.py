"""Settings for TLS: the trusted authorities, the client's certificate, and whether to do without encryption."""

import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import httpx

from fedssl.client.addresses import is_loopback
from fedssl.client.errors import ClientError, Untrusted

_REFUSED = ("CERTIFICATE_REQUIRED", "UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED", "CERTIFICATE_REVOKED")

MUTUAL_TLS_HINT = (
    "; if it asks for certificates, give one that it accepts with FEDSSL_CLIENT_CERT and FEDSSL_CLIENT_KEY (a "
    "worker's: --client-cert, --client-key)"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Settings for TLS; the files are in PEM format.

    `ca_file` holds the only authorities that are trusted; if it is None, the machine's are. `client_cert` and
    `client_key` identify this client if the coordinator asks for it (mutual TLS); the key may be in the certificate's
    file. `insecure_http` is whether a token may be sent unencrypted to another machine.
    """

    ca_file: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None
    insecure_http: bool = False

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> Self:
        """Read FEDSSL_CA_FILE, FEDSSL_CLIENT_CERT, FEDSSL_CLIENT_KEY and FEDSSL_INSECURE_HTTP (1, true or yes)."""

        def path(name: str) -> Path | None:
            return Path(environment[name]) if environment.get(name) else None

        return cls(
            ca_file=path("FEDSSL_CA_FILE"),
            client_cert=path("FEDSSL_CLIENT_CERT"),
            client_key=path("FEDSSL_CLIENT_KEY"),
            insecure_http=environment.get("FEDSSL_INSECURE_HTTP", "").lower() in ("1", "true", "yes"),
        )

    def context(self, url: httpx.URL) -> ssl.SSLContext | bool:
        """Return what httpx verifies with, or False if the connection is not encrypted. Raises ClientError."""
        if url.scheme != "https":
            return False
        try:
            context = httpx.create_ssl_context() if self.ca_file is None else _trusting(self.ca_file)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            if self.client_cert is not None:
                context.load_cert_chain(self.client_cert, self.client_key)
        except (OSError, ssl.SSLError) as error:
            files = ", ".join(str(file) for file in (self.ca_file, self.client_cert, self.client_key) if file)
            reason = error.strerror or str(error)
            raise ClientError(f"certificates cannot be used ({reason}): check {files or 'SSL_CERT_FILE'}") from None
        if self.client_key is not None and self.client_cert is None:
            raise ClientError("a client key needs its certificate: give both")
        return context

    def check_token_may_go(self, url: httpx.URL) -> None:
        """Raise ClientError if a token would go to another machine unencrypted."""
        if url.scheme == "https" or self.insecure_http or is_loopback(url.host):
            return
        raise ClientError(
            f"{url.host} is another machine, and over http the token would be readable on the way: use https:// (with "
            "FEDSSL_CA_FILE if the authority is your own), or, in a private network, allow it with "
            "FEDSSL_INSECURE_HTTP=1 (a worker's: --insecure-http)"
        )


DEFAULT_TLS = Tls()


def trust_error(error: BaseException, url: str) -> Untrusted | None:
    """Return an Untrusted if one side rejected the other's certificate, or None if the error has another cause."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ssl.SSLError):
        cause = cause.__cause__ or cause.__context__
    if isinstance(cause, ssl.SSLCertVerificationError):
        return Untrusted(
            f"{url} shows a certificate that is not trusted ({cause.verify_message}): name the authority that made it "
            "in FEDSSL_CA_FILE (a worker's: --ca-file), and use the name that the certificate is for"
        )
    if cause is not None and any(reason in str(cause.reason) for reason in _REFUSED):
        return Untrusted(f"{url} refuses this connection ({cause.reason}){MUTUAL_TLS_HINT}")
    return None


def _trusting(ca_file: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=ca_file)
