"""Sessions: how they are created, what their cookie contains, and when they end."""

import re
import time
from html import unescape

import pytest

from fedssl_coordinator.dashboard import session as sessions
from support.coordinator import Coordinator
from support.pages import Browser


@pytest.fixture
def nobody(shared_coordinator: Coordinator) -> Browser:
    return Browser(shared_coordinator, None)


def test_pages_redirect_to_the_sign_in_without_a_session(nobody: Browser) -> None:
    answer = nobody.get("/clients/a")
    assert (answer.status_code, answer.headers["location"]) == (303, "/sign-in?next=/clients/a")
    assert nobody.get("/runs", **{"HX-Request": "true"}).headers["hx-redirect"] == "/sign-in?next=/runs"


@pytest.mark.parametrize(
    ("path", "page", "back"),
    [
        ("/compare?runs=a,b&x=time", None, "/compare?runs=a,b&x=time"),
        ("/runs/7/live?shape=x", "http://host:8000/runs/7", "/runs/7"),
        ("/runs?q=a%26b", "http://host:8000/runs?group=active&q=a%26b", "/runs?group=active&q=a%26b"),
        ("/runs/7/live", "http://[", "/runs"),
        ("/runs/7/live", "https://evil.example//other.example/x", "/runs"),
    ],
)
def test_signing_in_returns_to_the_page_that_was_requested(
    shared_coordinator: Coordinator, nobody: Browser, path: str, page: str | None, back: str
) -> None:
    """It returns to the whole page with its query, not to a part that a script requested."""
    asked = {"HX-Request": "true", "HX-Current-URL": page} if page else {}
    answer = nobody.get(path, **asked)
    where = answer.headers["hx-redirect" if page else "location"]
    form = nobody.get(where)
    [wanted] = re.findall(r'name="next" value="([^"]*)"', form.text)
    signed = nobody.http.post("/sign-in", data={"token": shared_coordinator.operator_token, "next": unescape(wanted)})
    assert signed.headers["location"] == back


def test_the_cookie_is_http_only_and_does_not_contain_the_token(
    shared_coordinator: Coordinator, nobody: Browser
) -> None:
    answer = nobody.http.post("/sign-in", data={"token": f" {shared_coordinator.operator_token}\n", "next": "/clients"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/clients")
    cookie = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/"} <= {part.strip() for part in cookie.split(";")}
    assert shared_coordinator.operator_token not in cookie
    assert "secure" not in cookie.lower()
    assert shared_coordinator.operator_token not in nobody.get("/runs").text


@pytest.mark.parametrize("path", ["//evil.example", "https://evil.example/", "/\\evil.example", "evil", "/a\nb", "//["])
def test_signing_in_does_not_redirect_to_another_site(
    shared_coordinator: Coordinator, nobody: Browser, path: str
) -> None:
    assert 'name="next" value="/runs"' in nobody.http.get("/sign-in", params={"next": path}).text
    answer = nobody.http.post("/sign-in", data={"token": shared_coordinator.operator_token, "next": path})
    assert answer.headers["location"] == "/runs"


@pytest.mark.parametrize("secret", ["", "fedssl_nonsense", "x" * 201, "\x00"])
def test_a_wrong_token_is_refused_without_a_cookie(nobody: Browser, secret: str) -> None:
    answer = nobody.http.post("/sign-in", data={"token": secret})
    assert answer.status_code == 401
    assert "set-cookie" not in answer.headers
    assert 'id="refused" role="alert">Not signed in' in answer.text
    assert 'aria-describedby="refused"' in answer.text


def test_a_workers_token_cannot_sign_in(shared_coordinator: Coordinator, nobody: Browser) -> None:
    answer = nobody.http.post("/sign-in", data={"token": shared_coordinator.worker_token("w")})
    assert answer.status_code == 403
    assert "role worker" in answer.text


def test_a_changed_cookie_is_refused(shared_coordinator: Coordinator, operator: Browser, nobody: Browser) -> None:
    cookie = operator.http.cookies[sessions.COOKIE]
    token_id, until, mac = cookie.split(".")
    later = f"{token_id}.{int(until) + 1}.{mac}"
    for forged in (later, cookie[:-1], f"..{mac}", "", ".", f"{token_id}.{until}.ä", "a.b.c"):
        answer = nobody.http.get("/runs", headers={b"Cookie": f"{sessions.COOKIE}={forged}".encode()})
        assert answer.status_code == 303, forged


def test_a_session_ends_after_its_lifetime(operator: Browser, nobody: Browser, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends even if the browser still sends the cookie."""
    headers = {"Cookie": f"{sessions.COOKIE}={operator.http.cookies[sessions.COOKIE]}"}
    assert nobody.http.get("/runs", headers=headers).status_code == 200
    later = time.time() + sessions.LIFETIME_SECONDS + 1
    monkeypatch.setattr(sessions.time, "time", lambda: later)
    assert nobody.http.get("/runs", headers=headers).status_code == 303


def test_a_session_ends_when_its_token_is_revoked(shared_coordinator: Coordinator) -> None:
    token = shared_coordinator.client.create_token("viewer")
    with Browser(shared_coordinator, token.secret) as browser:
        assert browser.get("/runs").status_code == 200
        shared_coordinator.client.revoke_token(token.id)
        assert browser.get("/runs").status_code == 303


def test_a_form_can_be_sent_again_after_its_session_has_ended(shared_coordinator: Coordinator) -> None:
    """If the same person signs in again, the entries in the form are not lost."""
    token, other = (
        shared_coordinator.client.create_token("operator"),
        shared_coordinator.client.create_token("operator"),
    )
    with Browser(shared_coordinator, token.secret) as before:
        typed = {"csrf": before.csrf, "method": "ssd", "start": "later"}
        before.http.cookies.clear()
        answer = before.http.post("/runs/new", data=typed)
        assert answer.status_code == 401
        assert "reload this page to send the form again" in answer.text
    with Browser(shared_coordinator, other.secret) as somebody_else:
        assert somebody_else.http.post("/runs/new", data=typed).status_code == 403
    with Browser(shared_coordinator, token.secret) as again:
        assert again.http.post("/runs/new", data=typed).status_code == 303


def test_signing_out_removes_the_cookie(shared_coordinator: Coordinator) -> None:
    with Browser(shared_coordinator, shared_coordinator.operator_token) as browser:
        assert browser.http.post("/sign-out").status_code == 403  # the form's secret is missing
        assert browser.send("/sign-out").headers["location"] == "/sign-in"
        assert sessions.COOKIE not in browser.http.cookies


def test_a_sign_in_that_another_site_sends_is_refused(shared_coordinator: Coordinator, nobody: Browser) -> None:
    for headers in ({"Origin": "https://evil.example"}, {"Origin": "https://["}, {"Sec-Fetch-Site": "cross-site"}):
        answer = nobody.http.post("/sign-in", data={"token": shared_coordinator.operator_token}, headers=headers)
        assert answer.status_code == 403
        assert "set-cookie" not in answer.headers
