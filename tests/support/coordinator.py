"""The API in this process, on a real socket, for tests that check one request at a time."""

import functools
import os
import shutil
import threading
import time
from pathlib import Path
from typing import Any, Self
from uuid import UUID

import httpx
from sqlalchemy import make_url
from sqlalchemy.exc import ArgumentError

from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.client import Client, Retry, Tls, WorkerClient
from fedssl.protocol.data import ServedShapes
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.policy import PolicyNotice
from fedssl.protocol.views import TokenCreate
from fedssl.protocol.work import Register
from support.environment import coordinator_environment
from support.openapi import api_document
from support.tables import Tables

# Most tests send more requests, and more with invalid tokens, than the limits allow.
UNLIMITED = {
    "FEDSSL_TOKEN_REQUESTS_PER_MINUTE": "0",
    "FEDSSL_ADDRESS_REQUESTS_PER_MINUTE": "0",
    "FEDSSL_FAILED_SIGN_INS_PER_MINUTE": "0",
    "FEDSSL_MAX_WAITING_PER_TOKEN": "1000",
    "FEDSSL_RECORDED_REFUSALS_PER_MINUTE": "0",
}


class Coordinator:
    """One API over one database. `advance` does by hand what the aggregator does."""

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        store: Path,
        *,
        tls: Tls | None = None,
        listening: dict[str, Any] | None = None,
        **environment: str,
    ) -> None:
        """Start the API. `listening` is for `fedssl_coordinator.http.server.ListenOptions`; `tls` is what clients
        here use."""
        self.store = store
        self.database_url = database_url
        self._tls = tls or Tls()
        self._listening = listening or {}
        environment = {**UNLIMITED, **environment}
        self._environment = coordinator_environment(database_url, redis_url, store, **environment)

    def __enter__(self) -> Self:
        self._before = dict(os.environ)
        os.environ.update(self._environment)
        clear_caches()
        from fedssl_coordinator.app import create_app
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.http.server import ListenOptions, Server, server_config
        from fedssl_coordinator.identity.tokens import service

        app = create_app()
        # Generating the document takes seconds. A test compares the committed one with the code's.
        app.openapi = api_document  # type: ignore[method-assign]
        config = server_config(app, ListenOptions(**{"host": "127.0.0.1", "port": 0, **self._listening}))
        config.timeout_graceful_shutdown = 1
        self._server = Server(config)
        self._thread = threading.Thread(target=self._server.run)
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        self.url = (
            f"{'https' if config.is_ssl else 'http'}://127.0.0.1:{self._server.servers[0].sockets[0].getsockname()[1]}"
        )
        with transaction() as session:
            self.admin_token = service.create(session, TokenCreate(role="admin")).secret
            self.operator_token = service.create(session, TokenCreate(role="operator")).secret
        self.client = Client(self.url, self.admin_token, retry=Retry(seconds=0), tls=self._tls)
        return self

    def __exit__(self, *_: object) -> None:
        self.client.close()
        self._server.should_exit = True
        self._thread.join()
        os.environ.clear()
        os.environ.update(self._before)
        clear_caches()

    def empty(self, tables: Tables) -> None:
        """Remove everything from the database and the store, except for the tokens that the coordinator began with."""
        kept = tables.query(
            "SELECT DISTINCT ON (role) role, secret_hash FROM tokens WHERE role IN ('admin', 'operator') "
            "ORDER BY role, created_at"
        )
        tables.clear()
        for row in kept:
            tables.execute(
                "INSERT INTO tokens (id, role, label, secret_hash) VALUES (gen_random_uuid(), %s, '', %s)", *row
            )
        for path in self.store.glob("*"):
            if path.name != "incoming":
                shutil.rmtree(path)

    def http(self, token: str | None = None, *, verify: Any = False) -> httpx.Client:
        """Return a bare HTTP client, an admin's by default, for requests that the typed clients would never send."""
        secret = self.admin_token if token is None else token
        return self.bare_http({"Authorization": f"Bearer {secret}"}, verify=verify)

    def bare_http(self, headers: dict[str, str] | None = None, *, verify: Any = False) -> httpx.Client:
        """Return a bare HTTP client without a token, unless `headers` have one."""
        # Reading no certificates saves most of the time that it takes to create a client.
        return httpx.Client(base_url=self.url, headers=headers, timeout=30, verify=verify, trust_env=False)

    def worker_token(self, client_id: str) -> str:
        """Return the secret of a new worker's token. Two requests per worker would take a fifth of many tests' time."""
        from fedssl_coordinator.core.db import transaction
        from fedssl_coordinator.identity.tokens import service

        with transaction() as session:
            return service.create(session, TokenCreate(role="worker", client_id=client_id)).secret

    def worker(
        self,
        client_id: str,
        *,
        register: bool = True,
        identity: str | None = None,
        policy: PolicyNotice | None = None,
        url: str = "",
    ) -> WorkerClient:
        """Return a worker's client with its own token, registered unless `register` is false.

        `url`: the address of a proxy in front of this coordinator.
        """
        worker = WorkerClient(url or self.url, self.worker_token(client_id), retry=Retry(seconds=0), tls=self._tls)
        if register:
            worker.register(
                Register(
                    worker_version="test",
                    methods={name: config.info.version for name, config in METHOD_CONFIGS.items()},
                    device="cpu",
                    num_images=None if policy is not None and policy.keeps_num_images else 1000,
                    channels=1,
                    image_size=8,
                    serves=ServedShapes(),
                    identity=identity,
                    policy=policy,
                )
            )
        return worker

    def tensors(self, digest: str) -> Tensors:
        """Return the tensors of an artifact in the store."""
        return load_tensors(self.store / digest[:2] / digest[2:4] / digest)

    def advance(self, run_id: UUID) -> None:
        """Do in this process what the aggregator does when it gets a task."""
        from fedssl_coordinator.aggregator.tasks import advance_run

        advance_run(str(run_id))

    def distil(self, run_id: UUID) -> None:
        """Do in this process what the worker of the queue `distill` does with the run's unfinished job."""
        from fedssl_coordinator.aggregator.tasks import distil

        job = self.client.run(run_id).distillation
        assert job is not None, "nothing to distil"
        distil(str(job.id))

    def evaluate(self, evaluation_id: UUID) -> None:
        """Do in this process what the worker of the queue `evaluate` does when it gets a task."""
        from fedssl_coordinator.aggregator.tasks import evaluate

        evaluate(str(evaluation_id))

    def compute_plans(self) -> None:
        """Compute the artifact plans that estimates wait for, as an aggregator does."""
        from fedssl_coordinator.aggregator import tasks
        from fedssl_coordinator.core import queues

        for key in queues.redis_connection().scan_iter("fedssl:plan-of:*"):
            tasks.compute_plan(key.decode().rpartition(":")[2])

    def notify(self) -> None:
        """Do in this process what the worker of the queue `notify` does every few seconds."""
        from fedssl_coordinator.aggregator.tasks import notify

        notify()


