"""A long run of many clients, written directly into Postgres. The web page must stay fast with it."""

from collections.abc import Sequence
from datetime import UTC, datetime
from uuid import UUID, uuid4

from psycopg.types.json import Jsonb

from support.federation import tiny_spec
from support.tables import Tables

METRICS = ("loss", "divergence", "effective_rank")
_DIGEST = "ab" * 32
_FEW = 1000  # assignments for which Postgres needs no statistics, which take longer to gather than the rows to insert

_CLIENTS = """
INSERT INTO clients (id, registered_at, last_seen_at, device, num_images, channels, image_size, worker_version)
SELECT 'site-' || lpad(c::text, 3, '0'), now() - interval '9 days', now(), 'cpu, 2 threads', 1000 + c, 1, 8, 'test'
FROM generate_series(1, %(clients)s) c ON CONFLICT DO NOTHING
"""
_ROUNDS = """
INSERT INTO rounds (id, run_id, number, attempt, state, verdict, reason, broadcast, opened_at, deadline, closed_at)
SELECT gen_random_uuid(), %(run)s, r, 1,
  CASE WHEN r = %(rounds)s THEN 'open' ELSE 'closed' END,
  CASE WHEN r = %(rounds)s THEN NULL WHEN r %% 97 = 3 THEN 'failed' WHEN r %% 41 = 7 THEN 'skipped'
       WHEN r %% 11 = 2 THEN 'partial' ELSE 'aggregated' END,
  CASE WHEN r %% 97 = 3 THEN 'only 3 of 50 needed updates' END, %(digest)s,
  now() - (%(rounds)s - r + 1) * interval '10 minutes', now() + interval '1 hour',
  CASE WHEN r < %(rounds)s THEN now() - (%(rounds)s - r) * interval '10 minutes' END
FROM generate_series(1, %(rounds)s) r
"""
_ASSIGNMENTS = """
INSERT INTO assignments (id, run_id, round_id, round_number, client_id, attempt, state, reason, update_digest,
  num_examples, progress, offered_at, leased_at, lease_expires_at, closed_at)
SELECT gen_random_uuid(), run_id, round_id, number, client, 1, state,
  CASE state WHEN 'expired' THEN 'no heartbeat for 60 s' WHEN 'rejected' THEN 'encoder.0.weight holds NaN' END,
  CASE state WHEN 'accepted' THEN %(digest)s END, 1000,
  CASE state WHEN 'leased' THEN
    '{"phase": "training", "epoch": 0, "num_epochs": 2, "step": 31, "num_steps": 60}'::jsonb END,
  opened_at, opened_at + interval '5 seconds', now() + interval '1 minute',
  CASE WHEN state <> 'leased' THEN opened_at + (200 + c %% 90) * interval '1 second' END
FROM (
  SELECT r.run_id, r.id AS round_id, r.number, 'site-' || lpad(c::text, 3, '0') AS client, c, r.opened_at,
    CASE WHEN (c * 31 + r.number * 17) %% 97 = 3 THEN 'expired' WHEN (c * 7 + r.number) %% 211 = 5 THEN 'rejected'
         WHEN r.state = 'open' AND c %% 3 > 0 THEN 'leased' ELSE 'accepted' END AS state
  FROM rounds r, generate_series(1, %(clients)s) c WHERE r.run_id = %(run)s
) made
"""
_UPLOADS = """
INSERT INTO uploads (assignment_id, digest, created_at)
SELECT id, update_digest, closed_at FROM assignments WHERE run_id = %(run)s AND update_digest IS NOT NULL
"""
_METRICS = """
INSERT INTO metrics (run_id, round_number, client_id, name, value)
SELECT run_id, round_number, client_id, name,
  (1 + 0.2 * sin(hashtext(client_id || name))) * (0.3 + exp(-round_number / 90.0)) + 0.02 * random()
FROM assignments, unnest(%(names)s::text[]) name WHERE run_id = %(run)s AND state = 'accepted'
"""
_EVALUATIONS = """
INSERT INTO evaluations (id, run_id, round_number, model, dataset, dataset_digest, config, state, results,
  embedding_map, finished_at)
SELECT gen_random_uuid(), %(run)s, r, %(digest)s, 'large-test', %(digest)s,
  '{"dataset": "large-test", "embedding_map": "pca"}'::jsonb,
  'completed',
  jsonb_build_object('probe', 0.8 - 0.6 * exp(-r / 60.0), 'knn', 0.75 - 0.6 * exp(-r / 60.0),
    'effective_rank', 40 + r / 10.0,
    'alignment', 0.2 + 0.3 * (1 - exp(-r / 50.0)), 'uniformity', -1 - 2.5 * (1 - exp(-r / 120.0))),
  CASE WHEN r %% 25 = 0 THEN (
    SELECT jsonb_build_object('method', 'pca', 'class_names', '[]'::jsonb, 'labels', jsonb_agg(i %% 10),
      'points', jsonb_agg(jsonb_build_array(
        round((cos(0.63 * (i %% 10)) * r / 400 + 0.4 * sin(i * 12.9898))::numeric, 4),
        round((sin(0.63 * (i %% 10)) * r / 400 + 0.4 * sin(i * 78.233))::numeric, 4))))
    FROM generate_series(1, 2000) i) END, now()
FROM generate_series(0, %(rounds)s - 1, 5) r
"""
_EVENTS = """
INSERT INTO events (at, kind, run_id, round_number, message)
SELECT closed_at, 'round.closed', run_id, number, 'round ' || number || ' closed'
FROM rounds WHERE run_id = %(run)s AND state = 'closed' ORDER BY number
"""

