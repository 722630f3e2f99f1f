"""A ring of the latest embeddings: the queues of MoCo and FLESD."""

import torch
from torch import Tensor, nn

from fedssl.unit_vectors import unit


class Ring(nn.Module):
    """The latest keys (Q, D), unit vectors: new ones replace the oldest. `length` of the Q places are in use."""

    keys: Tensor
    position: Tensor

    def __init__(self, keys_QD: Tensor) -> None:
        super().__init__()
        self.register_buffer("keys", keys_QD)
        self.register_buffer("position", torch.zeros((), dtype=torch.int64))
        self.length = len(keys_QD)

    def forward(self) -> Tensor:
        """Return the keys in use, (length, D)."""
        return self.keys[: self.length]

    @torch.no_grad()
    def push(self, keys_BD: Tensor) -> Tensor:
        """Add new keys, scaled to unit length, or the last ones if not all fit. Returns the places that they took."""
        newest = unit(keys_BD.detach().float())[-self.length :]
        places = (self.position + torch.arange(len(newest), device=newest.device)) % self.length
        self.keys.index_copy_(0, places, newest)
        self.position.copy_((self.position + len(newest)) % self.length)
        return places
