"""All checks of `fedssl-worker check`, in order. Imports torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch

from fedssl.cli.doctor.checks import disk_space, torch_and_gpu, versions
from fedssl.cli.doctor.findings import Check, Found
from fedssl.protocol.runs import RunSpec
from fedssl_worker.check.connection import check_connection
from fedssl_worker.check.outgoing import Outgoing, check_outgoing, check_policy
from fedssl_worker.check.own_data import check_images, check_labels
from fedssl_worker.check.trial import check_training
from fedssl_worker.devices import choose_devices, describe_devices
from fedssl_worker.disclosure.policy import PolicyError
from fedssl_worker.settings import Settings, SettingsError

_NO_SPEC = "give the spec of a run (--spec): what it would send is then compared with the policy, and a round is timed"


@dataclass(slots=True)
class CheckReport:
    """The results of all checks. The sizes and times of one round are None if they are not known."""

    checks: list[Check] = field(default_factory=list)
    update_bytes: int | None = None
    broadcast_bytes: int | None = None
    seconds_per_round: float | None = None


def checked(settings: Settings, spec: RunSpec | None) -> CheckReport:
    """Check everything that a worker with these settings needs."""
    report = CheckReport()
    report.checks += _machine(settings)
    device = _device(settings, report)
    report.checks += check_connection(settings)
    images = check_images(settings, spec)
    report.checks.append(images.check)
    outgoing = _outgoing(settings, report)
    report.checks += check_labels(settings, spec, images.num_images, outgoing)
    if spec is None:
        report.checks.append(Check("run", Found.NOTE, "no spec was given", _NO_SPEC))
        return report
    _add_run(report, settings, spec, outgoing)
    if device is not None and images.num_images:
        trial = check_training(settings, spec, images.num_images, device, outgoing)
        report.checks += trial.checks
        report.seconds_per_round = trial.seconds_per_round
    return report


def _add_run(report: CheckReport, settings: Settings, spec: RunSpec, outgoing: Outgoing | None) -> None:
    found = check_outgoing(settings, spec, outgoing)
    report.checks += found.checks
    report.update_bytes, report.broadcast_bytes = found.update_bytes, found.broadcast_bytes


def _outgoing(settings: Settings, report: CheckReport) -> Outgoing | None:
    try:
        outgoing = Outgoing.read(settings)
    except PolicyError as error:
        report.checks.append(Check("policy", Found.WRONG, str(error), "correct the policy: nothing leaves until then"))
        return None
    report.checks.append(check_policy(settings, outgoing))
    return outgoing


def _machine(settings: Settings) -> Iterator[Check]:
    yield versions()
    yield torch_and_gpu()
    yield disk_space(settings.state.expanduser(), "disk space for the state")


def _device(settings: Settings, report: CheckReport) -> torch.device | None:
    try:
        devices = choose_devices(settings.device, settings.gpus, settings.threads)
    except SettingsError as error:
        report.checks.append(Check("device", Found.WRONG, str(error), "correct --device or --gpus"))
        return None
    report.checks.append(Check("device", Found.OK, f"training runs on {describe_devices(devices)}"))
    return devices[0]
