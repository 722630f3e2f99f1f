"""Numbers and names, formatted for people."""

from datetime import UTC, datetime, timedelta

import pytest

from fedssl_coordinator.dashboard.layout import formats, svg
from fedssl_coordinator.dashboard.layout.client_labels import SLOTS, named
from fedssl_coordinator.dashboard.run.charts import numbers
from fedssl_coordinator.dashboard.run.settings_words import flat, shown
from fedssl_coordinator.dashboard.run.view import stretches


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (formats.number(48210), "48,210"),
        (formats.number(-3.25, 2), "−3.25"),
        (formats.percent(0.784), "78.4%"),
        (formats.points(0.003), "+0.3"),
        (formats.points(-0.0001), "±0"),
        (formats.in_bytes(0), "0 B"),
        (formats.in_bytes(999), "999 B"),
        (formats.in_bytes(2_560_000), "2.56 MB"),
        (formats.in_bytes(999_950), "1.00 MB"),
        (formats.in_bytes(41_800_000_000), "41.8 GB"),
        (formats.seconds(0.4), "0 s"),
        (formats.seconds(59.6), "1 min"),
        (formats.seconds(6 * 3600 + 600), "6 h 10 min"),
        (formats.seconds(2 * 86400), "2 d"),
        (formats.short(0.0000216), "2.16e−5"),
        (formats.plural(1, "entry", "entries"), "1 entry"),
        (formats.plural(1284, "entry", "entries"), "1,284 entries"),
        (formats.ago(None), "never"),
    ],
)
def test_numbers_and_times_are_formatted(shown: str, expected: str) -> None:
    assert shown == expected


@pytest.mark.parametrize("write", [formats.number, formats.percent, formats.points, formats.short, formats.in_bytes])
def test_missing_values_are_shown_as_a_dash(write: object) -> None:
    assert write(None) == formats.NOTHING  # type: ignore[operator]


def test_times_in_the_past_are_rounded() -> None:
    assert formats.ago(datetime.now(UTC) - timedelta(minutes=40, seconds=12)) == "40 min ago"


def test_codes_are_short_and_unique() -> None:
    ids = [
        "st-odile",
        "st-olaf",
        "st-o",
        "client-0",
        "client-1",
        "client-12",
        "a",
        "A.b",
        "___",
        "-",
        "site-001",
        "ste",
    ]
    codes = [client.code for client in named(ids)]
    assert len(set(codes)) == len(ids)
    assert all(1 <= len(code) <= 6 for code in codes)
    assert [client.slot for client in named(ids)] == list(range(SLOTS))


def test_with_more_than_twelve_clients_none_has_a_colour() -> None:
    clients = named([f"site-{n:03}" for n in range(1000)])
    assert {client.slot for client in clients} == {SLOTS}
    assert len({client.code for client in clients}) == 1000


def test_adjacent_dimensions_of_one_owner_are_joined() -> None:
    assert stretches([(0, "a"), (1, "a"), (2, "b"), (4, "b")]) == [("a", 0, 2), ("b", 2, 1), ("b", 4, 1)]


def test_settings_have_the_keys_that_the_set_option_accepts() -> None:
    spec = {"seed": 1, "method": {"name": "ssd", "add_ons": [{"name": "dsr", "gamma": 1.0, "none": None}]}}
    assert flat(spec) == {"seed": 1, "method.name": "ssd", "method.add_ons": spec["method"]["add_ons"]}  # type: ignore[index]
    assert shown(spec["method"]["add_ons"]) == "dsr (gamma 1.0)"  # type: ignore[index]


@pytest.mark.parametrize("num_closed", [0, 1, 999, 1000, 1001, 12_345])
def test_charts_keep_the_newest_round_and_at_most_a_thousand(num_closed: int) -> None:
    xs = numbers(num_closed)
    assert len(xs) <= 1000
    assert not num_closed or xs[-1] == num_closed


def test_a_sparkline_stays_inside_its_box() -> None:
    assert svg.spark([1.0]) == ""
    assert svg.spark([3.0, 3.0]).startswith("M2.0 20.0")
    ends = [float(step.split(" ")[0]) for step in svg.spark([0.1, 0.9, 0.4])[1:].split("L")]
    assert (ends[0], ends[-1]) == (2.0, 70.0)
