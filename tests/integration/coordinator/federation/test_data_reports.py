"""Reports about images are stored and compared, raise an alarm if they drift, and are replaced by later reports."""

from pathlib import Path

import numpy as np
import pytest
import torch

from fedssl.client import Rejected
from fedssl.data import ImageData, save_npz
from fedssl.protocol.data_card import ChannelSums, DataCard, DataReport
from fedssl_worker.data import OwnImages
from fedssl_worker.data_report import DataReporter
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger
from fedssl_worker.disclosure.ledger.verification import read_entries
from fedssl_worker.disclosure.policy import PolicyEnforcer
from support.coordinator import Coordinator
from support.tables import Tables

POLICY = """schema = 1
client = "a"
coordinator = "{url}"
[[allow]]
artifact = "statistics"
methods = ["*"]
min_count = 5
[[allow]]
artifact = "channel-sums"
methods = ["*"]
[metrics]
allow = ["{metric}"]
"""


def _card(bin_of_all: int) -> DataCard:
    histogram = [0.0] * 10
    histogram[bin_of_all] = 1.0
    return DataCard(
        min_count=10, num_images=100, num_groups=None, sizes=(100, *[0] * 7), channels=(100, *[0] * 15),
        histogram=tuple(histogram),
    )  # fmt: skip


def _drifts(tables: Tables) -> list[str | None]:
    return [event.client_id for event in tables.events_after(0) if event.kind == "client.data_drift"]


def test_cards_are_compared_and_drift_raises_one_alarm(coordinator: Coordinator, tables: Tables) -> None:
    workers = {name: coordinator.worker(name) for name in "abcdef"}
    for name in "abcde":
        workers[name].report_data(DataReport(card=_card(5)))
    assert not _drifts(tables)
    for _ in range(2):
        workers["f"].report_data(DataReport(card=_card(0), num_unreadable=3))
    assert _drifts(tables) == ["f"]
    found = coordinator.client.data_card()
    assert found.histogram is not None
    assert found.histogram[0] == pytest.approx(1 / 6)
    sites = {site.client_id: site for site in found.sites}
    assert sites["f"].is_drifting
    assert sites["f"].drift == pytest.approx(5 / 6)
    assert sites["a"].drift == pytest.approx(1 / 6)
    assert (sites["f"].num_unreadable, sites["a"].num_unreadable) == (3, None)
    workers["f"].report_data(DataReport())  # the data owner no longer allows a report
    found = coordinator.client.data_card()
    assert [site.card for site in found.sites if site.client_id == "f"] == [None]
    coordinator.client.revoke_client("f")
    assert len(coordinator.client.data_card().sites) == 5


def test_a_report_that_would_outweigh_the_other_sites_is_refused(coordinator: Coordinator, tables: Tables) -> None:
    """Such a report once decided the mean of all images and their deviation, and the other sites raised the alarm."""
    workers = {name: coordinator.worker(name) for name in "abc"}
    for name in "ab":
        workers[name].report_data(DataReport(card=_card(5)))
    shares = _card(5).model_copy(update={"histogram": (1.0,) * 10})
    with pytest.raises(Rejected, match="shares of its histogram add up to more than 1"):
        workers["c"].report_data(DataReport(card=shares))
    sums = ChannelSums(num_images=10**9, means=(1e9,), squares=(1e9,))
    with pytest.raises(Rejected, match="about 1000000000 images, and 1000 is registered"):
        workers["c"].report_data(DataReport(sums=sums))
    assert not _drifts(tables)
    assert [site.client_id for site in coordinator.client.data_card().sites] == ["a", "b"]


def test_moments_need_two_sites_with_equal_channels(coordinator: Coordinator) -> None:
    a, b, c = (coordinator.worker(name) for name in "abc")
    a.report_data(DataReport(sums=ChannelSums(num_images=2, means=(1.0,), squares=(1.0,))))
    c.report_data(DataReport(sums=ChannelSums(num_images=2, means=(1.0,) * 3, squares=(1.0,) * 3)))
    assert coordinator.client.data_card().moments == ()
    b.report_data(DataReport(sums=ChannelSums(num_images=2, means=(1.0,), squares=(0.5,))))
    [found] = coordinator.client.data_card().moments
    assert (found.num_images, found.mean, found.std[0]) == (4, (0.5,), pytest.approx(0.125**0.5))
    with coordinator.http(token=coordinator.worker_token("a")) as http:
        assert http.post("/v1/work/data-report", json={"entropy": 1}).status_code == 422
    with pytest.raises(Rejected):
        a.report_data(DataReport.model_construct(num_unreadable=-1))


def test_a_worker_reports_only_what_the_policy_allows(coordinator: Coordinator, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    save_npz(tmp_path / "own.npz", ImageData(rng.integers(0, 256, (20, 1, 8, 8), np.uint8)))
    images = OwnImages(str(tmp_path / "own.npz"), torch.device("cpu"))
    policy = tmp_path / "policy.toml"
    policy.write_text(POLICY.format(url=coordinator.url, metric="unreadable_images"))
    enforcer = PolicyEnforcer(policy, coordinator.url)
    ledger = Ledger(tmp_path / "ledger", policy=enforcer.digest, rules=enforcer.ledger)
    egress = Egress(coordinator.worker("a"), ledger, enforcer)
    record = tmp_path / "data-reports.json"
    reporter = DataReporter(egress, enforcer, images, None, record)
    reporter.send()
    reporter.send()  # nothing has changed
    [site] = coordinator.client.data_card().sites
    assert site.card is not None
    assert (site.card.num_images, site.card.min_count, site.num_unreadable) == (20, 5, 0)
    policy.write_text(POLICY.format(url=coordinator.url, metric="loss").replace("statistics", "evaluation"))
    egress.reload()
    reporter.send()
    [site] = coordinator.client.data_card().sites
    assert (site.card, site.num_unreadable) == (None, None)
    bodies = [entry.body for entry in read_entries(tmp_path / "ledger")]
    intents = [body for body in bodies if body["kind"] == "intent"]
    assert [body["artifact"] for body in intents] == [["statistics", "channel-sums"], ["channel-sums"]]
    arrived = [(body["intent"], body["sent_bytes"]) for body in bodies if body["kind"] == "sent"]
    assert arrived == [(body["seq"], body["bytes"]) for body in intents]
    assert ledger.totals().num_rounds == 0
    none = DataReporter(egress, PolicyEnforcer(None, coordinator.url), images, None, record)
    none.send()  # without a policy: only the number of unreadable files, like any metric
    [site] = coordinator.client.data_card().sites
    assert (site.card, site.num_unreadable) == (None, 0)
