"""A provider that lies, breaks or is down signs no one in; the page gives the reason, and tokens still work."""

import base64
import hmac
import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import httpx
import pytest
from joserfc import jwt
from joserfc.jwk import KeySet, RSAKey

from fedssl.client import Tls
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.dashboard.provider_login import ATTEMPT_COOKIE
from fedssl_coordinator.identity.openid import provider as openid
from support.certificates import Authority
from support.coordinator import Coordinator
from support.openid import CLIENT_ID, Liar, query_of, settings_for
from support.pages import Browser
from support.servers import Servers
from support.tables import Tables

_CALLBACK = "/sign-in/oidc/callback"


@dataclass
class LyingSetup:
    """A coordinator and its provider. `sign_in` takes false claims."""

    coordinator: Coordinator
    liar: Liar
    tables: Tables

    def sign_in(self, **claims: Any) -> httpx.Response:
        """Sign in with a new browser. Return the last answer, or the first one if the sign-in cannot begin."""
        with Browser(self.coordinator, None) as browser:
            begun = browser.http.get("/sign-in/oidc")
            if begun.status_code != 303:
                return begun
            query = query_of(begun.headers["location"])
            self.liar.expect(query["nonce"], **claims)
            return browser.http.get(_CALLBACK, params={"code": "any", "state": query["state"]})


@pytest.fixture(scope="module")
def _provider_setup(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LyingSetup]:
    store = tmp_path_factory.mktemp("liar") / "store"
    with (
        Liar() as liar,
        servers.database() as url,
        Coordinator(url, servers.redis_url, store, **settings_for(liar.issuer)) as coordinator,
        Tables(url) as tables,
    ):
        yield LyingSetup(coordinator, liar, tables)


@pytest.fixture
def provider_setup(_provider_setup: LyingSetup) -> LyingSetup:
    """Return the coordinator and its provider, which is honest and which the coordinator has not contacted yet."""
    _provider_setup.liar.behave()
    openid.provider.cache_clear()
    return _provider_setup


def assert_sign_in_refused(provider_setup: LyingSetup, answer: httpx.Response, reason: str, status: int = 401) -> None:
    """Check that no one was signed in, and that the page gives the reason and still takes tokens."""
    alert = re.search(r'role="alert">([^<]*)<', answer.text)
    assert alert, answer.text
    assert reason in unescape(alert[1])
    assert answer.status_code == status
    assert sessions.COOKIE not in answer.headers.get("set-cookie", "")
    assert (
        provider_setup.tables.one(
            "SELECT count(*) FROM tokens WHERE subject LIKE %s", f"{provider_setup.liar.issuer} %"
        )
        == 0
    )
    with Browser(provider_setup.coordinator, provider_setup.coordinator.operator_token) as browser:
        assert browser.get("/runs/none").status_code == 404  # without a session, this redirects to the sign-in


@pytest.fixture
def signed_in(provider_setup: LyingSetup) -> Callable[[httpx.Response], None]:
    """Return a function that checks that a person was signed in, and deletes the session."""

    def check(answer: httpx.Response) -> None:
        assert (answer.status_code, answer.headers.get("location")) == (303, "/runs"), answer.text
        assert (
            provider_setup.tables.execute("DELETE FROM tokens WHERE subject LIKE %s", f"{provider_setup.liar.issuer} %")
            == 1
        )

    return check


def test_an_honest_provider_signs_people_in(
    provider_setup: LyingSetup, signed_in: Callable[[httpx.Response], None]
) -> None:
    signed_in(provider_setup.sign_in())
    now = int(time.time())
    signed_in(provider_setup.sign_in(exp=now - 30, iat=now + 30))  # clocks may differ
    signed_in(provider_setup.sign_in(aud=[CLIENT_ID, "other"], azp=CLIENT_ID))
    signed_in(provider_setup.sign_in(at_hash=None))


