"""Builds a worker from its settings and runs it. Imports torch."""

from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path

import structlog
import torch
from structlog.contextvars import bind_contextvars

from fedssl.backoff import Backoff
from fedssl.client import ClientError, Retry, Tls, WorkerClient
from fedssl.engine import release_trainer
from fedssl.liveness import Health, report
from fedssl.protocol.work import Enrolled, Register
from fedssl_worker.agent import Agent, register
from fedssl_worker.backoff import Refused, retry_until_answered
from fedssl_worker.check_numbers import read_numbers
from fedssl_worker.current_work import CurrentWork
from fedssl_worker.data import OwnImages, PublicImages
from fedssl_worker.data_report import DataReporter
from fedssl_worker.devices import choose_devices, describe_devices, image_device
from fedssl_worker.disclosure.egress import Egress
from fedssl_worker.disclosure.ledger import Ledger, LedgerError
from fedssl_worker.disclosure.ledger.keys import SigningKey, make_key, read_key
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.enrolment import enrolled_token, stored_token
from fedssl_worker.executor import Executor
from fedssl_worker.files import exclusive_folder
from fedssl_worker.labels import OwnLabels, load_own_labels, supported_methods
from fedssl_worker.memory import total_memory_bytes
from fedssl_worker.metrics import serve
from fedssl_worker.public_cache import PublicCache
from fedssl_worker.rescan import Rescan
from fedssl_worker.secure_rounds import SecureRounds
from fedssl_worker.settings import Settings, SettingsError
from fedssl_worker.site_evaluations import SiteEvaluations
from fedssl_worker.state import ClientStates
from fedssl_worker.state_gc import StateCollector

log = structlog.get_logger()

EXIT_DEVICE = 1
EXIT_REFUSED = 3
KEEP_TRAINER_SECONDS = 600.0
"""A run's next round rarely begins later. After this time, the device's memory is released for other processes."""


def run_worker(settings: Settings) -> int:
    """Work until a signal arrives. Returns the exit code if the coordinator refuses the worker, or the GPU is lost.

    Raises SettingsError, PolicyError (which is one) and DataError if the worker cannot start.
    """
    given_token = settings.read_token()
    enforcer = PolicyEnforcer(settings.policy, settings.coordinator)
    devices = choose_devices(settings.device, settings.gpus, settings.threads)
    serve(settings.metrics_host, settings.metrics_port)
    with exclusive_folder(settings.state.expanduser()) as folder:
        enrolment = None if given_token else _enrolment(settings, folder)
        # Before the enrolment token is used: a worker that then cannot read its images could not use it again.
        images = OwnImages(
            settings.data,
            image_device(devices),
            image_size=settings.image_size,
            channels=settings.channels,
            max_unreadable=settings.max_unreadable,
            allows_cache=not settings.no_image_cache,
        )
        labels = load_own_labels(settings.data, settings.labels, settings.label_names, images.num_listed)
        log.info("images.loaded", num_images=len(images), channels=images.channels, image_size=images.image_size)
        try:
            token = given_token or _enrolled_token(settings, folder, enrolment, enforcer)
        except Refused as error:
            log.error("worker.enrolment_refused", reason=str(error))
            report(Health.UNREADY, str(error))
            return EXIT_REFUSED
        with client_of(settings, token, enforcer) as client:
            egress = Egress(client, _ledger(folder, enforcer), enforcer)
            try:
                reporter = DataReporter(egress, enforcer, images, labels, folder / "data-reports.json")
                _work(settings, folder, client, egress, reporter, images, labels, devices)
            except Refused as error:
                log.error("worker.refused", reason=str(error))
                report(Health.UNREADY, str(error))
                return EXIT_REFUSED
            except torch.AcceleratorError as error:
                reason = str(error).partition("\n")[0]
                log.error("device.lost", reason=reason, todo="a new process can use it: start the worker again")
                report(Health.UNREADY, f"the GPU was lost: {reason}")
                return EXIT_DEVICE
    return 0


