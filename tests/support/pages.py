"""The web page as a browser without scripts sees it."""

import re
from typing import Self

import httpx
from fastapi.routing import APIRoute

from fedssl_coordinator.dashboard.endpoints import PAGES
from fedssl_coordinator.http.body_limit import SESSION_COOKIE
from support.coordinator import Coordinator


def page_routes() -> list[tuple[str, str]]:
    """Return the method and path of each route of the web page."""
    routes = [route for module in PAGES for route in module.router.routes if isinstance(route, APIRoute)]
    return sorted((method, route.path) for route in routes for method in route.methods)


def shape_of(text: str) -> str:
    """Return the shape of a page's live part, which its script sends to find out whether it has changed."""
    found = re.search(r'id="shape" name="shape" value="([0-9a-f]+)"', text)
    assert found
    return found[1]


def fields_with_a_mistake(text: str) -> list[str]:
    """Return the names of the fields that are tied to the only error of a page."""
    assert text.count('id="mistake" role="alert"') == 1
    fields = re.findall(r"<(?:input|select|textarea)[^>]*>", text)
    tied = [field for field in fields if 'aria-invalid="true" aria-describedby="mistake" autofocus' in field]
    return [re.findall(r' name="([^"]*)"', field)[0] for field in tied]


class Browser:
    """One session, which signs in with the form and sends forms with the CSRF token of its pages."""

    def __init__(self, coordinator: Coordinator, secret: str | None) -> None:
        self.http = coordinator.bare_http()
        self._csrf: dict[str | None, str] = {}
        if secret is not None:
            answer = self.http.post("/sign-in", data={"token": secret})
            assert answer.status_code == 303, answer.text

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.http.close()

    def get(self, path: str, **headers: str) -> httpx.Response:
        return self.http.get(path, headers=headers)

    @property
    def csrf(self) -> str:
        """Return the CSRF token that every form of this session contains. A page is read once per session for it."""
        session = self.http.cookies.get(SESSION_COOKIE)
        if session not in self._csrf:
            found = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.get("/runs").text)
            assert found, "every page has the form that signs out"
            self._csrf[session] = found[1]
        return self._csrf[session]

    def send(self, path: str, *, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
        """Send a form with this session's CSRF token."""
        return self.http.post(path, data={"csrf": self.csrf, **fields}, headers=headers)
