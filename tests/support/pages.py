"""The web page as a browser without scripts sees it."""

import re
from typing import Self

import httpx
from fastapi.routing import APIRoute

from fedssl_coordinator.dashboard import lists as list_pages
from fedssl_coordinator.dashboard import login
from fedssl_coordinator.dashboard.clients import pages as client_pages
from fedssl_coordinator.dashboard.compare import pages as compare_pages
from fedssl_coordinator.dashboard.new_run import pages as new_run_pages
from fedssl_coordinator.dashboard.reference import pages as reference_pages
from fedssl_coordinator.dashboard.run import pages as run_pages
from fedssl_coordinator.dashboard.run import tables as run_tables
from fedssl_coordinator.dashboard.runs import pages as runs_pages
from support.coordinator import Coordinator

MODULES = (
    login,
    runs_pages,
    new_run_pages,
    compare_pages,
    run_tables,
    run_pages,
    client_pages,
    list_pages,
    reference_pages,
)


def page_routes() -> list[tuple[str, str]]:
    """Method and path of everything that the web page answers."""
    routes = [route for module in MODULES for route in module.router.routes if isinstance(route, APIRoute)]
    return sorted((method, route.path) for route in routes for method in route.methods)


class Browser:
    """One session: signs in by the form, and sends forms with what their page has put into them."""

    def __init__(self, coordinator: Coordinator, secret: str | None) -> None:
        self.http = coordinator.bare_http()
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
        """Return the fields that every form of this session contains."""
        found = re.search(r'name="csrf" value="([0-9a-f]{64})"', self.get("/runs").text)
        assert found, "every page has the form that signs out"
        return found[1]

    def send(self, path: str, *, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
        """A form of this session's own."""
        return self.http.post(path, data={"csrf": self.csrf, **fields}, headers=headers)
