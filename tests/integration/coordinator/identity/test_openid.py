"""People sign in at a real OpenID Connect provider, Canaille, which runs as its own process."""

import re
from collections.abc import Iterator
from html import unescape

import httpx
import pytest

from fedssl.client import Client, Retry
from fedssl_coordinator.dashboard import session as sessions
from fedssl_coordinator.dashboard.provider_login import ATTEMPT_COOKIE, ID_TOKEN_COOKIE
from support.openid import ProviderSession, SignInSetup, query_of, sign_in_setup
from support.pages import Browser
from support.servers import Servers

pytestmark = pytest.mark.full


_CALLBACK = "/sign-in/oidc/callback"


@pytest.fixture(scope="module")
def provider_setup(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignInSetup]:
    with sign_in_setup(servers, tmp_path_factory.mktemp("openid")) as provider_setup:
        yield provider_setup


@pytest.fixture
def browser(provider_setup: SignInSetup) -> Iterator[Browser]:
    with Browser(provider_setup.coordinator, None) as browser:
        yield browser


@pytest.fixture
def provider_session() -> Iterator[ProviderSession]:
    with ProviderSession() as provider_session:
        yield provider_session


def begin(browser: Browser, wanted: str = "/clients") -> str:
    """Begin a sign-in, and return the provider's address for it."""
    answer = browser.http.get("/sign-in/oidc", params={"next": wanted})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def sign_in(browser: Browser, provider_session: ProviderSession, name: str, wanted: str = "/clients") -> httpx.Response:
    """Sign a person in, from the first page to the last."""
    return browser.http.get(provider_session.sign_in(begin(browser, wanted), name))


def reason(page: httpx.Response) -> str:
    """Return the error on the page."""
    found = re.search(r'role="alert">([^<]*)<', page.text)
    assert found, page.text
    return unescape(found[1])


