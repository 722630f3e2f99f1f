"""One client's round on several devices."""

from collections.abc import Callable, Mapping, Sequence

import torch

from fedssl.artifacts.tensors import in_name_order
from fedssl.engine import LocalProgress, LocalResult
from fedssl.methods.api import ClientData, Context
from fedssl.parallel.pool import ClientProcesses

_REMEDY = "If memory ran out, lower training.batch_size, or give the worker more memory or fewer --gpus"


def train_on_devices(
    broadcast: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor] | None,
    data: ClientData,
    ctx: Context,
    devices: Sequence[str],
    on_progress: Callable[[LocalProgress], None] = lambda progress: None,
) -> LocalResult:
    """Train one client for one round as `run_local_round` does, with a process on each of several devices.

    Each process draws the whole batch of a step, runs the encoders on its part of the images, and gathers their
    outputs. The loss, its negatives and BatchNorm are therefore those of the whole batch, as on one device; sums are
    taken in another order, so the result differs by rounding.

    The processes run for this round only. The calling process uses no device, and continues if one of them ends. `data`
    and the public images of `ctx` are in its memory.

    Raises what `run_local_round` does, and what `on_progress` raises; DeviceError if a device has too little memory;
    MethodError if the encoder cannot be split; and LocalError if a process was killed.
    """
    kept = None if state is None else in_name_order(state)
    with ClientProcesses(ctx.spec, {ctx.client_id: data}, ctx.public, devices, _REMEDY) as processes:
        return processes.train_together(in_name_order(broadcast), kept, ctx, on_progress)
