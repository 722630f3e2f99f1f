"""An OpenID Connect provider: where people sign in, and what it states about them.

The authorisation code flow with PKCE (RFC 7636). The discovery document and the keys are kept for an hour; an ID token
with an unknown key causes them to be fetched again, at most every half minute.
"""

import base64
import hashlib
import secrets
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import quote_plus, urlencode, urlsplit

from joserfc.errors import InvalidKeyIdError, JoseError
from joserfc.jwk import KeySet
from pydantic import BaseModel, ValidationError

from fedssl.client.addresses import is_private
from fedssl_coordinator.core.problems import ProblemError, printable
from fedssl_coordinator.core.settings import Settings, settings
from fedssl_coordinator.identity.openid.exchange import Exchange
from fedssl_coordinator.identity.openid.id_tokens import Expected, InvalidIDToken, checked_claims
from fedssl_coordinator.identity.openid.people import Person, person_of, values_at

_ENDPOINTS = {"authorization_endpoint", "token_endpoint", "jwks_uri", "userinfo_endpoint", "end_session_endpoint"}
_KEPT_SECONDS = 3600.0
_REFETCH_SECONDS = 30.0
_FAILED_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Attempt:
    """One sign-in that a browser has begun, and without which the provider's answer is worthless."""

    state: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    nonce: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    verifier: str = field(default_factory=lambda: secrets.token_urlsafe(48))


class _Metadata(BaseModel):
    """The part of a discovery document that is used (OpenID Connect Discovery 1.0, section 3)."""

    issuer: str
    authorization_endpoint: str
    token_endpoint: str
    jwks_uri: str
    userinfo_endpoint: str | None = None
    end_session_endpoint: str | None = None
    token_endpoint_auth_methods_supported: list[str] = ["client_secret_basic"]
    authorization_response_iss_parameter_supported: bool = False