def _work(
    settings: Settings,
    folder: Path,
    client: WorkerClient,
    egress: Egress,
    reporter: DataReporter,
    images: OwnImages,
    labels: OwnLabels | None,
    devices: Sequence[torch.device],
) -> None:
    """Register, then work until an exception. Raises Refused."""
    backoff = Backoff()
    identity, numbers = _identity(folder), read_numbers(folder)

    def reregister() -> str:
        registration = _registration(
            settings, images, labels, devices, identity
        )  # a rescan may have changed the images
        client_id = egress.register(
            lambda news: register(client, registration.model_copy(update=news), backoff), numbers
        )
        reporter.send()
        return client_id

    client_id = reregister()
    bind_contextvars(client=client_id)
    report(Health.READY)
    log.info(
        "worker.registered",
        client=client_id,
        coordinator=client.url,
        device=describe_devices(devices),
        identity=f"ed25519:{identity.public}",
    )
    rescan = Rescan(settings, images, labels, reregister) if settings.rescan else lambda: None
    states = ClientStates(folder / "runs")
    cache = PublicCache(client, folder / "public", settings.max_public_bytes)
    executor = Executor(
        client,
        images,
        states,
        folder / "broadcasts",
        client_id=client_id,
        device=devices[0],
        devices=devices,
        public=PublicImages(image_device(devices), settings.public_data, cache),
        encoder=settings.encoder,
        max_artifact_bytes=settings.max_artifact_bytes or total_memory_bytes() // 4,
        labels=labels,
        before_training=rescan,
    )
    evaluations = SiteEvaluations(client, executor, egress, images, labels, devices[0], backoff, rescan)
    secure = SecureRounds(client, egress, states, folder / "secure", identity.private)
    collector = StateCollector(client, states, secure, settings.keep_ended_seconds)

    def on_idle() -> None:
        release_trainer(unused_seconds=KEEP_TRAINER_SECONDS)
        collector.collect()

    agent = Agent(
        client,
        executor,
        egress,
        claim_seconds=settings.claim_seconds,
        backoff=backoff,
        reregister=reregister,
        on_idle=on_idle,
        evaluate=evaluations.answer_next,
        shown=CurrentWork(folder).shown,
        begin_secure=secure.begin,
    )
    agent.run()


def _enrolment(settings: Settings, folder: Path) -> str | None:
    """Return the enrolment token, if any. Raises SettingsError if there is neither one nor a stored token."""
    enrolment = settings.read_enrolment_token()
    if enrolment is None and stored_token(folder) is None:
        path = settings.enrolment_token_file
        missing = "" if path is None else f" ({path} does not exist)"
        raise SettingsError(
            "this worker has no token: set FEDSSL_WORKER_TOKEN or --token-file; for a first start, set "
            f"FEDSSL_WORKER_ENROLMENT_TOKEN or --enrolment-token-file{missing}"
        )
    return enrolment


def _enrolled_token(settings: Settings, folder: Path, enrolment: str | None, enforcer: PolicyEnforcer) -> str:
    """Return the token of this worker, which enrols if necessary. Raises Refused, and SettingsError."""

    def enrol(enrolment: str, token_hash: str) -> Enrolled:
        with client_of(settings, enrolment, enforcer) as client:
            return retry_until_answered(lambda: client.enrol(token_hash), Backoff())

    token = enrolled_token(folder, enrolment, enrol)
    assert token is not None, "there is an enrolment token, or a stored one"
    return token


def _identity(folder: Path) -> SigningKey:
    """Return the key by which other workers know this one, made at the first start. Raises SettingsError."""
    path = folder / "identity.pem"
    try:
        return read_key(path, "identity key") if path.exists() else make_key(path)
    except LedgerError as error:
        raise SettingsError(str(error)) from None


def _registration(
    settings: Settings,
    images: OwnImages,
    labels: OwnLabels | None,
    devices: Sequence[torch.device],
    identity: SigningKey,
) -> Register:
    return Register(
        worker_version=version("fedssl-worker"),
        methods=supported_methods(labels, has_labels=images.has_labels),
        device=describe_devices(devices),
        num_images=len(images),
        channels=images.channels,
        image_size=images.image_size,
        serves=images.serves,
        encoder=settings.encoder,
        identity=identity.public,
    )


def client_of(settings: Settings, token: str, enforcer: PolicyEnforcer) -> WorkerClient:
    """Return a client for the coordinator of the settings. Raises SettingsError if its address cannot be used."""
    tls = Tls(
        ca_file=settings.ca_file,
        client_cert=settings.client_cert,
        client_key=settings.client_key,
        insecure_http=settings.insecure_http,
    )
    try:
        return WorkerClient(
            settings.coordinator,
            token,
            retry=Retry(seconds=settings.retry_seconds),
            tls=tls,
            may_go_to=enforcer.permits_store,
        )
    except ClientError as error:
        raise SettingsError(str(error)) from None


def _ledger(folder: Path, enforcer: PolicyEnforcer) -> Ledger:
    try:
        return Ledger(folder / "ledger", policy=enforcer.digest, rules=enforcer.ledger)
    except LedgerError as error:
        raise SettingsError(str(error)) from None
