"""Runs an evaluation. It imports torch, so only the process that evaluates imports it.

Everything is written on the connection that holds the evaluation's lock: a process that has lost the lock, and so may
have a successor, cannot write any more. No transaction is open while it computes.
"""

import time
from typing import Any
from uuid import UUID

import numpy as np
import structlog
from sqlalchemy import Connection
from torch import Tensor

from fedssl import tracing
from fedssl.data import ImageData, choose_images
from fedssl.data.dataset_files import ImageSelection, read_labelled
from fedssl.data.images import prepare
from fedssl.errors import Cancelled, DataError, SpecError
from fedssl.evaluation import aligned_map, labels_of
from fedssl.evaluation.suite import RESULTS, Labelled, detailed_evaluation, load_encoder
from fedssl.protocol.chance import Chance, chance_of
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl.run_files import finite
from fedssl_coordinator.aggregator.device import chosen_device, free_cached, set_threads
from fedssl_coordinator.aggregator.stored import read_stored, stored_tensors
from fedssl_coordinator.core.celery_app import is_stopping
from fedssl_coordinator.core.db import transaction
from fedssl_coordinator.core.logs import say_about
from fedssl_coordinator.core.models import Evaluation, Run
from fedssl_coordinator.federation import retries
from fedssl_coordinator.federation.evaluations import service
from fedssl_coordinator.federation.jobs import repository as job_rows
from fedssl_coordinator.federation.jobs import service as jobs

log = structlog.get_logger(__name__)

MAP_POINTS = 2_000  # the most points that a page can draw, and that t-SNE can place in seconds
MAP_NAMES, MAP_NAME_LENGTH = 100, 60  # classes that a map names
MAP_DIGITS = 4  # after the decimal point: coordinates are around 1
PROGRESS_SECONDS = 1.0  # between two writes to Postgres


def evaluate(connection: Connection, evaluation_id: UUID) -> None:
    """Work on an evaluation whose lock `connection` holds, from the measure at which the last attempt left it.

    If it is killed at any moment and called again, it gives the same numbers. Exceptions are temporary failures.
    """
    with transaction(connection) as session:
        started = service.begin(session, evaluation_id)
        if started is None:
            return
        run, evaluation = started.run, started.job
        map_before = service.map_before(session, evaluation)
    progress = _Progress(connection, evaluation)
    say_about(run=str(run.id), round=evaluation.round_number)
    try:
        with tracing.round_span("evaluate", run.id, evaluation.round_number):
            chance, embedding_map = _evaluate(run, evaluation, map_before, progress)
    except Cancelled as error:
        log.info("evaluation.left", evaluation=str(evaluation_id), reason=str(error))
        if progress.is_leaving:
            with transaction(connection) as session:
                jobs.record_departure(session, Evaluation, evaluation_id)
    except (SpecError, DataError) as error:
        with transaction(connection) as session:
            service.fail(session, evaluation_id, str(error))
    else:
        with transaction(connection) as session:
            service.complete(session, evaluation_id, progress.results, chance, embedding_map)


def _evaluate(
    run: Run, evaluation: Evaluation, map_before: dict[str, Any] | None, progress: "_Progress"
) -> tuple[Chance | None, dict[str, Any] | None]:
    """Measure what is left, and return chance and the map.

    The map is made last, and lost if this process ends before it is stored.
    """
    config, spec = JudgingConfig.model_validate(evaluation.config), RunSpec.model_validate(run.spec)
    left = tuple(measure for measure in config.measures if not progress.results.keys() >= set(RESULTS[measure]))
    set_threads()
    try:
        labelled = _labelled(evaluation, config, spec)
        chance = chance_of(labels_of(labelled.test).tolist())
        if not left and config.embedding_map is None:
            return chance, None
        found = detailed_evaluation(
            load_encoder(stored_tensors(evaluation.model, f"model after round {evaluation.round_number}"), spec),
            labelled,
            config.model_copy(update={"measures": left}),
            spec.data,
            device=chosen_device(),
            on_progress=progress.on_progress,
            on_results=progress.on_results,
        )
        if config.embedding_map is None or len(labelled.test) < 2 or not bool(found.test_features.isfinite().all()):
            return chance, None
        progress.on_progress(f"map by {config.embedding_map}", None)
        return chance, _embedding_map(config, found.test_features, labelled.test, map_before, spec.seed)
    finally:
        free_cached()


def _embedding_map(
    config: JudgingConfig, h_NH: Tensor, images: ImageData, map_before: dict[str, Any] | None, seed: int
) -> dict[str, Any]:
    """Return the map to store. It shows the same images in every round: the test set and the seed are the run's."""
    assert config.embedding_map is not None
    chosen = choose_images(len(images), MAP_POINTS, seed)
    before = None if map_before is None else np.array(map_before["points"])
    points_N2 = aligned_map(h_NH.cpu()[chosen], config.embedding_map, before, seed=seed % 2**32)
    return {
        "method": config.embedding_map,
        "labels": labels_of(images)[chosen].tolist(),
        "class_names": [name[:MAP_NAME_LENGTH] for name in images.class_names if len(images.class_names) <= MAP_NAMES],
        "points": points_N2.round(MAP_DIGITS).tolist(),
    }


def _labelled(evaluation: Evaluation, config: JudgingConfig, spec: RunSpec) -> Labelled:
    """Return the images that a simulation of the spec would choose, in the shape of the run's images."""
    digest = evaluation.dataset_digest
    choices = (ImageSelection(config.max_train, spec.seed), ImageSelection(config.max_test, spec.seed))
    what = f"file of the evaluation data set {evaluation.dataset}"
    train, test = read_stored(digest, what, lambda path: read_labelled(path, digest, choices))
    return Labelled(prepare(train, spec.data), prepare(test, spec.data))


class _Progress:
    """Writes the progress of one attempt, and ends it if the evaluation is cancelled."""

    def __init__(self, connection: Connection, evaluation: Evaluation) -> None:
        self.results = service.results_so_far(evaluation)
        self.is_leaving = False
        self._connection = connection
        self._id = evaluation.id
        self._written_at = float("-inf")

    def on_progress(self, step: str, share: float | None) -> None:
        """Write the current step. Raises Cancelled if the evaluation was cancelled or this process is about to end."""
        self.is_leaving = is_stopping.is_set()
        if self.is_leaving:
            raise Cancelled("this process was asked to end")
        if time.monotonic() - self._written_at < PROGRESS_SECONDS:
            return
        self._written_at = time.monotonic()
        self._write({"doing": step, "share": share, "results": self.results})

    def on_results(self, results: dict[str, float]) -> None:
        """Write the results of a measure. No earlier attempt came this far, so the earlier failures are over."""
        self.results |= finite(results)
        self._write({"results": self.results}, **retries.PROGRESS)

    def _write(self, progress: dict[str, object], **values: object) -> None:
        with transaction(self._connection) as session:
            if not job_rows.set_while_running(session, Evaluation, self._id, progress=progress, **values):
                raise Cancelled("the evaluation was cancelled")
