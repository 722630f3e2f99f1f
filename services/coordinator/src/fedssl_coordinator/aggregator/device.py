"""torch, set up as the settings say. It needs torch, so only what computes imports this module."""

import torch

from fedssl.errors import FedSSLError
from fedssl_coordinator.core.settings import settings


class NoSuchDevice(FedSSLError):
    """FEDSSL_DEVICE names a GPU that this machine does not have."""


def set_threads() -> None:
    """One thread gives the same bits on every machine."""
    torch.set_num_threads(settings().aggregator_threads)


def free_cached() -> None:
    """Give the GPU memory back that torch keeps for the next allocation: others use the device too."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


def chosen_device() -> torch.device:
    """What distillation and evaluation run on. Raises NoSuchDevice."""
    wanted = settings().device
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise NoSuchDevice(f"FEDSSL_DEVICE is {wanted}, which is not on this machine: set it to auto or cpu here")
    return device