def caches_match_environment() -> bool:
    """Return whether the objects that modules cache, if any, match those for the present environment."""
    from fedssl_coordinator.core import db
    from fedssl_coordinator.core.settings import settings

    try:
        if settings.cache_info().currsize:
            variables = frozenset(item for item in os.environ.items() if item[0].startswith("FEDSSL_"))
            if settings() != _settings_of(variables):
                return False
        here = os.environ.get("FEDSSL_DATABASE_URL", "")
        return not db.engine.cache_info().currsize or db.engine().url == make_url(here)
    except (ValueError, ArgumentError):  # the environment is invalid, so the cached objects are from another one
        return False


@functools.lru_cache(maxsize=8)
def _settings_of(variables: frozenset[tuple[str, str]]) -> Any:
    """Return the settings of the present environment, which has these variables. Reading them takes milliseconds."""
    from fedssl_coordinator.core.settings import settings

    return settings.__wrapped__()


def clear_caches() -> None:
    """Clear the objects that the coordinator's modules cache per process, and close their database connections."""
    from fedssl_coordinator.core import db, enqueue, queues, settings
    from fedssl_coordinator.core import store as stores
    from fedssl_coordinator.federation.ledger_anchors import service as anchors
    from fedssl_coordinator.identity.openid import provider as openid

    for engine in (db.direct_engine, db.engine):
        if engine.cache_info().currsize:
            engine().dispose()
    for cached in (
        settings.settings,
        db.engine,
        db.direct_engine,
        db._factory,
        queues.redis_connection,
        enqueue._producers,
        stores.store,
        anchors._hour,
        openid.provider,
    ):
        cached.cache_clear()
