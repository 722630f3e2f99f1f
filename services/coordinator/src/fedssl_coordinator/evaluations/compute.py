"""Judging: it needs torch, so only the process that does it imports this module.

Everything is written on the connection that holds the evaluation's lock: a process that has lost the lock, and so may
have a successor, can write no more. No transaction is open while it computes.
"""

import time
from uuid import UUID

import structlog
from sqlalchemy import Connection

from fedssl import tracing
from fedssl.artifacts.tensors import LazyTensors
from fedssl.data import choose_images, conform
from fedssl.errors import Cancelled, DataError, SpecError
from fedssl.image_files import open_labelled
from fedssl.judging import RESULTS, Labelled, judge, load_encoder
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.artifacts.service import store
from fedssl_coordinator.celery_app import is_stopping
from fedssl_coordinator.db import transaction
from fedssl_coordinator.device import chosen_device, free_cached, set_threads
from fedssl_coordinator.evaluations import repository, service
from fedssl_coordinator.evaluations.service import Begun
from fedssl_coordinator.logs import say_about

log = structlog.get_logger(__name__)

PROGRESS_SECONDS = 1.0  # how often Postgres hears of it


def evaluate(connection: Connection, evaluation_id: UUID) -> None:
    """Work on an evaluation whose lock `connection` holds, from the measure at which the last try left it.

    Killed at any moment and called again, it gives the same numbers. What it raises is a failure that may pass.
    """
    with transaction(connection) as session:
        begun = service.begin(session, evaluation_id)
    if begun is None:
        return
    telling = _Telling(connection, begun)
    say_about(run=str(begun.run.id), round=begun.evaluation.round_number)
    try:
        with tracing.round_span("evaluate", begun.run.id, begun.evaluation.round_number):
            _judge(begun, telling)
    except Cancelled as error:
        log.info("evaluation.left", evaluation=str(evaluation_id), reason=str(error))
        if telling.is_leaving:
            with transaction(connection) as session:
                service.note_departure(session, evaluation_id)
    except (SpecError, DataError) as error:
        with transaction(connection) as session:
            service.fail(session, evaluation_id, str(error))
    else:
        with transaction(connection) as session:
            service.complete(session, evaluation_id, telling.results)


def _judge(begun: Begun, telling: "_Telling") -> None:
    config, spec = JudgingConfig.model_validate(begun.evaluation.config), RunSpec.model_validate(begun.run.spec)
    left = tuple(measure for measure in config.measures if not telling.results.keys() >= set(RESULTS[measure]))
    if not left:
        return
    set_threads()
    try:
        judge(
            load_encoder(LazyTensors(store().path(begun.evaluation.model)), spec),
            _labelled(begun, config, spec),
            config.model_copy(update={"measures": left}),
            spec.data,
            device=chosen_device(),
            on_progress=telling.on_progress,
            on_results=telling.on_results,
        )
    finally:
        free_cached()


def _labelled(begun: Begun, config: JudgingConfig, spec: RunSpec) -> Labelled:
    """The images that a simulation of the spec would choose, in the shape of the run's."""
    splits = open_labelled(store().path(begun.evaluation.dataset_digest))
    train, test = (
        conform(images.subset(choose_images(len(images), limit, spec.seed)), spec.data)
        for images, limit in zip(splits, (config.max_train, config.max_test), strict=True)
    )
    return Labelled(train, test)


class _Telling:
    """Writes where one try stands, and hears that it is called off."""

    def __init__(self, connection: Connection, begun: Begun) -> None:
        self.results = service.results_so_far(begun.evaluation)
        self.is_leaving = False
        self._connection = connection
        self._id = begun.evaluation.id
        self._told_at = float("-inf")

    def on_progress(self, what: str, share: float | None) -> None:
        """Raises Cancelled where the evaluation was called off or this process is about to end."""
        self.is_leaving = is_stopping.is_set()
        if self.is_leaving:
            raise Cancelled("this process was asked to end")
        if time.monotonic() - self._told_at < PROGRESS_SECONDS:
            return
        self._told_at = time.monotonic()
        self._write({"doing": what, "share": share, "results": self.results})

    def on_results(self, results: dict[str, float]) -> None:
        """A measure is done, for good. It has come further than any try before, so what failed before is past."""
        self.results |= service.storable(results)
        self._write({"results": self.results}, num_tries=1, retry_at=None, reason=None)

    def _write(self, progress: dict[str, object], **values: object) -> None:
        with transaction(self._connection) as session:
            if not repository.set_while_running(session, self._id, progress=progress, **values):
                raise Cancelled("the evaluation was called off")