class Provider:
    """The provider in the settings. Its methods raise ProblemError: `unavailable`, `unauthenticated`, `forbidden`."""

    def __init__(self, config: Settings) -> None:
        assert config.oidc_issuer is not None, "the settings name a provider"
        assert config.oidc_client_id is not None, "the settings are validated"
        self.issuer, self._client_id, self._config = config.oidc_issuer, config.oidc_client_id, config
        self._exchange = Exchange(self.issuer, config.oidc_ca_file)
        self._lock = threading.Lock()
        self._known: tuple[_Metadata, KeySet] | None = None
        self._fetched_at = self._failed_at = -float("inf")

    @property
    def host(self) -> str:
        """The name by which people recognise the provider."""
        return urlsplit(self.issuer).netloc

    def authorization_url(self, attempt: Attempt, redirect_uri: str) -> str:
        """Return where the browser goes to sign in."""
        with self._exchange.place():
            metadata, _ = self._current()
        challenge = hashlib.sha256(attempt.verifier.encode()).digest()
        query = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": redirect_uri,
            "scope": self._config.oidc_scopes,
            "state": attempt.state,
            "nonce": attempt.nonce,
            "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        return _with_query(metadata.authorization_endpoint, query)

    def person(self, answer: dict[str, str], attempt: Attempt, redirect_uri: str) -> tuple[Person, str]:
        """Return the person, and their ID token. `answer`: what the provider added to `redirect_uri`."""
        with self._exchange.place():
            return self._person(answer, attempt, redirect_uri)

    def logout_url(self, id_token: str | None, back: str) -> str | None:
        """Return where the browser goes to sign out at the provider too, or None if that is not offered."""
        with self._exchange.place():
            metadata, _ = self._current()
        if metadata.end_session_endpoint is None:
            return None
        query = {"client_id": self._client_id, "post_logout_redirect_uri": back}
        return _with_query(metadata.end_session_endpoint, query | ({"id_token_hint": id_token} if id_token else {}))

    def _person(self, answer: dict[str, str], attempt: Attempt, redirect_uri: str) -> tuple[Person, str]:
        metadata, _ = self._current()
        issuer = answer.get("iss", None if metadata.authorization_response_iss_parameter_supported else self.issuer)
        if issuer != self.issuer:  # RFC 9207: the answer of another provider
            raise _refused("the answer does not come from this provider")
        if "error" in answer:
            raise _refused(f"{self.host} answered {printable(answer['error'], 100)}")
        tokens = self._redeem(metadata, answer.get("code", ""), attempt, redirect_uri)
        id_token, access_token = tokens.get("id_token"), tokens.get("access_token")
        if not isinstance(id_token, str):
            raise _refused(f"{self.host} sent no ID token")
        access_token = access_token if isinstance(access_token, str) else None
        expected = Expected(
            issuer=self.issuer, client_id=self._client_id, nonce=attempt.nonce, access_token=access_token
        )
        claims = self._claims(id_token, expected)
        if access_token is not None and not values_at(claims, self._config.oidc_roles_claim):
            claims = self._more(metadata, access_token, claims)
        return person_of(claims, self.issuer, self._config.oidc_roles_claim, self._config.oidc_roles), id_token

    def _redeem(self, metadata: _Metadata, code: str, attempt: Attempt, redirect_uri: str) -> dict[str, Any]:
        """Exchange a code for tokens (RFC 6749, section 4.1.3)."""
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "code_verifier": attempt.verifier,
        }
        auth = None
        secret = self._config.oidc_client_secret and self._config.oidc_client_secret.get_secret_value()
        if secret and "client_secret_basic" in metadata.token_endpoint_auth_methods_supported:
            auth = (quote_plus(self._client_id), quote_plus(secret))
        else:
            form |= {"client_id": self._client_id} | ({"client_secret": secret} if secret else {})
        status, answer = self._exchange.json("POST", metadata.token_endpoint, data=form, auth=auth)
        if status == 200:
            return answer
        error = printable(str(answer.get("error", status)), 100)
        if error == "invalid_client":
            raise self._exchange.unusable("it does not accept FEDSSL_OIDC_CLIENT_ID and FEDSSL_OIDC_CLIENT_SECRET")
        if status >= 500:
            raise self._exchange.unusable(f"{metadata.token_endpoint} answered {status}")
        raise _refused(f"{self.host} refused the code ({error})")

    def _claims(self, id_token: str, expected: Expected) -> dict[str, Any]:
        try:
            try:
                return checked_claims(id_token, self._current()[1], expected)
            except InvalidKeyIdError:
                return checked_claims(id_token, self._current(refetch=True)[1], expected)
        except (InvalidIDToken, JoseError, ValueError, TypeError) as error:
            raise _refused(f"the ID token of {self.host} is not valid: {error}") from None

    def _more(self, metadata: _Metadata, access_token: str, claims: dict[str, Any]) -> dict[str, Any]:
        """Return the claims with those that the provider keeps out of ID tokens."""
        if metadata.userinfo_endpoint is None:
            return claims
        headers = {"Authorization": f"Bearer {access_token}"}
        status, more = self._exchange.json("GET", metadata.userinfo_endpoint, headers=headers)
        if status != 200:
            raise self._exchange.unusable(f"{metadata.userinfo_endpoint} answered {status}")
        if more.get("sub") != claims["sub"]:  # section 5.3.2: it may be about someone else
            raise _refused(f"{self.host} answered about another person")
        return more | claims

    def _current(self, *, refetch: bool = False) -> tuple[_Metadata, KeySet]:
        """Return the discovery document and the keys."""
        with self._lock:
            now = time.monotonic()
            kept_seconds = _REFETCH_SECONDS if refetch else _KEPT_SECONDS
            if self._known is not None and now - self._fetched_at < kept_seconds:
                return self._known
            if now - self._failed_at < _FAILED_SECONDS:
                raise self._exchange.unusable("it did not answer a moment ago")
            try:
                self._known = self._fetch()
            except ProblemError:
                self._failed_at = time.monotonic()
                raise
            self._fetched_at = time.monotonic()
            return self._known

    def _fetch(self) -> tuple[_Metadata, KeySet]:
        url = f"{self.issuer.rstrip('/')}/.well-known/openid-configuration"
        status, document = self._exchange.json("GET", url)
        try:
            metadata = _Metadata.model_validate(document)
        except ValidationError:
            raise self._exchange.unusable(f"{url} answered {status} without a discovery document") from None
        if metadata.issuer != self.issuer:
            found = printable(metadata.issuer, 200)
            raise self._exchange.unusable(
                f"FEDSSL_OIDC_ISSUER is {self.issuer}, but the issuer in its document is {found}"
            )
        for name, address in metadata.model_dump(include=_ENDPOINTS, exclude_none=True).items():
            if not is_private(address):
                raise self._exchange.unusable(f"its {name} is not an https address: {printable(address, 200)}")
        status, content = self._exchange.json("GET", metadata.jwks_uri)
        if not (keys := _usable(content.get("keys"))):
            raise self._exchange.unusable(f"{metadata.jwks_uri} answered {status} without usable keys")
        return metadata, keys


@lru_cache
def provider() -> Provider | None:
    """Return the provider in this process's settings, or None if they name none. Raises ProblemError."""
    return Provider(settings()) if settings().oidc_issuer else None


def _usable(keys: object) -> KeySet:
    """Return the keys that this version understands. RFC 7517, section 5: others, as of other curves, are ignored."""
    found = []
    for key in keys if isinstance(keys, list) else ():
        with suppress(JoseError, KeyError, TypeError, ValueError, AttributeError):
            found += KeySet.import_key_set({"keys": [key]}).keys
    return KeySet(found)


def _with_query(url: str, query: dict[str, str]) -> str:
    return f"{url}{'&' if '?' in url else '?'}{urlencode(query)}"


def _refused(reason: str) -> ProblemError:
    return ProblemError("unauthenticated", f"{reason}; begin again, or sign in with a token")