_END = (
    "UPDATE assignments SET state = 'expired', closed_at = now(), reason = 'the round was closed' "
    "WHERE run_id = %(run)s AND state = 'leased'",
    "UPDATE rounds SET state = 'closed', verdict = 'partial', closed_at = now() "
    "WHERE run_id = %(run)s AND state = 'open'",
)


def add_large_run(
    tables: Tables, *, num_rounds: int, num_clients: int, metrics: Sequence[str] = METRICS, is_live: bool = True
) -> UUID:
    """Insert a running run whose last round is open, or a completed run if `is_live` is false, and return its id.

    Writes nothing to the store.
    """
    tables.execute("SET session_replication_role = replica")  # skips the checks of half a million foreign keys
    run = uuid4()
    evaluation = {"dataset": "large-test", "every": 5}
    spec = tiny_spec(
        name="large", num_rounds=num_rounds, evaluation=evaluation, cohort={"min_updates": num_clients // 4}
    )
    values = {"run": run, "rounds": num_rounds, "clients": num_clients, "digest": _DIGEST, "names": list(metrics)}
    tables.execute("INSERT INTO artifacts (digest, num_bytes) VALUES (%s, 2560000) ON CONFLICT DO NOTHING", _DIGEST)
    tables.execute(
        "INSERT INTO evaluation_datasets (name, digest, num_train, num_test, num_classes, channels, image_size) "
        "VALUES ('large-test', %s, 100, 100, 10, 1, 8) ON CONFLICT DO NOTHING",
        _DIGEST,
    )
    tables.execute(
        "INSERT INTO runs (id, name, method, method_version, state, outcome, spec, num_rounds, rounds_closed, "
        "broadcast, initial_broadcast, started_at, finished_at) "
        "VALUES (%s, 'large', %s, 1, %s, %s, %s, %s, %s, %s, %s, now() - interval '4 days', %s)",
        run, spec.method.name, "running" if is_live else "finished", None if is_live else "completed",
        Jsonb(spec.model_dump(mode="json")), num_rounds, num_rounds - is_live, _DIGEST, _DIGEST,
        None if is_live else datetime.now(UTC),
    )  # fmt: skip
    for statement in (_CLIENTS, _ROUNDS, _ASSIGNMENTS, _UPLOADS, _METRICS, _EVALUATIONS, _EVENTS):
        tables.execute_named(statement, values)
    if not is_live:
        for statement in _END:
            tables.execute_named(statement, values)
    tables.execute("SET session_replication_role = origin")
    if num_rounds * num_clients > _FEW:
        tables.execute("ANALYZE")
    return run
