"""Gradient checkpointing (Chen et al. 2016): activations inside a block are computed again for its gradients."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint


def recomputed(block: nn.Module, x: Tensor) -> Tensor:
    """Return block(x), keeping only x for the backward pass, which runs the block a second time.

    The second run repeats the first one's numbers, and leaves the statistics of BatchNorm as the first one left them.
    So losses, gradients and statistics have the same bits as without it. The block must draw no random number.
    """

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), _statistics_of_their_own(block)

    output: Tensor = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False, context_fn=contexts)
    return output


@contextmanager
def _statistics_of_their_own(block: nn.Module) -> Iterator[None]:
    """Lend the block's BatchNorms copies of their statistics."""
    lent = [
        (module, name, buffer)
        for module in block.modules()
        if isinstance(module, _BatchNorm)
        for name, buffer in module.named_buffers(recurse=False)
    ]
    try:
        for module, name, buffer in lent:
            setattr(module, name, buffer.clone())
        yield
    finally:
        for module, name, buffer in lent:
            setattr(module, name, buffer)
