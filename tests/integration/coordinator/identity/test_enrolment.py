"""One-time enrolment: who may enrol whom, how often, and the first start of a worker from end to end."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from uuid import UUID

import numpy as np
import pytest

from fedssl.client import Client, Conflict, NotAllowed, NotAuthenticated, Retry, Unreachable, WorkerClient
from fedssl.errors import DataError
from fedssl.protocol.views import TokenCreated
from fedssl.protocol.work import Enrolled
from fedssl_coordinator.identity.authentication import hash_secret, new_secret
from fedssl_worker.bootstrap import EXIT_REFUSED, run_worker
from fedssl_worker.enrolment import enrolled_token
from fedssl_worker.files import exclusive_folder
from fedssl_worker.settings import Settings, SettingsError
from support.coordinator import Coordinator
from support.tables import Tables

ONE, OTHER = hash_secret("one"), hash_secret("other")


def _enrol(coordinator: Coordinator, enrolment: str, token_hash: str) -> Enrolled:
    with WorkerClient(coordinator.url, enrolment, retry=Retry(seconds=0)) as client:
        return client.enrol(token_hash)


def _registers(coordinator: Coordinator, secret: str) -> bool:
    with WorkerClient(coordinator.url, secret, retry=Retry(seconds=0)) as client:
        try:
            client.heartbeat()
        except NotAuthenticated:
            return False
        return True


def _operator(coordinator: Coordinator) -> Client:
    return Client(coordinator.url, coordinator.operator_token, retry=Retry(seconds=0))


def _expire(tables: Tables, token: TokenCreated) -> None:
    tables.execute("UPDATE tokens SET expires_at = now() WHERE id = %s", token.id)


def test_an_enrolment_becomes_one_workers_token(coordinator: Coordinator, tables: Tables) -> None:
    enrolment = coordinator.client.create_enrolment_token("hospital-a", "of Ada")
    assert enrolment.expires_at == enrolment.created_at + timedelta(days=1)
    secret, last = new_secret(), tables.last_event()
    assert not _registers(coordinator, secret)
    enrolled = _enrol(coordinator, enrolment.secret, hash_secret(secret))
    assert enrolled.client_id == "hospital-a"
    assert _registers(coordinator, secret)
    assert _enrol(coordinator, enrolment.secret, hash_secret(secret)) == enrolled  # in case the answer was lost
    assert [(event.kind, event.client_id) for event in tables.events_after(last)] == [("client.enrolled", "hospital-a")]
    views = {view.id: view for view in coordinator.client.tokens()}
    assert views[enrolment.id].used_at is not None
    made = views[enrolled.token_id]
    assert (made.role, made.client_id, made.label, made.expires_at) == ("worker", "hospital-a", "of Ada", None)


def test_a_second_worker_is_refused_and_reported(coordinator: Coordinator, tables: Tables) -> None:
    enrolment = coordinator.client.create_enrolment_token("a")
    _enrol(coordinator, enrolment.secret, ONE)
    last = tables.last_event()
    with pytest.raises(Conflict, match="used by another worker: ask for a new one") as refused:
        _enrol(coordinator, enrolment.secret, OTHER)
    [event] = tables.events_after(last)
    assert (event.kind, event.client_id) == ("enrolment.refused", "a")
    assert event.data == {"enrolment": str(enrolment.id)}
    for secret in (enrolment.secret, ONE, OTHER):
        assert secret not in f"{refused.value!r} {event!r}"
    assert not _registers(coordinator, "other")
    assert _registers(coordinator, "one")


def test_only_one_of_many_concurrent_workers_is_enrolled(coordinator: Coordinator, tables: Tables) -> None:
    for number in range(5):
        enrolment = coordinator.client.create_enrolment_token(f"client-{number}")

        def attempt(name: str, secret: str = enrolment.secret) -> UUID | None:
            try:
                return _enrol(coordinator, secret, hash_secret(name)).token_id
            except Conflict:
                return None

        names = [f"{number}-{which}" for which in (0, 0, 0, 1, 1, 1, 2, 3)]  # some of them repeat their request
        with ThreadPoolExecutor(len(names)) as pool:
            answers = dict.fromkeys(zip(names, pool.map(attempt, names), strict=True))
        [winner] = {name for name, token in answers if token is not None}
        assert len({token for name, token in answers if name == winner}) == 1
        made = tables.query(
            "SELECT secret_hash FROM tokens WHERE role = 'worker' AND client_id = %s", f"client-{number}"
        )
        assert made == [(hash_secret(winner),)]


def test_an_expired_revoked_or_replaced_enrolment_is_refused(coordinator: Coordinator, tables: Tables) -> None:
    def expire(enrolment: TokenCreated) -> None:
        _expire(tables, enrolment)

    def revoke(enrolment: TokenCreated) -> None:
        coordinator.client.revoke_token(enrolment.id)

    def replace(enrolment: TokenCreated) -> None:
        assert enrolment.client_id is not None
        coordinator.client.create_enrolment_token(enrolment.client_id)

    def revoke_client(enrolment: TokenCreated) -> None:
        assert enrolment.client_id is not None
        coordinator.client.revoke_client(enrolment.client_id)

    ends: list[Callable[[TokenCreated], None]] = [expire, revoke, replace, revoke_client]
    for end in ends:
        enrolment = coordinator.client.create_enrolment_token(end.__name__.replace("_", "-"))
        end(enrolment)
        with pytest.raises(NotAuthenticated):
            _enrol(coordinator, enrolment.secret, ONE)
    assert tables.one("SELECT count(*) FROM tokens WHERE role = 'worker' OR used_at IS NOT NULL") == 0
    with pytest.raises(Conflict, match="is revoked"):
        coordinator.client.create_enrolment_token("revoke-client")


def test_a_worker_may_repeat_its_enrolment_after_it_has_expired(coordinator: Coordinator, tables: Tables) -> None:
    enrolment = coordinator.client.create_enrolment_token("a")
    enrolled = _enrol(coordinator, enrolment.secret, ONE)
    _expire(tables, enrolment)
    assert _enrol(coordinator, enrolment.secret, ONE) == enrolled
    with pytest.raises(Conflict):
        _enrol(coordinator, enrolment.secret, OTHER)


def test_an_existing_token_cannot_be_enrolled(coordinator: Coordinator, tables: Tables) -> None:
    """A hash cannot be guessed. A caller that replays one gets no token and does not use up the enrolment."""
    enrolment = coordinator.client.create_enrolment_token("a")
    with pytest.raises(Conflict, match="create a new secret"):
        _enrol(coordinator, enrolment.secret, hash_secret(coordinator.admin_token))
    assert tables.one("SELECT used_at FROM tokens WHERE id = %s", enrolment.id) is None
    assert _enrol(coordinator, enrolment.secret, ONE).client_id == "a"


def test_operators_enrol_new_clients_and_only_admins_replace_workers(coordinator: Coordinator) -> None:
    with _operator(coordinator) as operator:
        first = operator.create_enrolment_token("a")
        second = operator.create_enrolment_token("a")  # the first one was lost before it was used
        with pytest.raises(NotAuthenticated):
            _enrol(coordinator, first.secret, ONE)
        token = _enrol(coordinator, second.secret, ONE).token_id
        coordinator.client.revoke_token(token)
        with pytest.raises(NotAllowed, match="has had a worker: only an admin"):
            operator.create_enrolment_token("a")
    again = coordinator.client.create_enrolment_token("a")
    assert _enrol(coordinator, again.secret, OTHER).token_id != token


def test_a_workers_token_revokes_the_clients_unused_enrolment_token(coordinator: Coordinator) -> None:
    """Otherwise the operator who created the enrolment token could become a client that has a worker."""
    with _operator(coordinator) as operator:
        enrolment, other = (operator.create_enrolment_token(client) for client in ("a", "b"))
    coordinator.client.create_token("worker", client_id="a")
    with pytest.raises(NotAuthenticated):
        _enrol(coordinator, enrolment.secret, ONE)
    assert _enrol(coordinator, other.secret, OTHER).client_id == "b"


@contextmanager
def _state(folder: Path) -> Iterator[Path]:
    with exclusive_folder(folder) as owned:
        yield owned


def test_a_workers_token_is_known_only_to_the_worker(coordinator: Coordinator, tables: Tables, tmp_path: Path) -> None:
    enrolment = coordinator.client.create_enrolment_token("a").secret
    asked: list[str] = []

    def enrol(secret: str, token_hash: str) -> Enrolled:
        asked.append(token_hash)
        return _enrol(coordinator, secret, token_hash)

    with _state(tmp_path / "state") as state:
        assert enrolled_token(state, None, enrol) is None
        token = enrolled_token(state, enrolment, enrol)
        assert token is not None
        assert asked == [hash_secret(token)]
        assert enrolled_token(state, enrolment, enrol) == enrolled_token(state, None, enrol) == token
        assert len(asked) == 1  # it has been used, and is not sent again
        [kept] = state.glob("token*")
        assert kept.stat().st_mode & 0o777 == 0o600
        assert enrolment not in kept.read_text()
    assert _registers(coordinator, token)
    everything = str(tables.dump())
    assert token not in everything
    assert enrolment not in everything


def test_a_lost_answer_does_not_lock_a_worker_out(coordinator: Coordinator, tmp_path: Path) -> None:
    enrolment = coordinator.client.create_enrolment_token("a").secret

    def lose(secret: str, token_hash: str) -> Enrolled:
        _enrol(coordinator, secret, token_hash)
        raise Unreachable("the answer was lost")

    def enrol(secret: str, token_hash: str) -> Enrolled:
        return _enrol(coordinator, secret, token_hash)

    with _state(tmp_path / "state") as state:
        with pytest.raises(Unreachable):
            enrolled_token(state, enrolment, lose)
        assert enrolled_token(state, None, enrol) is None  # the token is not known to be valid yet
        token = enrolled_token(state, enrolment, enrol)
        assert token is not None
        assert _registers(coordinator, token)
        # A new enrolment, for example because the old token has leaked: the new token counts once it is enrolled.
        newer = coordinator.client.create_enrolment_token("a").secret
        with pytest.raises(Unreachable):
            enrolled_token(state, newer, lose)
        assert enrolled_token(state, enrolment, enrol) == token
        assert (renewed := enrolled_token(state, newer, enrol)) != token
        assert renewed is not None
        assert _registers(coordinator, renewed)


def test_an_unreadable_token_file_asks_for_a_new_enrolment(tmp_path: Path) -> None:
    with _state(tmp_path / "state") as state:
        (state / "token.json").write_text('{"format": 2}')
        with pytest.raises(SettingsError, match="enrol again"):
            enrolled_token(state, None, lambda secret, token_hash: pytest.fail("asked"))


def _settings(coordinator: Coordinator, folder: Path, enrolment: Path) -> Settings:
    data = folder / "own.npz"
    np.savez(data, images=np.zeros((16, 8, 8), np.uint8))
    return Settings(coordinator=coordinator.url, data=str(data), state=folder / "state", enrolment_token_file=enrolment)


def test_the_second_worker_with_one_enrolment_exits_with_the_reason(
    coordinator: Coordinator, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    enrolment = coordinator.client.create_enrolment_token("a").secret
    _enrol(coordinator, enrolment, ONE)
    file = tmp_path / "enrolment"
    file.write_text(enrolment)
    settings = _settings(coordinator, tmp_path, file)
    with pytest.raises(SettingsError, match="chmod 600"):
        run_worker(settings)
    file.chmod(0o600)
    assert run_worker(settings) == EXIT_REFUSED
    said = capsys.readouterr().out
    assert "has been used by another worker" in said
    assert enrolment not in said
    file.unlink()
    with pytest.raises(SettingsError, match=r"enrolment-token-file \(.* does not exist\)"):
        run_worker(settings)


def test_a_worker_that_cannot_read_its_images_does_not_use_up_its_enrolment(
    coordinator: Coordinator, tmp_path: Path
) -> None:
    file = tmp_path / "enrolment"
    file.write_text(enrolment := coordinator.client.create_enrolment_token("a").secret)
    file.chmod(0o600)
    settings = _settings(coordinator, tmp_path, file)
    Path(settings.data).write_bytes(b"damaged")
    with pytest.raises(DataError, match="damaged"):
        run_worker(settings)
    assert _enrol(coordinator, enrolment, ONE).client_id == "a"


@pytest.mark.full
def test_a_worker_starts_with_its_enrolment_and_again_without_it(
    coordinator: Coordinator, tables: Tables, tmp_path: Path
) -> None:
    enrolment = coordinator.client.create_enrolment_token("a").secret
    file = tmp_path / "enrolment"
    file.write_text(enrolment)
    file.chmod(0o600)
    given = _settings(coordinator, tmp_path, file)
    command = [
        sys.executable, "-m", "fedssl_worker", "run", "--coordinator", given.coordinator, "--data", given.data,
        "--state", str(given.state), "--enrolment-token-file", str(file),
    ]  # fmt: skip
    for start in (1, 2):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        end = time.monotonic() + 60
        while tables.one("SELECT count(*) FROM events WHERE kind = 'client.registered'") < start:
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < end, "it does not register"
            time.sleep(0.05)
        process.terminate()
        output, _ = process.communicate(timeout=20)
        assert process.returncode == 0, output
        secret = json.loads((given.state / "token.json").read_text())["secret"]
        assert secret not in output
        assert enrolment not in output
        file.unlink(missing_ok=True)  # no longer needed
