"""Configures torch from the settings. It imports torch, so only computing modules import it."""

import torch

from fedssl.engine.devices import find_device
from fedssl.errors import FedSSLError
from fedssl_coordinator.core.settings import settings


class NoSuchDevice(FedSSLError):
    """FEDSSL_DEVICE names a GPU that this machine does not have."""


def set_threads() -> None:
    """Set torch's number of threads. One thread gives the same bits on every machine."""
    torch.set_num_threads(settings().aggregator_threads)


def free_cached() -> None:
    """Release the GPU memory that torch caches for its next allocation: other processes use the device too."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def chosen_device() -> torch.device:
    """Return the device for distillation and evaluation. Raises NoSuchDevice."""
    wanted = settings().device
    device = find_device(wanted)
    if device is None:
        raise NoSuchDevice(f"FEDSSL_DEVICE is {wanted}, which is not on this machine: set it to auto or cpu here")
    return device
