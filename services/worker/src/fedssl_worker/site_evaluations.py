"""Evaluates a round's encoder on this client's own labelled images, while there is no training to do."""

from collections.abc import Callable
from uuid import UUID

import structlog
import torch
from structlog.contextvars import bound_contextvars

from fedssl import tracing
from fedssl.backoff import Backoff
from fedssl.client import (
    ApiError,
    ClientError,
    Conflict,
    NotAllowed,
    NotAuthenticated,
    NotFound,
    UnknownEvaluation,
    WorkerClient,
)
from fedssl.data import ImageData
from fedssl.engine.devices import memory_errors_as
from fedssl.errors import DataError, FedSSLError
from fedssl.evaluation.site import Indices, SiteEvaluation, evaluate_at_site, evaluate_head
from fedssl.evaluation.site_heads import run_heads
from fedssl.models import encoder_of
from fedssl.protocol.site_work import SiteEvaluationItem
from fedssl_worker.backoff import TEMPORARY
from fedssl_worker.causes import reason_of
from fedssl_worker.data import OwnImages
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import LedgerError
from fedssl_worker.executor import Executor
from fedssl_worker.labels import OwnLabels

log = structlog.get_logger()


class SiteEvaluations:
    """Answers the evaluations that the coordinator has for this site, one by one."""

    def __init__(
        self,
        client: WorkerClient,
        executor: Executor,
        egress: Egress,
        images: OwnImages,
        labels: OwnLabels | None,
        device: torch.device,
        backoff: Backoff,
        before_evaluation: Callable[[], None] = lambda: None,
    ) -> None:
        """Set up the evaluations. `before_evaluation` is called before the images are used, and may replace them."""
        self._client = client
        self._executor = executor
        self._egress = egress
        self._images = images
        self._labels = labels
        self._device = device
        self._backoff = backoff
        self._before_evaluation = before_evaluation

    def answer_next(self) -> None:
        """Answer the oldest evaluation, if there is one.

        Raises the errors of requests that may succeed later: until then, the evaluation stays offered.
        """
        try:
            item = self._client.claim_site_evaluation()
        except UnknownEvaluation as error:
            self._refuse(error.evaluation_id, error.round_number, str(error))
            return
        if item is None:
            return
        with (
            bound_contextvars(run=str(item.run_id), round=item.round_number),
            tracing.round_span("site evaluation", item.run_id, item.round_number, client=item.client_id),
        ):
            self._answer(item)

    def _answer(self, item: SiteEvaluationItem) -> None:
        log.info("site_evaluation.claimed", evaluation=str(item.evaluation_id))
        try:
            fewest = self._egress.evaluation_min_count(item)
            found = self._evaluated(item, fewest)
            answered = self._egress.send_counts(item, found)
            log.info("site_evaluation.answered", state=answered.state.value, num_test=found.counts.num_test)
            self._backoff.reset()
        except (NotAuthenticated, NotAllowed, *TEMPORARY):
            raise
        except (NotFound, Conflict) as error:  # it was answered before, or its weights were removed
            if not error.slug:
                raise
            log.warning("site_evaluation.ended", reason=str(error))
            self._backoff.wait()
        except ClientError as error:
            if not (isinstance(error, ApiError) and error.slug):
                raise  # the response is a proxy's
            self._refuse_item(item, str(error))
        except (LedgerError, OSError) as error:  # the owner can repair that, so the evaluation stays offered
            log.error("site_evaluation.delayed", reason=str(error))
            self._backoff.wait()
        except FedSSLError as error:
            self._refuse_item(item, reason_of(error))
        except Exception as error:  # the process loop: an error in one evaluation must not end the worker
            log.exception("site_evaluation.failed")
            # The message may quote files of this machine, so the reason has only the error's type.
            self._refuse_item(item, f"the worker failed unexpectedly ({type(error).__name__}): see its log")
            if isinstance(error, torch.AcceleratorError):
                raise  # this process can no longer use the device; a new one can

    def _evaluated(self, item: SiteEvaluationItem, fewest: int) -> SiteEvaluation:
        """Return this site's counts, and its own classifier if it has one to send.

        Raises DataError, CannotTrain, ArtifactError and ClientError.
        """
        config = item.spec.site_evaluation
        if config is None:
            raise DataError("the run's spec has no evaluation at the sites")
        if self._labels is None:
            raise DataError("this site has no labels: its worker was started without --labels")
        self._before_evaluation()
        labels = self._labels.for_run(config.site_config)
        prepared = self._images.prepared(item.spec.data)
        labels, images = labels.without(prepared.unreadable), prepared.data.images

        def take(positions: Indices) -> ImageData:
            return ImageData(images[torch.from_numpy(positions).to(images.device)].cpu().numpy())

        weights, spec = self._executor.weights_of(item), item.spec
        remedy = "lower evaluation.max_train and evaluation.max_test"
        with memory_errors_as(DataError(f"out of memory on {self._device.type}: {remedy}")):
            encoder = encoder_of(weights, spec.model.encoder, spec.data).to(self._device)
            site = (encoder, take, labels, spec, item.client_id)
            if item.head is not None:
                return SiteEvaluation(evaluate_head(*site, item.head, min_count=fewest, device=self._device))
            heads = run_heads(config.site_config, weights, self._executor.state_of(item))
            return evaluate_at_site(*site, heads=heads, min_count=fewest, device=self._device)

    def _refuse_item(self, item: SiteEvaluationItem, reason: str) -> None:
        self._refuse(item.evaluation_id, item.round_number, reason)

    def _refuse(self, evaluation_id: UUID, round_number: int, reason: str) -> None:
        log.warning("site_evaluation.refused", reason=reason)
        try:
            self._egress.refuse_evaluation(evaluation_id, round_number, reason)
        except (NotFound, Conflict) as error:
            if not error.slug:
                raise
            log.info("site_evaluation.ended", reason=str(error))
