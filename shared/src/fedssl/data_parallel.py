"""One training step on several devices: each process computes its rows of a batch, and every process gets all rows.

Every process has the whole batch, the same weights, and the same step. Only `split_rows` divides the work. Its gradient
is that of the sum of all processes' losses. These losses are equal, and torch's DistributedDataParallel averages the
gradients, so the result is the gradient of the loss on one device, for weights behind `split_rows` and for all others.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Ranks:
    """The number of processes that train together, and the number of this one among them."""

    rank: int = 0
    size: int = 1

    def rows(self, num_rows: int) -> slice:
        """Return this process's part of some rows. Parts differ by at most one row."""
        return slice(self.rank * num_rows // self.size, (self.rank + 1) * num_rows // self.size)


# They belong to the process, not to a thread, because gradients on a GPU are computed in separate threads.
_ranks = Ranks()
_is_splitting = False


def num_devices() -> int:
    """Return the number of processes, each with its own device, that train together; 1 unless `join` was called."""
    return _ranks.size


def join(rank: int, size: int, meeting_point: Path, device: torch.device) -> None:
    """Make this process train together with others of this machine, until it ends.

    They find one another through the file `meeting_point`, and communicate through memory and the loopback interface.
    """
    global _ranks
    for library in ("GLOO", "NCCL"):
        os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    store = distributed.FileStore(str(meeting_point), size)  # type: ignore[attr-defined]
    backend = "nccl" if device.type == "cuda" else "gloo"
    distributed.init_process_group(backend, store=store, rank=rank, world_size=size)
    _ranks = Ranks(rank, size)


@contextmanager
def splitting(num_rows: int) -> Iterator[None]:
    """Allow `split_rows` to split inside the block, if batches of `num_rows` have at least one row per process.

    Gradients must be computed inside the block too: checkpointing runs the networks again for them.
    """
    global _is_splitting
    before = _is_splitting
    _is_splitting = 1 < _ranks.size <= num_rows
    try:
        yield
    finally:
        _is_splitting = before


def split_rows(function: Callable[..., Tensor], *whole: Tensor) -> Tensor:
    """Return function(*whole). This process computes only its rows if a step is split.

    Args:
        function: computes each row of its output from the same rows of its inputs, except for
            :class:`SplitBatchNorm2d`.
        whole: the inputs (N, ...), equal in all processes.
    """
    if not _is_splitting:
        return function(*whole)
    num_rows = len(whole[0])
    own = _ranks.rows(num_rows)
    part = function(*(each[own] for each in whole))
    before, after = (part.new_zeros(rows, *part.shape[1:]) for rows in (own.start, num_rows - own.stop))
    whole_output = torch.cat([before, part, after])
    found: Tensor = _Sum.apply(whole_output)  # type: ignore[no-untyped-call]  # adding zeros changes no number
    return found


class _Sum(torch.autograd.Function):
    """The sum of all processes' tensors. Its gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        distributed.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return _Sum.forward(ctx, *gradients)


class SplitBatchNorm2d(nn.BatchNorm2d):
    """BatchNorm that normalises by the whole batch inside `split_rows`.

    torch's SyncBatchNorm does the same, but only on GPUs.
    """

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and _is_splitting):
            return super().forward(x)
        given = (x, self.weight, self.bias, self.eps)
        normalised: tuple[Tensor, ...] = _BatchNorm.apply(*given)  # type: ignore[no-untyped-call]
        y, mean, variance, count = normalised
        assert self.running_mean is not None, "`can_split` has checked it"
        assert self.running_var is not None, "`can_split` has checked it"
        assert self.num_batches_tracked is not None, "`can_split` has checked it"
        assert self.momentum is not None, "it is None only while the statistics are recalibrated, which is not split"
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            self.running_mean.lerp_(mean, self.momentum)
            self.running_var.lerp_(variance * count / (count - 1), self.momentum)
        return y

    @classmethod
    def can_split(cls, module: nn.Module) -> bool:
        """Return whether a module can become a SplitBatchNorm2d."""
        if not isinstance(module, nn.BatchNorm2d) or type(module) not in (nn.BatchNorm2d, cls):
            return False
        return module.affine and module.track_running_stats


class _BatchNorm(torch.autograd.Function):
    """Normalisation of x (B, C, H, W) by the mean and the variance (C) of all processes' rows.

    The gradient is that of Ioffe & Szegedy 2015, Section 3, with the sums taken over all processes.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        variance, mean = torch.var_mean(_exact(x), dim=(0, 2, 3), correction=0)
        own = torch.stack([mean, variance, torch.full_like(mean, x.numel() / len(mean))])
        each = [torch.empty_like(own) for _ in range(_ranks.size)]
        distributed.all_gather(each, own)
        means, variances, counts = torch.stack(each).unbind(dim=1)
        count = counts.sum(dim=0)
        mean = (counts * means).sum(dim=0) / count
        variance = (counts * (variances + (means - mean) ** 2)).sum(dim=0) / count
        ctx.save_for_backward(x, weight, mean, torch.rsqrt(variance + eps), count)
        ctx.mark_non_differentiable(mean, variance, count)
        return F.batch_norm(x, mean, variance, weight, bias, training=False, eps=eps), mean, variance, count

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        x, weight, mean, scale, count = ctx.saved_tensors
        g, centred = _exact(gradients[0]), _exact(x) - mean[:, None, None]
        sums = torch.stack([g.sum(dim=(0, 2, 3)), (g * centred).sum(dim=(0, 2, 3))])
        of_bias, of_weight = sums[0].clone(), sums[1] * scale
        distributed.all_reduce(sums)
        mean_g, slope = sums[0] / count, sums[1] / count * scale**2
        inner = g - mean_g[:, None, None] - centred * slope[:, None, None]
        return (inner * (scale * weight)[:, None, None]).to(x.dtype), of_weight, of_bias, None


def _exact(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


@torch.no_grad()
def broadcast_first(module: nn.Module) -> None:
    """Give all processes the parameters and buffers of the first one.

    Equal computations on two GPUs may differ in the last bit.
    """
    if _ranks.size == 1:
        return
    for tensor in (*module.parameters(), *module.buffers()):
        if tensor.numel():
            sent = tensor.detach().contiguous()
            distributed.broadcast(sent.flatten().view(torch.uint8), src=0)
            tensor.copy_(sent)
