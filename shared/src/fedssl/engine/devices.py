"""The device to compute on."""

import traceback
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

from fedssl.errors import DeviceError, FedSSLError


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
    """Return the device of each process. `cuda` means all GPUs in turn; any other device is used by all."""
    if wanted != "cuda":
        return [wanted] * num_processes
    return [f"cuda:{number % torch.cuda.device_count()}" for number in range(num_processes)]


def memory_errors_explained(device: str, batch_size: int) -> AbstractContextManager[None]:
    """Raise DeviceError, with what to change, if the device's memory is exhausted inside the block."""
    return memory_errors_as(
        DeviceError(
            f"out of memory on {device} with batch size {batch_size}: lower training.batch_size, or use a smaller "
            "encoder, or fewer or smaller images"
        )
    )


@contextmanager
def memory_errors_as(explained: FedSSLError) -> Iterator[None]:
    """Raise `explained` if the memory of the device, or of the machine, is exhausted inside the block.

    The memory that the calls in the block held is then free again, on the device too.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        _free_after(error)
        raise explained from error


_OUT_OF_MEMORY = (
    "can't allocate memory",  # the CPU's allocator
    "CUDA error: out of memory",  # the driver, for example if other processes leave too little for a context
    "STATUS_ALLOC_FAILED",  # cuBLAS and cuDNN
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that the memory of the device, or of the machine, is exhausted."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _OUT_OF_MEMORY)


def _free_after(error: BaseException) -> None:
    """Release what the calls that an error ended still hold, and return the GPU memory that torch caches.

    An error keeps the frames of these calls alive, and so every tensor in them, for as long as it is handled.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__context__
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
