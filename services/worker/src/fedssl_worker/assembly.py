"""Puts a worker together from its settings and runs it. Imports torch."""

from importlib.metadata import version
from pathlib import Path

import structlog
import torch
from structlog.contextvars import bind_contextvars

from fedssl.client import ClientError, Retry, Tls, WorkerClient
from fedssl.engine import release_trainer
from fedssl.methods import METHODS
from fedssl.protocol.work import Enrolled, Register
from fedssl_worker.agent import Agent, Patience, Refused, insist, register
from fedssl_worker.data import OwnImages, PublicImages, load_images
from fedssl_worker.egress import Egress
from fedssl_worker.ended import EndedRuns
from fedssl_worker.enrolment import own_token
from fedssl_worker.executor import Executor, choose_device, describe_device
from fedssl_worker.files import owned_folder
from fedssl_worker.ledger import Ledger, LedgerError
from fedssl_worker.metrics import serve
from fedssl_worker.policy import Governor
from fedssl_worker.public_cache import PublicCache
from fedssl_worker.settings import Settings, SettingsError
from fedssl_worker.state import ClientStates

log = structlog.get_logger()

EXIT_REFUSED = 3
KEEP_TRAINER_SECONDS = 600.0
"""A run's next round rarely takes longer; whoever else uses the device has its memory after that."""


def run_worker(settings: Settings) -> int:
    """Work until a signal comes. Returns the exit code of a worker that the coordinator does not want.

    Raises SettingsError (a PolicyError too) and DataError when there is nothing to start with.
    """
    given = settings.read_token()
    governor = Governor(settings.policy, settings.coordinator)
    device = choose_device(settings.device, settings.threads)
    serve(settings.metrics_host, settings.metrics_port)
    with owned_folder(settings.state.expanduser()) as folder:
        try:
            token = given or _own_token(settings, folder, governor)
        except Refused as error:
            log.error("the coordinator does not enrol this worker", reason=str(error))
            return EXIT_REFUSED
        images = load_images(settings.data, device, image_size=settings.image_size, channels=settings.channels)
        log.info("images read", num_images=len(images), channels=images.channels, image_size=images.image_size)
        with _client(settings, token, governor) as client:
            egress = Egress(client, _ledger(folder, governor), governor)
            try:
                _work(settings, folder, client, egress, images, device)
            except Refused as error:
                log.error("the coordinator refuses this worker", reason=str(error))
                return EXIT_REFUSED
    return 0


def _work(
    settings: Settings, folder: Path, client: WorkerClient, egress: Egress, images: OwnImages, device: torch.device
) -> None:
    """Register, and then work for ever. Raises Refused."""
    patience = Patience()
    introduction = _introduction(settings, images, device)

    def introduce() -> str:
        return egress.introduce(lambda news: register(client, introduction.model_copy(update=news), patience))

    client_id = introduce()
    bind_contextvars(client=client_id)
    log.info("registered", client=client_id, coordinator=client.url, device=introduction.device)
    states = ClientStates(folder / "runs")
    cache = PublicCache(client, folder / "public", settings.max_public_bytes)
    executor = Executor(
        client,
        images,
        states,
        folder / "broadcasts",
        client_id=client_id,
        device=device,
        public=PublicImages(device, settings.public_data, cache),
        encoder=settings.encoder,
    )
    ended = EndedRuns(client, states, settings.keep_ended_seconds)

    def tidy() -> None:
        release_trainer(unused_seconds=KEEP_TRAINER_SECONDS)
        ended.tidy()

    agent = Agent(
        client,
        executor,
        egress,
        states,
        claim_seconds=settings.claim_seconds,
        patience=patience,
        introduce=introduce,
        tidy=tidy,
    )
    agent.run()


def _own_token(settings: Settings, folder: Path, governor: Governor) -> str:
    """The token that this worker has enrolled with. Raises Refused, and SettingsError where there is none to be had."""

    def enrol(enrolment: str, token_hash: str) -> Enrolled:
        with _client(settings, enrolment, governor) as client:
            return insist(lambda: client.enrol(token_hash), Patience())

    token = own_token(folder, settings.read_enrolment_token(), enrol)
    if token is None:
        path = settings.enrolment_token_file
        gone = "" if path is None else f" ({path} does not exist)"
        raise SettingsError(
            "no token: set FEDSSL_WORKER_TOKEN, or name a file that holds it with --token-file; for a first start, one "
            f"that holds an enrolment token with --enrolment-token-file{gone}"
        )
    return token


def _introduction(settings: Settings, images: OwnImages, device: torch.device) -> Register:
    return Register(
        worker_version=version("fedssl-worker"),
        methods={name: method.version for name, method in METHODS.items()},
        device=describe_device(device),
        num_images=len(images),
        channels=images.channels,
        image_size=images.image_size,
        encoder=settings.encoder,
    )


def _client(settings: Settings, token: str, governor: Governor) -> WorkerClient:
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
            may_go_to=governor.permits_store,
        )
    except ClientError as error:
        raise SettingsError(str(error)) from None


def _ledger(folder: Path, governor: Governor) -> Ledger:
    try:
        return Ledger(folder / "ledger", policy=governor.digest, rules=governor.ledger)
    except LedgerError as error:
        raise SettingsError(str(error)) from None