@pytest.mark.parametrize(
    ("claims", "reason"),
    [
        ({"iss": "https://evil.example"}, "iss"),
        ({"iss": None}, "iss"),
        ({"aud": "another client"}, "aud"),
        ({"aud": ["another client"]}, "aud"),
        ({"aud": None}, "aud"),
        ({"aud": [CLIENT_ID, "other"]}, "azp"),
        ({"azp": "another client"}, "azp"),
        ({"nonce": "of another sign-in"}, "nonce"),
        ({"nonce": None}, "nonce"),
        ({"exp": 1}, "expired"),
        ({"exp": None}, "exp"),
        ({"exp": "tomorrow"}, "exp"),
        ({"iat": 1 << 40}, "in the future"),
        ({"iat": None}, "iat"),
        ({"nbf": 1 << 40}, "not yet valid"),
        ({"at_hash": "AAAAAAAAAAAAAAAAAAAAAA"}, "at_hash"),
        ({"at_hash": 7}, "at_hash"),
        ({"sub": None}, "sub"),
        ({"sub": ""}, "sub"),
        ({"sub": 7}, "sub"),
        ({"sub": "\0"}, "sub"),
        ({"sub": "x" * 256}, "sub"),
    ],
)
def test_wrong_and_missing_claims_are_refused(provider_setup: LyingSetup, claims: dict[str, Any], reason: str) -> None:
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(**claims), reason)


_SIGNATURES: dict[str, Callable[[Liar], Callable[[dict[str, Any]], str]]] = {
    "alg none": lambda liar: (
        lambda claims: jwt.encode({"alg": "none", "kid": "one"}, claims, liar.key, algorithms=["none"])
    ),
    "HS256 with the public key": lambda liar: lambda claims: _with_hmac(claims, liar.key.as_pem(private=False)),
    "another key of the same name": lambda liar: (
        lambda claims: liar.signed(claims, RSAKey.generate_key(2048, {"kid": "one"}))
    ),
    "an unknown key": lambda liar: lambda claims: liar.signed(claims, RSAKey.generate_key(2048), "two"),
    "a key in the header": lambda liar: _with_own_key,
    "a changed claim": lambda liar: lambda claims: _with_other_claims(liar.signed(claims), liar),
    "no token at all": lambda liar: lambda claims: "nonsense",
    "too long": lambda liar: lambda claims: liar.signed(claims | {"more": "x" * 70_000}),
}


def _with_hmac(claims: dict[str, Any], secret: bytes) -> str:
    """Return a token signed by HMAC, even if the secret is a public key, which joserfc refuses."""
    parts = [json.dumps(part).encode() for part in ({"alg": "HS256", "kid": "one"}, claims)]
    signed = b".".join(base64.urlsafe_b64encode(part).rstrip(b"=") for part in parts)
    mac = base64.urlsafe_b64encode(hmac.digest(secret, signed, "sha256")).rstrip(b"=")
    return f"{signed.decode()}.{mac.decode()}"


def _with_own_key(claims: dict[str, Any]) -> str:
    key = RSAKey.generate_key(2048)
    return jwt.encode({"alg": "RS256", "jwk": key.as_dict(private=False)}, claims, key)


def _with_other_claims(token: str, liar: Liar) -> str:
    head, _, signature = token.split(".")
    return ".".join((head, liar.signed({**liar.claims, "groups": ["chiefs"]}).split(".")[1], signature))


@pytest.mark.parametrize("signature", _SIGNATURES)
@pytest.mark.filterwarnings("ignore::joserfc.errors.SecurityWarning")
def test_invalid_signatures_are_refused(provider_setup: LyingSetup, signature: str) -> None:
    provider_setup.liar.sign = _SIGNATURES[signature](provider_setup.liar)
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(), "is not valid")


def test_a_new_key_is_fetched_but_not_for_every_request_with_an_unknown_one(
    provider_setup: LyingSetup, signed_in: Callable[[httpx.Response], None]
) -> None:
    signed_in(provider_setup.sign_in())
    new = RSAKey.generate_key(2048, {"kid": "two", "use": "sig"})
    provider_setup.liar.keys = KeySet([provider_setup.liar.key, new]).as_dict(private=False)
    provider_setup.liar.sign = lambda claims: provider_setup.liar.signed(claims, new, "two")
    assert_sign_in_refused(
        provider_setup, provider_setup.sign_in(), "No key for kid"
    )  # the keys were fetched a moment ago
    assert provider_setup.liar.requests.count("/keys") == 1
    found = openid.provider()
    assert found is not None
    found._fetched_at -= openid._REFETCH_SECONDS
    signed_in(provider_setup.sign_in())
    provider_setup.liar.sign = lambda claims: provider_setup.liar.signed(claims, new, "three")
    for _ in range(3):
        assert_sign_in_refused(provider_setup, provider_setup.sign_in(), "No key for kid")
    assert provider_setup.liar.requests.count("/keys") == 2


