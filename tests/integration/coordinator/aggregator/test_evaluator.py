"""The queue `evaluate`, with its own process: rounds do not wait for it, and killing it changes no result."""

from collections.abc import Iterator

import psycopg
import pytest

from fedssl.protocol.states import JobState, Outcome, RunState
from fedssl.protocol.views import EvaluationView
from fedssl.simulation import simulate
from support.evaluated_runs import evaluated_spec, register_digits
from support.methods import method_spec, shards
from support.processes import Federation, federation
from support.servers import Servers

pytestmark = pytest.mark.integration

_LOCK = 4711  # used only by this test
# Blocks the process that writes a second result once the first is committed.
_STOP = f"""
CREATE FUNCTION stop_here() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
  IF NEW.progress->'results' ? 'knn' THEN PERFORM pg_advisory_xact_lock({_LOCK}); END IF;
  RETURN NEW;
END $$;
CREATE TRIGGER stop_here BEFORE UPDATE ON evaluations FOR EACH ROW EXECUTE FUNCTION stop_here();
"""


@pytest.fixture(scope="module")
def running(servers: Servers, database: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Yield a federation of three workers, without an evaluator."""
    folder, clients = tmp_path_factory.mktemp("federation"), shards(method_spec("fedsimclr"))
    with federation(database, servers.redis_url, folder, clients) as started:
        register_digits(started.client, folder)
        for name in started.clients:
            started.start(name)
        started.wait_for(lambda: sum(c.registered_at is not None for c in started.client.clients()) == 3, "workers")
        yield started


@pytest.mark.full
def test_rounds_do_not_wait_for_the_evaluator_and_killing_it_changes_no_result(
    running: Federation, database: str
) -> None:
    spec = evaluated_spec()
    run_id = running.client.create_run(spec).id
    running.wait_for(lambda: running.client.run(run_id).state == RunState.FINISHED, "the run's end")
    assert running.client.run(run_id).outcome == Outcome.COMPLETED

    def listed() -> list[EvaluationView]:
        return list(running.client.evaluations(run_id))

    assert [(row.round_number, row.state) for row in listed()] == [(n, JobState.QUEUED) for n in (0, 1, 2)]
    with psycopg.connect(database.replace("+psycopg", "", 1), autocommit=True) as blocker:
        blocker.execute(_STOP)
        blocker.execute("SELECT pg_advisory_lock(%s)", (_LOCK,))
        running.start("evaluator")
        blocked = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'advisory' AND query ~ 'UPDATE evaluations'"
        running.wait_for(lambda: blocker.execute(blocked).fetchall() == [(1,)], "an evaluator with a second result")
        [begun] = [row for row in listed() if row.state == JobState.RUNNING]
        assert begun.progress is not None
        assert list(begun.progress.results) == ["probe"]
        running.kill("evaluator")
    running.start("evaluator")
    running.wait_for(lambda: all(row.state == JobState.COMPLETED for row in listed()), "all evaluations")
    simulated = simulate(spec, running.clients).evaluations_by_round
    assert {row.round_number: row.results for row in listed()} == simulated
    events = list(running.client.event_log(run_id))
    assert [event.message for event in events if event.kind == "evaluation.resumed"] == ["continues after probe"]
    [stalled] = [event for event in events if event.kind == "evaluation.stalled"]
    assert "the aggregator ended while it computed" in stalled.message
