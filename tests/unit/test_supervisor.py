"""The supervisor's decisions when services end, and the order in which it stops them. No process is started."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedssl_local import CrashLoopError, GivenUpError, LocalError, RestartPolicy, Supervisor
from fedssl_local import supervisor as module
from fedssl_local.kept import Kept

QUICK = RestartPolicy(first_seconds=0.001, max_seconds=0.002, max_quick_deaths=3)


class Scripted(Kept):
    """A service whose lives end as they are listed: with a status, or, for a text, before they begin. The last life
    lasts until the service is stopped, or until everything is in a hurry if it is stubborn."""

    def __init__(
        self, name: str, *lives: int | str, essential: bool = True, final: bool = False, hopeless: bool = False,
        stubborn: bool = False,
    ) -> None:  # fmt: skip
        self.name, self.is_essential = name, essential
        self.log_path = Path(f"{name}.log")
        self._lives = list(lives)
        self._final, self._hopeless, self._stubborn = final, hopeless, stubborn
        self.num_starts = 0
        self._stopped = threading.Event()

    @property
    def pid(self) -> int | None:
        return 7

    @property
    def ended_for_good(self) -> bool:
        return self._final

    @property
    def is_hopeless(self) -> bool:
        return self._hopeless

    def start(self) -> None:
        self.num_starts += 1
        if self._lives and isinstance(self._lives[0], str):
            raise LocalError(str(self._lives.pop(0)))

    def stop(self, hurry: Callable[[], bool] = lambda: False) -> None:
        while self._stubborn and not hurry():
            time.sleep(0.001)
        self._stopped.set()

    def wait(self) -> int:
        if self._lives:
            status = self._lives.pop(0)
            assert isinstance(status, int)
            return status
        self._stopped.wait(20)
        return -15

    def last_lines(self) -> str:
        return f"{self.name} has no memory"


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def supervised(tmp_path: Path, events: list[str]) -> Supervisor:
    return Supervisor(tmp_path, on_event=lambda name, what: events.append(f"{name} {what}"), restart_policy=QUICK)


def start(supervisor: Supervisor, *services: Scripted) -> None:
    for service in services:
        supervisor.start(service)  # type: ignore[arg-type]


def test_a_service_that_ends_is_started_again_and_the_last_started_is_stopped_first(
    supervised: Supervisor, events: list[str]
) -> None:
    one, two = Scripted("one"), Scripted("two", 3, "no port is free", -9)
    with supervised:
        start(supervised, one)
        supervised._restart_policy = RestartPolicy(first_seconds=0.001, max_seconds=0.002, max_quick_deaths=9)
        start(supervised, two)
        until(lambda: two.num_starts == 4)
        until(lambda: len(events) == 7)
        assert (supervised.pid("two"), supervised.given_up) == (7, ())
        supervised.raise_if_failed()
        supervised.raise_if_given_up()

    assert events == [
        "one started (pid 7)",
        "two started (pid 7)",
        "two exited with status 3; starting again in 0.001 s",
        "two could not be started: no port is free; starting again in 0.002 s",
        "two started again (pid 7)",
        "two was killed by SIGKILL; starting again in 0.002 s",
        "two started again (pid 7)",
        "two stopping",
        "two stopped",
        "one stopping",
        "one stopped",
    ]


def test_an_essential_service_that_always_dies_stops_everything(supervised: Supervisor, events: list[str]) -> None:
    with supervised:
        start(supervised, Scripted("one"), Scripted("two", 1, 1, 1))
        with pytest.raises(
            CrashLoopError, match=r"two died 3 times.*exited with status 1\. The end of two\.log:\ntwo has"
        ):
            supervised.run_until_stopped()

    assert "two given up: nothing works without it, so everything is stopped" in events
    assert events[-1] == "one stopped"


def test_the_others_continue_without_a_service_that_is_not_essential(supervised: Supervisor, events: list[str]) -> None:
    one, two = Scripted("one"), Scripted("two", 1, 1, 1, essential=False)
    with supervised:
        start(supervised, one, two, Scripted("three", 2, essential=False, hopeless=True))
        until(lambda: set(supervised.given_up) == {"two", "three"})
        supervised.raise_if_failed()
        with pytest.raises(GivenUpError, match="three exited with status 2, as it would at every start"):
            supervised.raise_if_given_up()

    assert (one.num_starts, two.num_starts) == (1, 3)
    assert any(event.startswith("two given up, and everything else continues without it") for event in events)


def test_a_final_end_is_only_reported(supervised: Supervisor, events: list[str]) -> None:
    once = Scripted("once", 0, final=True)
    with supervised:
        start(supervised, once)
        until(lambda: "once exited with status 0" in events)
        supervised.raise_if_failed()
    assert once.num_starts == 1


def test_a_service_that_cannot_be_started_is_not_kept_and_a_name_is_used_once(supervised: Supervisor) -> None:
    with pytest.raises(RuntimeError, match="inside its `with` block"):
        start(supervised, Scripted("one"))
    with supervised:
        with pytest.raises(LocalError, match="no port is free"):
            start(supervised, Scripted("one", "no port is free"))
        start(supervised, Scripted("one"))
        with pytest.raises(ValueError, match="there is a service named one already"):
            start(supervised, Scripted("one"))
        with pytest.raises(KeyError):
            supervised.pid("two")
        supervised.stop()
        with pytest.raises(RuntimeError, match="not after stop"):
            start(supervised, Scripted("two"))


def test_one_ctrl_c_stops_everything_and_another_kills_what_is_left(
    supervised: Supervisor, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "WAIT_SECONDS", 0.001)

    def press() -> None:
        until(lambda: supervised._is_waiting)
        supervised._on_signal(module.signal.SIGINT, None)
        until(lambda: "two stopping" in events)
        supervised._on_signal(module.signal.SIGTERM, None)
        pressed.append(supervised.is_hurried)
        supervised._on_signal(module.signal.SIGINT, None)

    pressed: list[bool] = []
    with supervised:
        start(supervised, Scripted("one"), Scripted("two", stubborn=True))
        presser = threading.Thread(target=press)
        presser.start()
        supervised.run_until_stopped()
        presser.join()

    assert pressed == [False], "SIGTERM, which a service manager may repeat, hurries nothing"
    assert supervised.is_hurried
    assert events[-4:] == ["two stopping", "two stopped", "one stopping", "one stopped"]


def test_a_signal_interrupts_a_program_that_does_not_wait(supervised: Supervisor) -> None:
    with pytest.raises(KeyboardInterrupt):
        supervised._on_signal(module.signal.SIGINT, None)
    with pytest.raises(SystemExit) as caught:
        supervised._on_signal(module.signal.SIGTERM, None)
    assert caught.value.code == 143
