"""The devices that a worker trains on."""

from collections.abc import Sequence

import torch

from fedssl.engine.devices import find_device
from fedssl_worker.settings import SettingsError


def choose_devices(wanted: str, num_gpus: int, threads: int) -> tuple[torch.device, ...]:
    """Return the devices to train on, and set up torch for them. Raises SettingsError if one does not exist.

    `num_gpus` above 1 are the first ones of this machine. CUDA_VISIBLE_DEVICES decides which ones these are.
    """
    torch.set_num_threads(threads)
    device = find_device(wanted)
    if device is None:
        raise SettingsError(
            f"this machine has no device {wanted}: use --device auto, or check the driver with nvidia-smi"
        )
    if num_gpus == 1:
        return (device,)
    if device.type != "cuda":
        found = "this machine has no GPU" if wanted == "auto" else f"--device {wanted} is not one"
        raise SettingsError(f"--gpus {num_gpus} needs GPUs, and {found}: leave --gpus out, or use --device cuda")
    if device.index is not None:
        raise SettingsError(
            f"--gpus {num_gpus} and --device {wanted} contradict each other: use --device cuda, and name the GPUs in "
            "CUDA_VISIBLE_DEVICES"
        )
    if num_gpus > (count := torch.cuda.device_count()):
        raise SettingsError(
            f"--gpus {num_gpus}: this machine shows {count} to the worker, so use at most --gpus {count}"
        )
    return tuple(torch.device("cuda", index) for index in range(num_gpus))


def describe_device(device: torch.device) -> str:
    """Return a description for people: the GPU's name, or the number of CPU threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    threads = torch.get_num_threads()
    return f"cpu, {threads} thread{'s' * (threads > 1)}"


def describe_devices(devices: Sequence[torch.device]) -> str:
    """Return a description for people, such as `2 x NVIDIA H100`."""
    first = describe_device(devices[0])
    return first if len(devices) == 1 else f"{len(devices)} x {first}"


def describe_environment(devices: Sequence[torch.device]) -> str:
    """Return a text that names what the bits of a training depend on, besides its inputs."""
    return f"torch {torch.__version__}, {describe_devices(devices)}"


def image_device(devices: Sequence[torch.device]) -> torch.device:
    """Return where a worker keeps its images: on its device, or in its own memory if several devices get a copy."""
    return devices[0] if len(devices) == 1 else torch.device("cpu")
