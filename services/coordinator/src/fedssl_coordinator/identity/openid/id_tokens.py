"""Checks ID tokens as OpenID Connect Core 1.0, section 3.1.3.7, requires."""

import base64
import hashlib
import hmac
from dataclasses import dataclass
from typing import Any

from joserfc import jwt
from joserfc.errors import JoseError
from joserfc.jwk import KeySet

# Only asymmetric signatures. With `none`, or an HMAC whose key is the public key, anyone could make an ID token.
ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512")
SKEW_SECONDS = 60
_MAX_CHARACTERS = 1 << 16


class InvalidIDToken(Exception):
    """An ID token that proves no one's identity. The text gives the reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The values that an ID token must contain. `access_token` is the one that came with it."""

    issuer: str
    client_id: str
    nonce: str
    access_token: str | None


def checked_claims(id_token: str, keys: KeySet, expected: Expected) -> dict[str, Any]:
    """Return the claims of an ID token. Raises joserfc's InvalidKeyIdError for an unknown key, and InvalidIDToken."""
    if len(id_token) > _MAX_CHARACTERS:
        raise InvalidIDToken("it is too long")
    token = jwt.decode(id_token, keys, algorithms=ALGORITHMS)
    registry = jwt.JWTClaimsRegistry(
        leeway=SKEW_SECONDS,
        iss={"essential": True, "value": expected.issuer},
        aud={"essential": True, "value": expected.client_id},
        nonce={"essential": True, "value": expected.nonce},
        sub={"essential": True},
        exp={"essential": True},
        iat={"essential": True},
    )
    try:
        registry.validate(token.claims)
    except JoseError as error:
        raise InvalidIDToken(str(error)) from None
    claims = token.claims
    several = isinstance(claims["aud"], list) and len(claims["aud"]) > 1
    if claims.get("azp", None if several else expected.client_id) != expected.client_id:
        raise InvalidIDToken("it was issued to another client (azp)")
    at_hash = claims.get("at_hash")
    if at_hash is not None and not _is_half_hash(at_hash, expected.access_token, str(token.header["alg"])):
        raise InvalidIDToken("it belongs to another access token (at_hash)")
    return claims


def _is_half_hash(found: object, access_token: str | None, algorithm: str) -> bool:
    digest = hashlib.new(f"sha{algorithm[2:]}", (access_token or "").encode()).digest()
    wanted = base64.urlsafe_b64encode(digest[: len(digest) // 2]).rstrip(b"=")
    return isinstance(found, str) and hmac.compare_digest(wanted, found.encode())
