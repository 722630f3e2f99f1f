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
def place(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignInSetup]:
    with sign_in_setup(servers, tmp_path_factory.mktemp("openid")) as place:
        yield place


@pytest.fixture
def browser(place: SignInSetup) -> Iterator[Browser]:
    with Browser(place.coordinator, None) as browser:
        yield browser


@pytest.fixture
def visit() -> Iterator[ProviderSession]:
    with ProviderSession() as visit:
        yield visit


def begin(browser: Browser, wanted: str = "/clients") -> str:
    """Begin a sign-in, and return the provider's address for it."""
    answer = browser.http.get("/sign-in/oidc", params={"next": wanted})
    assert answer.status_code == 303, answer.text
    return answer.headers["location"]


def sign_in(browser: Browser, visit: ProviderSession, name: str, wanted: str = "/clients") -> httpx.Response:
    """Sign a person in, from the first page to the last."""
    return browser.http.get(visit.sign_in(begin(browser, wanted), name))


def reason(page: httpx.Response) -> str:
    """Return the error on the page."""
    found = re.search(r'role="alert">([^<]*)<', page.text)
    assert found, page.text
    return unescape(found[1])


def test_a_person_signs_in_with_the_role_of_their_groups(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    form = browser.get("/sign-in?next=/clients").text
    assert '<a class="btn pri" href="/sign-in/oidc?next=/clients">' in form
    assert 'name="token"' in form
    answer = sign_in(browser, visit, "ada")
    assert (answer.status_code, answer.headers["location"]) == (303, "/clients")
    page = browser.get("/clients").text
    assert "Signed in as <b>ada</b>, operator." in page
    [token] = [token for token in place.coordinator.client.tokens() if token.label == "ada"]
    assert (token.role, token.client_id, token.subject) == ("operator", None, f"{place.provider.issuer} ada")
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


def test_cookies_are_protected_from_scripts_and_other_sites(browser: Browser, visit: ProviderSession) -> None:
    begun = browser.http.get("/sign-in/oidc")
    answer = browser.http.get(visit.sign_in(begun.headers["location"], "grace"))
    cookies = {line.split("=", 1)[0]: line for line in answer.headers.get_list("set-cookie")}
    assert {"HttpOnly", "SameSite=lax", "Path=/"} <= set(cookies[sessions.COOKIE].split("; "))
    assert {"HttpOnly", "SameSite=strict", "Path=/sign-out"} <= set(cookies[ID_TOKEN_COOKIE].split("; "))
    assert "Max-Age=0" in cookies[ATTEMPT_COOKIE]
    assert {"HttpOnly", "SameSite=lax", "Path=/sign-in/oidc", "Max-Age=600"} <= set(
        begun.headers["set-cookie"].split("; ")
    )


def test_a_viewer_cannot_create_runs_and_a_form_needs_the_secret_of_its_session(
    browser: Browser, visit: ProviderSession
) -> None:
    sign_in(browser, visit, "grace")
    assert browser.send("/runs/new").status_code == 403
    assert browser.http.post("/sign-out").status_code == 403
    assert browser.get("/runs").status_code == 200


def test_a_person_without_a_role_gets_a_page_with_the_reason(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    for name, groups in (("mallory", "cooks"), ("eve", "nothing")):
        answer = sign_in(browser, visit, name)
        assert answer.status_code == 403
        assert f"your claim `groups` contains {groups}" in reason(answer)
        assert "chiefs, ml-team, readers" in reason(answer)
        assert sessions.COOKIE not in answer.headers.get("set-cookie", "")
        assert place.tables.one("SELECT count(*) FROM tokens WHERE label = %s", name) == 0
        visit.http.cookies.clear()


@pytest.mark.parametrize(
    ("name", "wanted"), [("ada", "https://evil.example/"), ("linus", "//evil.example"), ("grace", "/\\evil.example")]
)
def test_the_next_page_is_always_on_this_site(browser: Browser, visit: ProviderSession, name: str, wanted: str) -> None:
    assert sign_in(browser, visit, name, wanted).headers["location"] == "/runs"


def test_an_answer_of_the_provider_can_be_used_only_once(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    begun = browser.http.get("/sign-in/oidc")
    kept = browser.http.cookies[ATTEMPT_COOKIE]
    back = visit.sign_in(begun.headers["location"], "ada")
    assert browser.http.get(back).status_code == 303
    again = browser.http.get(back)
    assert again.status_code == 401
    assert "did not begin this sign-in" in reason(again)
    # Even if a thief has the browser's cookie, the provider accepts a code only once.
    with Browser(place.coordinator, None) as thief:
        answer = thief.http.get(back, headers={"Cookie": f"{ATTEMPT_COOKIE}={kept}"})
    assert answer.status_code == 401
    assert "refused the code (invalid_grant)" in reason(answer)


def test_the_answer_to_another_browser_is_refused(place: SignInSetup, browser: Browser, visit: ProviderSession) -> None:
    back = visit.sign_in(begin(browser), "ada")
    with Browser(place.coordinator, None) as other:
        assert other.http.get(back).status_code == 401
        begin(other)
        assert other.http.get(back).status_code == 401
        assert other.get("/runs").status_code == 303


def test_a_stolen_code_is_useless_in_another_session(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    """Code injection: Mallory has Ada's unused code, and uses it in an answer to a request of her own."""
    code = query_of(visit.sign_in(begin(browser), "ada"))["code"]
    with Browser(place.coordinator, None) as mallory:
        own = query_of(begin(mallory))
        answer = mallory.http.get(_CALLBACK, params={"code": code, "state": own["state"], "iss": place.provider.issuer})
        assert answer.status_code == 401
        assert "refused the code" in reason(answer)
        assert mallory.get("/runs").status_code == 303


def test_a_person_who_refuses_at_the_provider_is_not_signed_in(browser: Browser, visit: ProviderSession) -> None:
    answer = browser.http.get(visit.sign_in(begin(browser), "root", answer="deny"))
    assert answer.status_code == 401
    assert "access_denied" in reason(answer)


def test_signing_out_ends_the_session_here_and_at_the_provider(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    sign_in(browser, visit, "root")
    cookie = browser.http.cookies[sessions.COOKIE]
    answer = browser.send("/sign-out")
    found = re.search(r'http-equiv="refresh" content="0;url=([^"]+)"', answer.text)
    assert found, answer.text
    assert sessions.COOKIE not in browser.http.cookies
    with Browser(place.coordinator, None) as thief:
        assert thief.get("/runs", Cookie=f"{sessions.COOKIE}={cookie}").status_code == 303
    back = visit.http.get(unescape(found[1]))
    assert (back.status_code, back.headers["location"]) == (302, f"{place.coordinator.url}/sign-in")
    assert visit.http.get(begin(browser)).headers["location"].endswith("/login"), "it asks for the password again"


def test_revoking_the_token_of_a_sign_in_ends_the_session(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    sign_in(browser, visit, "root")
    admin = place.coordinator.client
    [token] = [token for token in admin.tokens() if token.label == "root" and token.revoked_at is None]
    assert browser.get("/runs").status_code == 200
    admin.revoke_token(token.id)
    assert browser.get("/runs").status_code == 303


def test_tokens_still_work_when_a_provider_is_configured(
    place: SignInSetup, browser: Browser, visit: ProviderSession
) -> None:
    worker = place.coordinator.worker("hospital")
    sign_in(browser, visit, "grace")
    with worker, Client(place.coordinator.url, place.coordinator.operator_token, retry=Retry(seconds=0)) as client:
        assert [found.id for found in client.clients()] == ["hospital"]
    with Browser(place.coordinator, place.coordinator.operator_token) as operator:
        assert operator.get("/runs").status_code == 200
        assert operator.send("/sign-out").headers["location"] == "/sign-in"
    session_cookie = browser.http.cookies[sessions.COOKIE]
    refused = place.coordinator.http(session_cookie.split(".")[0]).get("/v1/runs")
    assert refused.status_code == 401, "the id of a sign-in is no secret"


def test_every_sign_in_is_an_event(place: SignInSetup, browser: Browser, visit: ProviderSession) -> None:
    sign_in(browser, visit, "ada")
    kind, message, data = place.tables.query(
        "SELECT kind, message, data FROM events WHERE kind LIKE 'person.%%' ORDER BY id DESC LIMIT 1"
    )[0]
    assert (kind, message) == ("person.signed_in", "ada has signed in as operator")
    assert data["subject"] == f"{place.provider.issuer} ada"
