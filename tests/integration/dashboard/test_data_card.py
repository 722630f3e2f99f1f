"""A client's page shows its data card, with suppressed numbers and the alarm."""

from fedssl.protocol.data_card import DataCard, DataReport
from fedssl.protocol.work import Register
from support.coordinator import Coordinator
from support.pages import Browser


def _card(dark: float, *, num_groups: int | None) -> DataCard:
    histogram = (dark, *[0.0] * 7, None, 1 - dark)
    sizes = (0, None, None, 0, 100, 0, 0, 0)
    return DataCard(
        min_count=10,
        num_images=1234,
        num_groups=num_groups,
        sizes=sizes,
        channels=(1234, *[0] * 15),
        histogram=histogram,
    )


def test_a_clients_page_shows_its_data_card(shared_coordinator: Coordinator, viewer: Browser) -> None:
    assert "Data card" not in viewer.get("/clients/a").text
    cards = {"a": _card(1.0, num_groups=56), "b": _card(0.0, num_groups=None), "c": _card(0.0, num_groups=None)}
    for name, card in cards.items():
        worker = shared_coordinator.worker(name, register=False)
        worker.register(
            Register(worker_version="1", methods={}, device="cpu", num_images=card.num_images, channels=1, image_size=8)
        )
        worker.report_data(DataReport(card=card, num_unreadable=7))
    text = " ".join(viewer.get("/clients/a").text.split())
    assert "Data card" in text
    assert "<dd>1,234</dd>" in text
    assert "<dd>56</dd>" in text
    assert "<dd>7</dd>" in text
    assert "from 32 pixels: suppressed, from 64 pixels: suppressed, from 256 pixels: 100" in text
    assert "Differs from the other sites" in text
    assert "0.67 (alarm from 0.2)" in text
