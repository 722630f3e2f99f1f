"""The device to compute on."""

import torch


def find_device(wanted: str) -> torch.device | None:
    """Return the device that `wanted` names (auto, cpu, cuda, cuda:N), or None if this machine does not have it.

    `auto` is the first GPU if there is one, else the CPU.
    """
    if wanted == "auto":
        wanted = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(wanted)
    is_missing = device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count()
    return None if is_missing else device
