"""Checks a worker's connection to its coordinator: proxy, certificate and clock, and whether it has a token."""

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from fedssl.cli.doctor.checks import answers
from fedssl.cli.doctor.findings import Check, Found
from fedssl.client import ClientError
from fedssl_worker.bootstrap import client_of
from fedssl_worker.disclosure.policy import PolicyEnforcer
from fedssl_worker.enrolment import stored_token
from fedssl_worker.settings import Settings, SettingsError

_TODO = "compare --coordinator, the proxy (HTTPS_PROXY), --ca-file and --client-cert with what the operator gave you"


def check_connection(settings: Settings) -> Iterator[Check]:
    """Ask the coordinator for its health and its time, without a token."""
    anyone = PolicyEnforcer(None, settings.coordinator)
    try:
        with client_of(settings, "", anyone) as client:
            for check in answers(client):
                yield _with_way(settings, check) if check.name == "coordinator" else check
    except (ClientError, SettingsError) as error:
        yield Check("coordinator", Found.WRONG, f"{error}{_way(settings)}", _TODO)
    yield _token(settings)


def _with_way(settings: Settings, check: Check) -> Check:
    return Check(check.name, check.found, f"{check.what}{_way(settings)}", check.todo)


def _way(settings: Settings) -> str:
    """Return the proxy and the certificates in use, without the proxy's credentials."""
    parts = urlsplit(settings.coordinator)
    proxies = getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    way = []
    if proxy and parts.hostname and not proxy_bypass(parts.hostname):
        through = urlsplit(proxy)
        way.append(f"proxy {through.hostname}:{through.port}" if through.port else f"proxy {through.hostname}")
    for name, path in (("authorities", settings.ca_file), ("certificate", settings.client_cert)):
        if path is not None:
            way.append(f"{name} {path}")
    return f" ({', '.join(way)})" if way else ""


def _token(settings: Settings) -> Check:
    """Check that the worker has a token. It is not sent."""
    folder: Path = settings.state.expanduser()
    try:
        if settings.read_token():
            return Check("token", Found.OK, "a token is given; this check does not send it")
        if stored_token(folder) is not None:
            return Check("token", Found.OK, f"this worker has enrolled: its token is in {folder}")
        if settings.read_enrolment_token():
            return Check("token", Found.OK, "an enrolment token is given; this check does not use it")
    except SettingsError as error:
        return Check("token", Found.WRONG, str(error), "correct the file")
    todo = "ask the coordinator's operator for an enrolment token: `fedssl token enrol CLIENT`"
    return Check("token", Found.NOTE, "there is no token yet", todo)