def test_a_person_signs_in_with_the_role_of_their_groups(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    form = browser.get("/sign-in?next=/clients").text
    assert '<a class="btn pri" href="/sign-in/oidc?next=/clients">' in form
    assert 'name="token"' in form
    answer = sign_in(browser, provider_session, "ada")
    assert (answer.status_code, answer.headers["location"]) == (303, "/clients")
    page = browser.get("/clients").text
    assert "Signed in as <b>ada</b>, operator." in page
    [token] = [token for token in provider_setup.coordinator.client.tokens() if token.label == "ada"]
    assert (token.role, token.client_id, token.subject) == ("operator", None, f"{provider_setup.provider.issuer} ada")
    assert token.expires_at is not None
    lifetime = (token.expires_at - token.created_at).total_seconds()
    assert abs(lifetime - sessions.LIFETIME_SECONDS) < 5


def test_the_request_to_the_provider_has_pkce_and_no_secret(browser: Browser) -> None:
    query = query_of(begin(browser))
    assert query["code_challenge_method"] == "S256"
    assert len(query["code_challenge"]) == 43
    assert query["response_type"] == "code"
    assert len(query["state"]) == len(query["nonce"]) == 43
    assert query["redirect_uri"] == f"{browser.http.base_url}".rstrip("/") + _CALLBACK
    assert not {"client_secret", "code_verifier"} & set(query)


def test_cookies_are_protected_from_scripts_and_other_sites(
    browser: Browser, provider_session: ProviderSession
) -> None:
    begun = browser.http.get("/sign-in/oidc")
    answer = browser.http.get(provider_session.sign_in(begun.headers["location"], "grace"))
    cookies = {line.split("=", 1)[0]: line for line in answer.headers.get_list("set-cookie")}
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(cookies[sessions.COOKIE].split("; "))
    assert {"HttpOnly", "SameSite=strict", "Path=/sign-out"} <= set(cookies[ID_TOKEN_COOKIE].split("; "))
    assert "Max-Age=0" in cookies[ATTEMPT_COOKIE]
    assert {"HttpOnly", "SameSite=lax", "Path=/sign-in/oidc", "Max-Age=600"} <= set(
        begun.headers["set-cookie"].split("; ")
    )


def test_a_viewer_cannot_create_runs_and_a_form_needs_the_secret_of_its_session(
    browser: Browser, provider_session: ProviderSession
) -> None:
    sign_in(browser, provider_session, "grace")
    assert browser.send("/runs/new").status_code == 403
    assert browser.http.post("/sign-out").status_code == 403
    assert browser.get("/runs").status_code == 200


def test_a_person_without_a_role_gets_a_page_with_the_reason(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    for name, groups in (("mallory", "cooks"), ("eve", "nothing")):
        answer = sign_in(browser, provider_session, name)
        assert answer.status_code == 403
        assert f"your claim `groups` contains {groups}" in reason(answer)
        assert "chiefs, ml-team, readers" in reason(answer)
        assert sessions.COOKIE not in answer.headers.get("set-cookie", "")
        assert provider_setup.tables.one("SELECT count(*) FROM tokens WHERE label = %s", name) == 0
        provider_session.http.cookies.clear()


@pytest.mark.parametrize(
    ("name", "wanted"), [("ada", "https://evil.example/"), ("linus", "//evil.example"), ("grace", "/\\evil.example")]
)
def test_the_next_page_is_always_on_this_site(
    browser: Browser, provider_session: ProviderSession, name: str, wanted: str
) -> None:
    assert sign_in(browser, provider_session, name, wanted).headers["location"] == "/runs"


def test_an_answer_of_the_provider_can_be_used_only_once(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    begun = browser.http.get("/sign-in/oidc")
    kept = browser.http.cookies[ATTEMPT_COOKIE]
    back = provider_session.sign_in(begun.headers["location"], "ada")
    assert browser.http.get(back).status_code == 303
    again = browser.http.get(back)
    assert again.status_code == 401
    assert "did not begin this sign-in" in reason(again)
    # Even if a thief has the browser's cookie, the provider accepts a code only once.
    with Browser(provider_setup.coordinator, None) as thief:
        answer = thief.http.get(back, headers={"Cookie": f"{ATTEMPT_COOKIE}={kept}"})
    assert answer.status_code == 401
    assert "refused the code (invalid_grant)" in reason(answer)


def test_the_answer_to_another_browser_is_refused(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    back = provider_session.sign_in(begin(browser), "ada")
    with Browser(provider_setup.coordinator, None) as other:
        assert other.http.get(back).status_code == 401
        begin(other)
        assert other.http.get(back).status_code == 401
        assert other.get("/runs").status_code == 303


def test_a_stolen_code_is_useless_in_another_session(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    """Code injection: Mallory has Ada's unused code, and uses it in an answer to a request of her own."""
    code = query_of(provider_session.sign_in(begin(browser), "ada"))["code"]
    with Browser(provider_setup.coordinator, None) as mallory:
        own = query_of(begin(mallory))
        answer = mallory.http.get(
            _CALLBACK, params={"code": code, "state": own["state"], "iss": provider_setup.provider.issuer}
        )
        assert answer.status_code == 401
        assert "refused the code" in reason(answer)
        assert mallory.get("/runs").status_code == 303


def test_a_person_who_refuses_at_the_provider_is_not_signed_in(
    browser: Browser, provider_session: ProviderSession
) -> None:
    answer = browser.http.get(provider_session.sign_in(begin(browser), "root", answer="deny"))
    assert answer.status_code == 401
    assert "access_denied" in reason(answer)


def test_signing_out_ends_the_session_here_and_at_the_provider(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    sign_in(browser, provider_session, "root")
    cookie = browser.http.cookies[sessions.COOKIE]
    answer = browser.send("/sign-out")
    found = re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', answer.text)
    assert found, answer.text
    assert sessions.COOKIE not in browser.http.cookies
    with Browser(provider_setup.coordinator, None) as thief:
        assert thief.get("/runs", Cookie=f"{sessions.COOKIE}={cookie}").status_code == 303
    back = provider_session.http.get(unescape(found[1]))
    assert (back.status_code, back.headers["location"]) == (302, f"{provider_setup.coordinator.url}/sign-in")
    assert provider_session.http.get(begin(browser)).headers["location"].endswith("/login"), (
        "it asks for the password again"
    )


def test_revoking_the_token_of_a_sign_in_ends_the_session(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    sign_in(browser, provider_session, "root")
    admin = provider_setup.coordinator.client
    [token] = [token for token in admin.tokens() if token.label == "root" and token.revoked_at is None]
    assert browser.get("/runs").status_code == 200
    admin.revoke_token(token.id)
    assert browser.get("/runs").status_code == 303


def test_tokens_still_work_when_a_provider_is_configured(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    worker = provider_setup.coordinator.worker("hospital")
    sign_in(browser, provider_session, "grace")
    with (
        worker,
        Client(
            provider_setup.coordinator.url, provider_setup.coordinator.operator_token, retry=Retry(seconds=0)
        ) as client,
    ):
        assert [found.id for found in client.clients()] == ["hospital"]
    with Browser(provider_setup.coordinator, provider_setup.coordinator.operator_token) as operator:
        assert operator.get("/runs").status_code == 200
        assert operator.send("/sign-out").headers["location"] == "/sign-in"
    session_cookie = browser.http.cookies[sessions.COOKIE]
    refused = provider_setup.coordinator.http(session_cookie.split(".")[0]).get("/v1/runs")
    assert refused.status_code == 401, "the id of a sign-in is no secret"


def test_every_sign_in_is_an_event(
    provider_setup: SignInSetup, browser: Browser, provider_session: ProviderSession
) -> None:
    sign_in(browser, provider_session, "ada")
    kind, message, data = provider_setup.tables.query(
        "SELECT kind, message, data FROM events WHERE kind LIKE 'person.%%' ORDER BY id DESC LIMIT 1"
    )[0]
    assert (kind, message) == ("person.signed_in", "ada has signed in as operator")
    assert data["subject"] == f"{provider_setup.provider.issuer} ada"
