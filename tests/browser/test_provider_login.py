"""Signing in and out at a real provider with Chromium, which enforces cookies and policies as browsers do."""

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser, Page, expect

from support.browsing import ARTIFACTS, PALETTES, SIZES
from support.openid import SignInSetup, sign_in_setup
from support.openid_server import password_of
from support.servers import Servers

_SIZES = {**SIZES, "tablet": (1024, 768)}


@pytest.fixture(scope="module")
def provider_setup(servers: Servers, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SignInSetup]:
    with sign_in_setup(servers, tmp_path_factory.mktemp("openid")) as provider_setup:
        yield provider_setup


@pytest.fixture
def page(browser: Browser, provider_setup: SignInSetup) -> Iterator[Page]:
    with browser.new_context(base_url=provider_setup.coordinator.url) as context:
        yield context.new_page()


def sign_in(page: Page, provider_setup: SignInSetup, name: str) -> None:
    """Sign a person in, with the button and the provider's forms."""
    page.get_by_role("link", name="Sign in at").click()
    page.locator("input[name=login]").fill(name)
    page.locator("input[name=login]").press("Enter")
    page.locator("input[name=password]").fill(password_of(name))
    page.locator("input[name=password]").press("Enter")
    accept = page.locator("#accept")
    page.wait_for_url(lambda url: url.startswith(provider_setup.coordinator.url) or "/oauth/authorize" in url)
    if accept.count():
        accept.click()


def test_signing_in_returns_to_the_page_and_signing_out_ends_both_sessions(
    page: Page, provider_setup: SignInSetup
) -> None:
    page.goto("/events")
    expect(page).to_have_url(f"{provider_setup.coordinator.url}/sign-in?next=/events")
    sign_in(page, provider_setup, "ada")
    expect(page).to_have_url(f"{provider_setup.coordinator.url}/events")
    page.get_by_label("signed in as ada").click()
    expect(page.get_by_text("Signed in as ada, operator.")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page).to_have_url(f"{provider_setup.coordinator.url}/sign-in")
    page.goto("/runs")
    page.get_by_role("link", name="Sign in at").click()
    expect(page.locator("input[name=login]")).to_be_visible()


def test_a_person_without_a_role_sees_why(page: Page, provider_setup: SignInSetup) -> None:
    page.goto("/sign-in")
    sign_in(page, provider_setup, "mallory")
    expect(page.get_by_role("alert")).to_contain_text("you have no role here")
    expect(page.get_by_label("Token")).to_be_visible()


@pytest.mark.parametrize("palette", PALETTES)
def test_the_sign_in_page_of_a_provider_does_not_scroll_sideways(
    browser: Browser, provider_setup: SignInSetup, palette: str
) -> None:
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    for size, (width, height) in _SIZES.items():
        with browser.new_context(
            base_url=provider_setup.coordinator.url, viewport={"width": width, "height": height}, color_scheme=palette
        ) as context:
            page = context.new_page()
            for name, path in (("plain", "/sign-in"), ("refused", "/sign-in/oidc/callback")):
                page.goto(path)
                assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), (name, size)
                page.screenshot(path=ARTIFACTS / f"sign-in-provider-{name}-{size}-{palette}.png")