def test_unknown_kinds_of_keys_are_ignored(
    provider_setup: LyingSetup, signed_in: Callable[[httpx.Response], None]
) -> None:
    others: list[Any] = [{"kty": "EC", "crv": "brainpoolP256r1", "x": "aa", "y": "bb", "kid": "other"}, {"kty": "X"}, 7]
    provider_setup.liar.keys["keys"] = [*others, *provider_setup.liar.keys["keys"]]
    signed_in(provider_setup.sign_in())


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"issuer": "https://evil.example"}, "the issuer in its document is https://evil.example"),
        ({"token_endpoint": "http://evil.example/token"}, "token_endpoint is not an https address"),
        ({"authorization_endpoint": "javascript:alert(1)"}, "authorization_endpoint is not an https address"),
        ({"end_session_endpoint": "data:text/html,x"}, "end_session_endpoint is not an https address"),
        ({"jwks_uri": None}, "without a discovery document"),
    ],
)
def test_discovery_documents_with_untrustworthy_addresses_are_refused(
    provider_setup: LyingSetup, change: dict[str, Any], reason: str
) -> None:
    provider_setup.liar.document.update(change)
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(), reason, 503)


@pytest.mark.parametrize(
    ("path", "status", "body", "reason", "expected"),
    [
        ("/.well-known/openid-configuration", 302, b"", "answered 302 without JSON", 503),
        ("/.well-known/openid-configuration", 200, b"[" * 100_000, "without JSON", 503),
        ("/.well-known/openid-configuration", 200, b"[]", "without a JSON object", 503),
        ("/.well-known/openid-configuration", 200, b"x" * (2 << 20), "sent more than", 503),
        ("/keys", 200, b'{"keys": []}', "without usable keys", 503),
        ("/keys", 200, b'{"keys": 7}', "without usable keys", 503),
        ("/keys", 200, b'{"keys": [{"kty": "RSA"}]}', "without usable keys", 503),
        ("/keys", 500, b"{}", "without usable keys", 503),
        ("/token", 400, b'{"error": "invalid_grant"}', "refused the code (invalid_grant)", 401),
        ("/token", 401, b'{"error": "invalid_client"}', "does not accept FEDSSL_OIDC_CLIENT_ID", 503),
        ("/token", 500, b"{}", "answered 500", 503),
        ("/token", 302, b"{}", "refused the code (302)", 401),
        ("/token", 200, b"{}", "sent no ID token", 401),
        ("/token", 200, b'{"id_token": ["x"]}', "sent no ID token", 401),
    ],
)
def test_unusable_answers_of_the_provider_are_refused_with_the_reason(
    provider_setup: LyingSetup, path: str, status: int, body: bytes, reason: str, expected: int
) -> None:
    provider_setup.liar.answers[path] = (status, body)
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(), reason, expected)


def test_groups_are_also_read_from_the_user_information(
    provider_setup: LyingSetup, signed_in: Callable[[httpx.Response], None]
) -> None:
    provider_setup.liar.userinfo = {"sub": "1", "groups": ["readers"], "iss": "https://evil.example"}
    signed_in(provider_setup.sign_in(groups=None))
    provider_setup.liar.userinfo = {"sub": "2", "groups": ["chiefs"]}
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(groups=None), "about another person")
    provider_setup.liar.answers["/userinfo"] = (403, b"{}")
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(groups=None), "answered 403", 503)


@pytest.mark.parametrize("groups", ["cooks", ["cooks", 7, None, {"chiefs": 1}], {"chiefs": "ml-team"}, 7, "\0"])
def test_a_person_whose_claims_give_no_role_is_refused(provider_setup: LyingSetup, groups: object) -> None:
    provider_setup.liar.userinfo = {"sub": "1"}
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(groups=groups), "you have no role here", 403)


