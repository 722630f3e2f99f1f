"""The operator's client: runs, data sets, methods, clients and tokens."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote
from uuid import UUID, uuid4

from fedssl.client.artifacts import ArtifactMethods
from fedssl.client.base import BaseClient
from fedssl.client.connection import parse, request_body
from fedssl.client.datasets import DatasetMethods
from fedssl.client.environment import target_of
from fedssl.client.errors import ApiError, RunNotFinished, Unreachable
from fedssl.client.pull import OnFetch, PulledRun, pull
from fedssl.client.retry import DEFAULT_RETRY, Retry, RetryTimer, is_temporary
from fedssl.client.sse import ServerSentEvent, parse_events
from fedssl.client.tls import Tls
from fedssl.client.weights import WeightMethods
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.explanation import spec_of
from fedssl.protocol.notifications import DestinationKind, Topic
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl.protocol.tokens import DAY_SECONDS, LastingRole
from fedssl.protocol.views import (
    AssignmentView,
    ClientEdit,
    ClientView,
    CrossSiteView,
    DeliveryView,
    DestinationCreate,
    DestinationCreated,
    DestinationView,
    DimensionAssignmentView,
    DistillationJobView,
    EmbeddingMapView,
    EnrolmentCreate,
    EstimateRequest,
    EstimateView,
    EvaluationCreate,
    EvaluationView,
    EventView,
    FederationCardView,
    IdentityConfirmation,
    LedgerAnchorView,
    MethodView,
    MetricView,
    ProjectCreate,
    ProjectView,
    RoundView,
    RunContinue,
    RunCreate,
    RunEdit,
    RunSummary,
    RunView,
    SiteEvaluationsCreate,
    SiteRoundView,
    TokenCreate,
    TokenCreated,
    TokenView,
)

WAIT_POLL_SECONDS, MOST_POLL_SECONDS = 0.5, 10.0
_COUNTS_ONLY = {"assignments": "false"}  # an older coordinator ignores it
_DESTINATIONS = "/v1/notification-destinations"
LAST_EVENT = "run.finished"
STREAM_SECONDS = 60.0  # the coordinator sends a comment every 15 s, so silence for this long means a dead connection


class Client(ArtifactMethods, DatasetMethods, WeightMethods, BaseClient):
    """An operator's view of one coordinator.

    Args:
        url: the coordinator's address, for example `http://127.0.0.1:8000`.
        token: an admin's, an operator's or a viewer's. It appears in no repr, log or error.
        timeout: seconds to wait for a connection and for each piece of a response.
        retry: for how long to retry requests that fail for a temporary reason.
        transport: a replacement for the network, for tests.

    Every method raises `Unreachable`, `BadAnswer` or an `ApiError`.
    """

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ, *, retry: Retry = DEFAULT_RETRY) -> Self:
        """Return a client for the coordinator that the environment names, or else for this folder's `fedssl up`.

        Reads FEDSSL_URL; FEDSSL_TOKEN, or the file FEDSSL_TOKEN_FILE; FEDSSL_CA_FILE, FEDSSL_CLIENT_CERT,
        FEDSSL_CLIENT_KEY and FEDSSL_INSECURE_HTTP. Without FEDSSL_URL it uses the address in ./.fedssl. The token of
        that folder is sent only to its own coordinator. Raises ClientError.
        """
        target = target_of(environment)
        return cls(target.url, target.token, retry=retry, tls=Tls.from_environment(environment))

    # Runs

    def wait(self, run_id: UUID, *, timeout_seconds: float | None = None, through_pauses: bool = False) -> RunView:
        """Block until a run has finished, however it ended (its `outcome`), or is paused, and return it.

        With `through_pauses`, it continues to wait while the run is paused. Raises RunNotFinished, which has the run,
        if `timeout_seconds` have passed.
        """
        begun = time.monotonic()
        end = None if timeout_seconds is None else begun + timeout_seconds
        while True:
            run = self.run(run_id)
            if run.state is RunState.FINISHED or (run.state is RunState.PAUSED and not through_pauses):
                return run
            now = time.monotonic()
            if end is not None and now >= end:
                raise RunNotFinished(run)
            pause = min(MOST_POLL_SECONDS, max(WAIT_POLL_SECONDS, 0.01 * (now - begun)))
            time.sleep(pause if end is None else min(pause, end - now))

    def pull(
        self,
        run_id: UUID,
        folder: Path | None = None,
        *,
        initial: bool = False,
        on_fetch: OnFetch = lambda: (lambda count: None, lambda size: None),
    ) -> PulledRun:
        """Download a run's newest weights, the encoder, the spec, a model card and its lineage to a folder.

        By default the folder is ./run-ID. With `initial`, only the weights before training and the spec are downloaded.
        `fedssl.models.load_encoder(folder)` loads the encoder. Raises NotFound if the run has no weights yet, and
        ClientError if the folder holds another run.
        """
        return pull(self, run_id, folder, initial=initial, on_fetch=on_fetch)

    def create_run(
        self,
        spec: RunSpec | Mapping[str, Any],
        *,
        start: bool = True,
        idempotency_key: str | None = None,
        project: str | None = None,
    ) -> RunView:
        """Submit a run. Repeated requests with the same key return the same run; None generates a new key.

        By default the project is that of the token, or else `default`.
        """
        return self._connection.call(
            "POST",
            "/v1/runs",
            RunView,
            body=request_body(RunCreate, spec=spec_of(spec), start=start, project=project),
            headers={"Idempotency-Key": idempotency_key or str(uuid4())},
        )

    def runs(self, state: RunState | None = None) -> Iterator[RunSummary]:
        """Yield all runs, or those in one state, newest first."""
        return self._connection.pages("/v1/runs", RunSummary, {} if state is None else {"state": state.value})

    def run(self, run_id: UUID, *, assignments: bool = True) -> RunView:
        """Return one run in full. Without `assignments`, its round has only their counts."""
        return self._connection.call("GET", f"/v1/runs/{run_id}", RunView, params={} if assignments else _COUNTS_ONLY)

    def start(self, run_id: UUID) -> RunView:
        """Start a run that was created without being started."""
        return self._steer(run_id, "start")

    def pause(self, run_id: UUID) -> RunView:
        """Pause a run: no further round opens, but the round in progress continues."""
        return self._steer(run_id, "pause")

    def resume(self, run_id: UUID) -> RunView:
        """Resume a paused run."""
        return self._steer(run_id, "resume")

    def stop(self, run_id: UUID) -> RunView:
        """Stop a run permanently. Its newest model is kept."""
        return self._steer(run_id, "stop")

    def continue_run(self, run_id: UUID, num_rounds: int) -> RunView:
        """Train a completed run further, until it has `num_rounds` rounds in total. A repeated request changes nothing.

        Raises Conflict if the run has not completed, if its state is lost, or if its rounds would have been different
        in a longer run, and NotFound if it was deleted.
        """
        body = request_body(RunContinue, num_rounds=num_rounds)
        return self._connection.call("POST", f"/v1/runs/{run_id}/continue", RunView, body=body)

    def edit_run(
        self, run_id: UUID, *, name: str | None = None, tags: Sequence[str] | None = None, notes: str | None = None
    ) -> RunView:
        """Change a run's displayed name, tags or notes. None changes nothing; `tags` replace the earlier ones."""
        body = request_body(RunEdit, name=name, tags=None if tags is None else tuple(tags), notes=notes)
        return self._connection.call("PATCH", f"/v1/runs/{run_id}", RunView, body=body)

    def delete_run(self, run_id: UUID) -> None:
        """Delete a finished run, with its weights. Raises Conflict if it is not finished."""
        self._connection.send("DELETE", f"/v1/runs/{run_id}")

    def _steer(self, run_id: UUID, verb: str) -> RunView:
        return self._connection.call("POST", f"/v1/runs/{run_id}/{verb}", RunView)

    def rounds(self, run_id: UUID, *, assignments: bool = True) -> Iterator[RoundView]:
        """Iterate over a run's rounds, oldest first. Without `assignments`, each has only their counts."""
        return self._connection.pages(f"/v1/runs/{run_id}/rounds", RoundView, {} if assignments else _COUNTS_ONLY)

    def assignments(self, run_id: UUID, round_number: int) -> Iterator[AssignmentView]:
        """Iterate over a round's assignments, by client and attempt. Raises NotFound."""
        return self._connection.pages(f"/v1/runs/{run_id}/rounds/{round_number}/assignments", AssignmentView)

    def metrics(self, run_id: UUID, name: str | None = None) -> Iterator[MetricView]:
        """Yield a run's metrics, or those with one name."""
        return self._connection.pages(f"/v1/runs/{run_id}/metrics", MetricView, {} if name is None else {"name": name})

    def dimension_assignments(self, run_id: UUID) -> Iterator[DimensionAssignmentView]:
        """Yield the embedding dimensions that are assigned to each client; nothing if the method assigns none."""
        return self._connection.pages(f"/v1/runs/{run_id}/dimension-assignments", DimensionAssignmentView)

    def distillation_jobs(self, run_id: UUID) -> Iterator[DistillationJobView]:
        """Yield the trainings on the coordinator in a run, oldest first."""
        return self._connection.pages(f"/v1/runs/{run_id}/distillation-jobs", DistillationJobView)

    def distillation_job(self, job_id: UUID) -> DistillationJobView:
        """Return one training on the coordinator."""
        return self._connection.call("GET", f"/v1/distillation-jobs/{job_id}", DistillationJobView)

    def cancel_distillation(self, job_id: UUID) -> DistillationJobView:
        """Cancel a training on the coordinator and pause its run. A resumed run starts it again from scratch."""
        return self._connection.call("POST", f"/v1/distillation-jobs/{job_id}/cancel", DistillationJobView)

    def estimate(self, spec: RunSpec, project: str | None = None) -> EstimateView:
        """Estimate the bytes and the time of a run without creating it. What is not known yet is None."""
        body = request_body(EstimateRequest, spec=spec, project=project)
        return self._connection.call("POST", "/v1/estimates", EstimateView, body=body)

    def request_evaluation(
        self, run_id: UUID, config: JudgingConfig | Mapping[str, Any], round_number: int | None = None
    ) -> EvaluationView:
        """Request an evaluation of the encoder of a round, by default the newest. A repeated request is not an error.

        Raises Conflict if the round is not closed yet or the run has no encoder to evaluate, and Rejected.
        """
        body = request_body(EvaluationCreate, config=config, round_number=round_number)
        return self._connection.call("POST", f"/v1/runs/{run_id}/evaluations", EvaluationView, body=body)

    def evaluations(self, run_id: UUID) -> Iterator[EvaluationView]:
        """Yield the evaluations of a run's encoders, by round."""
        return self._connection.pages(f"/v1/runs/{run_id}/evaluations", EvaluationView)

    def site_evaluations(self, run_id: UUID) -> Iterator[SiteRoundView]:
        """Yield the evaluations of a run's encoders at the sites, by round."""
        return self._connection.pages(f"/v1/runs/{run_id}/site-evaluations", SiteRoundView)

    def cross_site(self, run_id: UUID, round_number: int | None = None) -> CrossSiteView:
        """Return how each site's own classifier performs at every other site, by default in the newest round.

        Raises NotFound.
        """
        params = {} if round_number is None else {"round_number": round_number}
        return self._connection.call("GET", f"/v1/runs/{run_id}/cross-site", CrossSiteView, params=params)

    def request_site_evaluations(self, run_id: UUID, round_number: int | None = None) -> SiteRoundView:
        """Ask the sites to evaluate the encoder of a round, by default the newest. A repeated request changes nothing.

        Sites that refused it, or missed it, are asked again. Raises Conflict if the round is not closed yet, or if the
        run has no evaluation at its sites.
        """
        body = request_body(SiteEvaluationsCreate, round_number=round_number)
        return self._connection.call("POST", f"/v1/runs/{run_id}/site-evaluations", SiteRoundView, body=body)

    def evaluation(self, evaluation_id: UUID) -> EvaluationView:
        """Return one evaluation of an encoder."""
        return self._connection.call("GET", f"/v1/evaluations/{evaluation_id}", EvaluationView)

    def evaluation_map(self, evaluation_id: UUID) -> EmbeddingMapView:
        """Return the map of representations that an evaluation has stored. Raises NotFound if it has none."""
        return self._connection.call("GET", f"/v1/evaluations/{evaluation_id}/map", EmbeddingMapView)

    def cancel_evaluation(self, evaluation_id: UUID) -> EvaluationView:
        """Cancel an evaluation."""
        return self._connection.call("POST", f"/v1/evaluations/{evaluation_id}/cancel", EvaluationView)

    def event_log(self, run_id: UUID, kind: str | None = None) -> Iterator[EventView]:
        """Yield the events of a run so far, or those of one kind, oldest first."""
        return self._connection.pages(f"/v1/runs/{run_id}/events", EventView, {} if kind is None else {"kind": kind})

    def events(self, run_id: UUID, after: int | None = None) -> Iterator[EventView]:
        """Yield a run's events as they happen, from the first or from the one after id `after`, until it has finished.

        A broken stream is resumed without a gap or a repetition. Raises Unreachable if the coordinator stays
        unreachable for longer than `retry` allows.
        """
        timer = RetryTimer(self._connection.retry)
        last = after
        was_finished = is_last = False
        while True:
            try:
                for sent in self._stream_once(run_id, last, timer.alive):
                    timer.progress()
                    event = parse(EventView, sent.data, "an event")
                    last, is_last = event.id, event.kind == LAST_EVENT
                    yield event
                if was_finished or is_last:  # a run that was resumed after a failure has an earlier last event
                    return
                was_finished = self.run(run_id, assignments=False).state is RunState.FINISHED
                if was_finished:
                    continue  # its last events may have come after the stream had ended
                raise Unreachable(f"{self.url} closed the event stream.")
            except (Unreachable, ApiError) as error:
                if not is_temporary(error):
                    raise
                timer.wait(error)

    def _stream_once(self, run_id: UUID, after: int | None, on_bytes: Callable[[], None]) -> Iterator[ServerSentEvent]:
        headers = {"Accept": "text/event-stream"} | ({} if after is None else {"Last-Event-ID": str(after)})
        path = f"/v1/runs/{run_id}/events/stream"
        with self._connection.stream(
            "GET", path, headers=headers, timeout=STREAM_SECONDS, bytes_per_second=None
        ) as response:
            yield from parse_events(_noting(response.iter_raw(), on_bytes))

    # Methods, clients, tokens

    def methods(self) -> Iterator[MethodView]:
        """Yield every method that the coordinator can run."""
        return self._connection.pages("/v1/methods", MethodView)

    def method(self, name: str) -> MethodView:
        """Return one method, with the JSON schema of its parameters."""
        return self._connection.call("GET", f"/v1/methods/{_segment(name)}", MethodView)

    def clients(self) -> Iterator[ClientView]:
        """Yield every data owner that the coordinator knows."""
        return self._connection.pages("/v1/clients", ClientView)

    def client(self, client_id: str) -> ClientView:
        """Return one data owner."""
        return self._connection.call("GET", f"/v1/clients/{_segment(client_id)}", ClientView)

    def data_card(self, project: str | None = None) -> FederationCardView:
        """Return what a project's sites disclose about their images, and their mean and deviation.

        If `project` is None, it is the caller's own, or else the default one.
        """
        path = "/v1/data-card" if project is None else f"/v1/data-card?project={_segment(project)}"
        return self._connection.call("GET", path, FederationCardView)

    def rename_client(self, client_id: str, display_name: str) -> ClientView:
        """Change a data owner's display name; an empty one removes it. The id stays, because seeds derive from it."""
        body = request_body(ClientEdit, display_name=display_name)
        return self._connection.call("PATCH", f"/v1/clients/{_segment(client_id)}", ClientView, body=body)

    def confirm_identity(self, client_id: str, identity: str) -> ClientView:
        """Allow a client to take part in secure rounds with the new identity key that its owner has confirmed."""
        body = request_body(IdentityConfirmation, identity=identity)
        return self._connection.call("POST", f"/v1/clients/{_segment(client_id)}/identity", ClientView, body=body)

    def revoke_client(self, client_id: str) -> ClientView:
        """Exclude a data owner: its tokens stop working, and no run selects it any more."""
        return self._connection.call("POST", f"/v1/clients/{_segment(client_id)}/revoke", ClientView)

    def ledger_anchors(self, client_id: str) -> Iterator[LedgerAnchorView]:
        """Yield the anchors of a data owner's ledger, which record how far it went, oldest first."""
        return self._connection.pages(f"/v1/clients/{_segment(client_id)}/ledger-anchors", LedgerAnchorView)

    def create_token(
        self,
        role: LastingRole,
        client_id: str | None = None,
        label: str = "",
        lifetime_seconds: int | None = None,
        project: str | None = None,
    ) -> TokenCreated:
        """Create a token that is valid for `lifetime_seconds`, or until it is revoked, and only in `project` if given.

        Only the response contains its secret, so the request is not repeated once it may have arrived.
        """
        body = request_body(
            TokenCreate, role=role, client_id=client_id, label=label, lifetime_seconds=lifetime_seconds, project=project
        )
        return self._connection.call("POST", "/v1/tokens", TokenCreated, body=body, idempotent=False)

    def create_enrolment_token(
        self, client_id: str, label: str = "", lifetime_seconds: int = DAY_SECONDS, project: str | None = None
    ) -> TokenCreated:
        """Create a single-use enrolment token for a data owner's worker. It replaces an unused one."""
        body = request_body(
            EnrolmentCreate, client_id=client_id, label=label, lifetime_seconds=lifetime_seconds, project=project
        )
        return self._connection.call("POST", "/v1/enrolment-tokens", TokenCreated, body=body, idempotent=False)

    def create_project(self, name: str) -> ProjectView:
        """Create a project. Does nothing if it exists."""
        return self._connection.call("POST", "/v1/projects", ProjectView, body=request_body(ProjectCreate, name=name))

    def projects(self) -> Iterator[ProjectView]:
        """Yield the projects that the token's owner may see, by name."""
        return self._connection.pages("/v1/projects", ProjectView)

    def tokens(self) -> Iterator[TokenView]:
        """Yield every token, without its secret."""
        return self._connection.pages("/v1/tokens", TokenView)

    def revoke_token(self, token_id: UUID) -> None:
        """Revoke a token."""
        self._connection.send("DELETE", f"/v1/tokens/{token_id}")

    # Notifications

    def create_notification_destination(
        self,
        kind: DestinationKind | str,
        target: str,
        topics: Sequence[Topic | str] = tuple(Topic),
        label: str = "",
        project: str | None = None,
    ) -> DestinationCreated:
        """Add a destination for notifications.

        Only this response contains the secret that signs a webhook, so the request is not repeated once it may have
        arrived.
        """
        body = request_body(
            DestinationCreate, kind=kind, target=target, topics=list(topics), label=label, project=project
        )
        return self._connection.call("POST", _DESTINATIONS, DestinationCreated, body=body, idempotent=False)

    def notification_destinations(self) -> Iterator[DestinationView]:
        """Yield every destination for notifications."""
        return self._connection.pages(_DESTINATIONS, DestinationView)

    def remove_notification_destination(self, destination_id: UUID) -> None:
        """Remove a destination. Notifications that wait for it are not delivered."""
        self._connection.send("DELETE", f"{_DESTINATIONS}/{destination_id}")

    def test_notification_destination(self, destination_id: UUID) -> DeliveryView:
        """Queue a test notification, and return its delivery."""
        return self._connection.call("POST", f"{_DESTINATIONS}/{destination_id}/test", DeliveryView, idempotent=False)

    def notification_deliveries(self, destination_id: UUID) -> Iterator[DeliveryView]:
        """Yield the deliveries to a destination, newest first."""
        return self._connection.pages(f"{_DESTINATIONS}/{destination_id}/deliveries", DeliveryView)


def _noting(chunks: Iterator[bytes], on_bytes: Callable[[], None]) -> Iterator[bytes]:
    for chunk in chunks:
        on_bytes()
        yield chunk


def _segment(name: str) -> str:
    return quote(name, safe="")
