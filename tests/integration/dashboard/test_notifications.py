"""The page of the notification destinations: only for admins, with a secret that is shown once, and a test delivery."""

import re

import pytest

from fedssl.protocol.notifications import Topic
from support.coordinator import Coordinator
from support.pages import Browser, fields_with_a_mistake

ON = {"on-failed": "on", "on-stalled": "on"}
HOOK = "https://hooks.example.org/a-secret-path"


def test_a_webhook_is_added_and_its_secret_is_shown_once(shared_coordinator: Coordinator, admin: Browser) -> None:
    answer = admin.send("/notifications", target=HOOK, label="chat <b>", **ON)
    assert answer.status_code == 200
    [secret] = re.findall(r"whsec_[A-Za-z0-9+/=]+", answer.text)
    page = admin.get("/notifications").text
    assert secret not in page
    assert "a-secret-path" not in page
    assert "https://hooks.example.org/..." in page
    assert "chat &lt;b&gt;" in page
    [found] = [one for one in shared_coordinator.client.notification_destinations() if one.label == "chat <b>"]
    assert found.topics == ["failed", "stalled"]


def test_a_test_notification_is_queued(shared_coordinator: Coordinator, admin: Browser) -> None:
    destination = shared_coordinator.client.create_notification_destination("webhook", "https://hooks.example.org/")
    answer = admin.send(f"/notifications/{destination.id}/test")
    assert (answer.status_code, answer.headers["location"]) == (303, "/notifications")
    [delivery] = shared_coordinator.client.notification_deliveries(destination.id)
    assert delivery.topic == "test"


@pytest.mark.parametrize(
    ("target", "topics", "said"),
    [
        ("hooks.example.org", ON, "not the URL of a webhook"),
        ("alice@example.org", ON, "no SMTP server"),
        ("https://127.0.0.1/", ON, "which is not public"),
        (HOOK, {}, "choose at least one topic"),
    ],
)
def test_an_invalid_destination_is_shown_in_the_form(
    admin: Browser, target: str, topics: dict[str, str], said: str
) -> None:
    answer = admin.send("/notifications", target=target, **topics)
    assert answer.status_code in (409, 422)
    assert said in answer.text
    assert f'value="{target}"' in answer.text
    assert fields_with_a_mistake(answer.text)[0] == ("target" if topics else f"on-{next(iter(Topic))}")


def test_operators_and_viewers_can_neither_see_nor_add_destinations(
    shared_coordinator: Coordinator, operator: Browser, viewer: Browser
) -> None:
    before = len(list(shared_coordinator.client.notification_destinations()))
    for browser in (operator, viewer):
        assert browser.get("/notifications").status_code == 403
        assert browser.send("/notifications", target=HOOK, **ON).status_code == 403
        assert "/notifications" not in browser.get("/runs").text
    assert len(list(shared_coordinator.client.notification_destinations())) == before
