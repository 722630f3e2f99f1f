"""A run of a newer coordinator, after a rollback to this version, which does not know one of its settings."""

import pytest

from fedssl.client import Conflict
from fedssl_coordinator.federation import run_rows
from support.cast import MakeCast
from support.tables import Tables


def test_it_keeps_its_clients_from_no_other_run_and_requests_for_it_explain_why(
    make_cast: MakeCast, tables: Tables
) -> None:
    newer = make_cast("a")
    tables.execute("UPDATE runs SET spec = jsonb_set(spec, '{training,from_later}', '1') WHERE id = %s", newer.id)
    run_rows._definitions.clear()
    other = make_cast("a")
    assert other.claim("a").run_id == other.id
    ((state, reason),) = tables.query("SELECT state, reason FROM runs WHERE id = %s", newer.id)
    assert state == "paused"
    assert "(training.from_later: Extra inputs are not permitted): upgrade the coordinator" in reason
    client = newer.coordinator.client
    for request in (client.run, client.resume, client.stop):
        with pytest.raises(Conflict, match=r"does not understand the spec of run .*training\.from_later"):
            request(newer.id)
    assert newer.id in {run.id for run in client.runs()}

    tables.execute("UPDATE runs SET spec = spec #- '{training,from_later}' WHERE id = %s", newer.id)
    client.resume(newer.id)
    other.deliver("a")
    assert newer.claim("a").run_id == newer.id
