"""The device to compute on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fedssl.errors import DeviceError


def find_device(wanted: str) -> torch.device | None:
    """Return the device that `wanted` names (auto, cpu, cuda, cuda:N), or None if this machine does not have it.

    `auto` is the first GPU if there is one, else the CPU.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    is_missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    return None if is_missing else device


def require_device(wanted: str) -> torch.device:
    """Return the device that `wanted` names (cpu, cuda, cuda:N). Raises DeviceError if it cannot be used here."""
    try:
        device = torch.device(wanted)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError) as error:
        raise DeviceError(f"device {wanted} cannot be used here: {str(error).splitlines()[0]}") from None
    return device


def devices_of(wanted: str, num_processes: int) -> list[str]:
    """Return the device of each process. `cuda` means all GPUs, which take turns; any other device is that of all."""
    if wanted != "cuda":
        return [wanted] * num_processes
    return [f"cuda:{number % torch.cuda.device_count()}" for number in range(num_processes)]


@contextmanager
def memory_errors_explained(device: str, batch_size: int) -> Iterator[None]:
    """Raise DeviceError, with what to change, if the device's memory is exhausted inside the block."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise _too_little_memory(device, batch_size) from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error):  # raised by the CPU's allocator
            raise _too_little_memory(device, batch_size) from error
        raise


def _too_little_memory(device: str, batch_size: int) -> DeviceError:
    return DeviceError(
        f"out of memory on {device} with batch size {batch_size}: lower training.batch_size, or use a smaller encoder"
    )
