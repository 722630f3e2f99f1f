"""Puts a worker together from its settings and runs it. Imports torch."""

from importlib.metadata import version

import structlog

from fedssl.client import ClientError, Retry, WorkerClient
from fedssl.methods import METHODS
from fedssl.protocol.work import Register
from fedssl_worker.agent import Agent, Patience, Refused, register
from fedssl_worker.data import load_images
from fedssl_worker.egress import Egress, Ledger
from fedssl_worker.executor import Executor, choose_device, describe_device
from fedssl_worker.files import owned_folder
from fedssl_worker.settings import Settings, SettingsError
from fedssl_worker.state import ClientStates

log = structlog.get_logger()

EXIT_REFUSED = 3


def run_worker(settings: Settings) -> int:
    """Work until a signal comes. Returns the exit code of a worker that the coordinator does not want.

    Raises SettingsError and DataError when there is nothing to start with.
    """
    token = settings.read_token()
    device = choose_device(settings.device, settings.threads)
    with owned_folder(settings.state.expanduser()) as folder:
        images = load_images(settings.data, device, image_size=settings.image_size, channels=settings.channels)
        log.info("images read", num_images=len(images), channels=images.channels, image_size=images.image_size)
        introduction = Register(
            worker_version=version("fedssl-worker"),
            methods={name: method.version for name, method in METHODS.items()},
            device=describe_device(device),
            num_images=len(images),
            channels=images.channels,
            image_size=images.image_size,
        )
        try:
            client = WorkerClient(settings.coordinator, token, retry=Retry(seconds=settings.retry_seconds))
        except ClientError as error:
            raise SettingsError(str(error)) from None
        with client:
            patience = Patience()
            states = ClientStates(folder / "runs")
            egress = Egress(client, Ledger(folder / "ledger.jsonl"))
            try:
                client_id = register(client, introduction, patience).client_id
                log.info("registered", client=client_id, coordinator=client.url, device=introduction.device)
                executor = Executor(
                    client,
                    images,
                    states,
                    folder / "broadcasts",
                    client_id=client_id,
                    device=device,
                    public_data=settings.public_data,
                )
                Agent(client, executor, egress, states, claim_seconds=settings.claim_seconds, patience=patience).run()
            except Refused as error:
                log.error("the coordinator refuses this worker", reason=str(error))
                return EXIT_REFUSED
    return 0
