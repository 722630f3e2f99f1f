"""Judging: it needs torch, so only the process that does it imports this module.

Everything is written on the connection that holds the evaluation's lock: a process that has lost the lock, and so may
have a successor, can write no more. No transaction is open while it computes.
"""

import time
from typing import Any
from uuid import UUID

import numpy as np
import structlog
from sqlalchemy import Connection
from torch import Tensor

from fedssl import tracing
from fedssl.artifacts.tensors import LazyTensors
from fedssl.data import ImageData, choose_images, conform
from fedssl.data.dataset_files import open_labelled
from fedssl.errors import Cancelled, DataError, SpecError
from fedssl.evaluation import aligned_map, labels_of
from fedssl.evaluation.suite import RESULTS, Labelled, examine, load_encoder
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl_coordinator.aggregator.device import chosen_device, free_cached, set_threads
from fedssl_coordinator.core.celery_app import is_stopping
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.store import store
from fedssl_coordinator.federation.evaluations import repository, service
from fedssl_coordinator.federation.evaluations.service import Begun

log = structlog.get_logger(__name__)

MAP_POINTS = 2_000  # of a map: what a page can draw, and t-SNE can place in seconds
MAP_NAMES, MAP_NAME_LENGTH = 100, 60  # classes that are named on it
MAP_DIGITS = 4  # after the point, of coordinates around 1
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
            drawn = _judge(begun, telling)
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
            service.complete(session, evaluation_id, telling.results, drawn)


def _judge(begun: Begun, telling: "_Telling") -> dict[str, Any] | None:
    """Measure what is left; the map is drawn last, and lost where this process ends before it is kept."""
    config, spec = JudgingConfig.model_validate(begun.evaluation.config), RunSpec.model_validate(begun.run.spec)
    left = tuple(measure for measure in config.measures if not telling.results.keys() >= set(RESULTS[measure]))
    if not left and config.embedding_map is None:
        return None
    set_threads()
    try:
        labelled = _labelled(begun, config, spec)
        found = examine(
            load_encoder(LazyTensors(store().path(begun.evaluation.model)), spec),
            labelled,
            config.model_copy(update={"measures": left}),
            spec.data,
            device=chosen_device(),
            on_progress=telling.on_progress,
            on_results=telling.on_results,
        )
        if config.embedding_map is None or len(labelled.test) < 2 or not bool(found.test_features.isfinite().all()):
            return None
        telling.on_progress(f"map by {config.embedding_map}", None)
        return _drawn(begun, config, found.test_features, labelled.test, spec.seed)
    finally:
        free_cached()


def _drawn(begun: Begun, config: JudgingConfig, h_NH: Tensor, images: ImageData, seed: int) -> dict[str, Any]:
    """The map as it is kept: of the same images in every round, as the test set and the seed are the run's."""
    assert config.embedding_map is not None
    chosen = choose_images(len(images), MAP_POINTS, seed)
    before = None if begun.map_before is None else np.array(begun.map_before["points"])
    points_N2 = aligned_map(h_NH.cpu()[chosen], config.embedding_map, before, seed=seed % 2**32)
    return {
        "method": config.embedding_map,
        "labels": labels_of(images)[chosen].tolist(),
        "class_names": [name[:MAP_NAME_LENGTH] for name in images.class_names if len(images.class_names) <= MAP_NAMES],
        "points": points_N2.round(MAP_DIGITS).tolist(),
    }


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