def test_the_highest_role_counts(provider_setup: LyingSetup) -> None:
    with Browser(provider_setup.coordinator, None) as browser:
        query = query_of(browser.http.get("/sign-in/oidc").headers["location"])
        label = "<script>\0" + "x" * 200
        provider_setup.liar.expect(query["nonce"], groups=["readers", "chiefs"], preferred_username=label)
        assert browser.http.get(_CALLBACK, params={"code": "any", "state": query["state"]}).status_code == 303
        page = browser.get("/runs").text
        assert "Signed in as <b>&lt;script&gt;\\x00xxx" in page
        assert "</b>, admin." in page
        # This provider offers no sign-out. The session here still ends.
        assert browser.send("/sign-out").headers["location"] == "/sign-in"
        assert browser.get("/runs").status_code == 303
    provider_setup.tables.execute("DELETE FROM tokens WHERE subject LIKE %s", f"{provider_setup.liar.issuer} %")


def test_the_answer_of_another_provider_is_refused(provider_setup: LyingSetup) -> None:
    with Browser(provider_setup.coordinator, None) as browser:
        query = query_of(browser.http.get("/sign-in/oidc").headers["location"])
        provider_setup.liar.expect(query["nonce"])
        lie = {"code": "any", "state": query["state"], "iss": "https://evil.example"}
        assert_sign_in_refused(
            provider_setup, browser.http.get(_CALLBACK, params=lie), "does not come from this provider"
        )
    provider_setup.liar.document["authorization_response_iss_parameter_supported"] = True
    openid.provider.cache_clear()
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(), "does not come from this provider")
    assert "/token" not in provider_setup.liar.requests, "no code goes to a provider that it may not be from"


@pytest.mark.parametrize("state", [None, "", "x", "\u00e4"])
def test_an_answer_with_a_wrong_or_missing_state_is_refused(provider_setup: LyingSetup, state: str | None) -> None:
    with Browser(provider_setup.coordinator, None) as browser:
        query = query_of(browser.http.get("/sign-in/oidc").headers["location"])
        provider_setup.liar.expect(query["nonce"])
        answer = {"code": "any"} | ({} if state is None else {"state": state})
        assert_sign_in_refused(provider_setup, browser.http.get(_CALLBACK, params=answer), "did not begin this sign-in")
    assert "/token" not in provider_setup.liar.requests


@pytest.mark.parametrize(
    "content",
    [
        b"\xff",
        b"null",
        b"[1, 2]",
        b"[{}, []]",
        b'[{"state": ""}, "/"]',
        b'[{"state": 7}, "/"]',
        b'[{"state": "s", "verifier": "\\ud800"}, "/"]',
        b'[{"state": "s", "more": "x"}, "/"]',
        b"[" * 2000,
    ],
)
def test_a_forged_cookie_is_refused(provider_setup: LyingSetup, content: bytes) -> None:
    cookie = base64.urlsafe_b64encode(content).decode()
    with Browser(provider_setup.coordinator, None) as browser:
        for made_up in (cookie, cookie + "x", "\u00e4"):
            header = f"{ATTEMPT_COOKIE}={made_up}".encode()
            answer = browser.http.get(_CALLBACK, params={"code": "any", "state": "s"}, headers={b"Cookie": header})
            assert_sign_in_refused(provider_setup, answer, "did not begin this sign-in")
    assert "/token" not in provider_setup.liar.requests


def test_a_provider_that_is_down_is_reported_at_once_and_retried_later(
    provider_setup: LyingSetup, signed_in: Callable[[httpx.Response], None]
) -> None:
    with Liar() as gone:
        issuer = gone.issuer
    found = openid.provider()
    assert found is not None
    found.issuer, honest = issuer, found.issuer
    began = time.monotonic()
    answers = [provider_setup.sign_in() for _ in range(3)]
    assert time.monotonic() - began < 5
    assert_sign_in_refused(provider_setup, answers[0], "did not answer", 503)
    assert_sign_in_refused(provider_setup, answers[2], "did not answer a moment ago", 503)
    found.issuer = honest
    found._failed_at -= openid._FAILED_SECONDS
    signed_in(provider_setup.sign_in())


def test_a_provider_that_answers_byte_by_byte_is_cut_off(
    provider_setup: LyingSetup, monkeypatch: pytest.MonkeyPatch
) -> None:
    from fedssl_coordinator.identity.openid import exchange

    monkeypatch.setattr(exchange, "_SECONDS", 1.0)
    openid.provider.cache_clear()

    def drip(request: Any) -> None:
        request.send_response(200)
        request.end_headers()
        for _ in range(100):
            request.wfile.write(b" ")
            time.sleep(0.1)

    monkeypatch.setattr(provider_setup.liar, "answer", drip)
    began = time.monotonic()
    assert_sign_in_refused(provider_setup, provider_setup.sign_in(), "did not answer", 503)
    assert time.monotonic() - began < 8


def test_with_tls_the_authority_is_checked_and_cookies_are_secure(
    provider_setup: LyingSetup, servers: Servers, tmp_path: Path, change_settings: Callable[..., None]
) -> None:
    ours, foreign = Authority(tmp_path), Authority(tmp_path, "foreign")
    api = ours.sign("api", "127.0.0.1")
    tls, listening = Tls(ca_file=ours.file), {"certificate": api.certificate, "key": api.key}
    with (
        Liar(ours.sign("provider", "127.0.0.1")) as liar,
        Coordinator(
            provider_setup.coordinator.database_url, servers.redis_url, tmp_path / "store", tls=tls,
            listening=listening, **settings_for(liar.issuer, FEDSSL_OIDC_CA_FILE=str(ours.file)),
        ) as coordinator,
    ):  # fmt: skip
        with Browser(coordinator, None) as browser:
            begun = browser.http.get("/sign-in/oidc")
            query = query_of(begun.headers["location"])
            assert query["redirect_uri"] == f"{coordinator.url}{_CALLBACK}"
            assert "; Secure" in begun.headers["set-cookie"]
            liar.expect(query["nonce"])
            answer = browser.http.get(_CALLBACK, params={"code": "any", "state": query["state"]})
            assert answer.status_code == 303
            started = [line for line in answer.headers.get_list("set-cookie") if "Max-Age=0" not in line]
            assert len(started) == 2
            assert all("; Secure" in line for line in started)
        provider_setup.tables.execute("DELETE FROM tokens WHERE subject IS NOT NULL")
        for file, reason in ((foreign.file, "CERTIFICATE_VERIFY_FAILED"), (tmp_path / "none", "cannot be used (")):
            change_settings(OIDC_CA_FILE=str(file))
            openid.provider.cache_clear()
            with Browser(coordinator, None) as browser:
                answer = browser.http.get("/sign-in/oidc")
                assert answer.status_code == 503
                assert reason in answer.text


@pytest.mark.parametrize(("name", "value"), [("ALL_PROXY", "socks5://127.0.0.1:1080"), ("NO_PROXY", "[::1]")])
def test_unusable_proxies_in_the_environment_are_named(
    provider_setup: LyingSetup, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    with Browser(provider_setup.coordinator, None) as browser:
        for each in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "NO_PROXY"):
            monkeypatch.delenv(each, raising=False)
            monkeypatch.delenv(each.lower(), raising=False)
        monkeypatch.setenv(name, value)
        openid.provider.cache_clear()
        answer = browser.get("/sign-in/oidc")
        assert answer.status_code == 503
        assert "check HTTP_PROXY, HTTPS_PROXY, ALL_PROXY and NO_PROXY" in answer.text


def test_without_a_provider_no_sign_in_is_offered(
    provider_setup: LyingSetup, change_settings: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("ISSUER", "CLIENT_ID", "CLIENT_SECRET", "ROLES"):
        monkeypatch.delenv(f"FEDSSL_OIDC_{name}")
    change_settings()
    openid.provider.cache_clear()
    with Browser(provider_setup.coordinator, None) as browser:
        assert "/sign-in/oidc" not in browser.get("/sign-in").text
        assert browser.get("/sign-in/oidc").status_code == 404
        assert browser.get(_CALLBACK).status_code == 401


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ISSUER": "http://id.example.org"}, "must be an https:// address"),
        ({"ISSUER": "https://id.example.org/?x=1"}, "without a query"),
        ({"CLIENT_ID": ""}, "needs FEDSSL_OIDC_CLIENT_ID"),
        ({"ROLES": "{}"}, "needs FEDSSL_OIDC_ROLES"),
        ({"ROLES": json.dumps({"x": "worker"})}, "oidc_roles"),
        ({"SCOPES": "profile"}, "must contain openid"),
    ],
)
def test_settings_that_cannot_work_are_refused(
    provider_setup: LyingSetup, change_settings: Callable[..., None], change: dict[str, str], message: str
) -> None:
    from fedssl_coordinator.core.settings import settings

    change_settings(**{f"OIDC_{name}": value for name, value in change.items()})
    with pytest.raises(ValueError, match=message):
        settings()
