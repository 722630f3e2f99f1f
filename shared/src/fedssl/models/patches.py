"""Patches of images: cut out, hidden, and reconstructed from the others (MAE, He et al. 2022)."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedssl.models.vision_transformer import EPSILON, Block

_MASK_DEVIATION = 0.02


def patchify(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Return the pixels of each patch, (B, N, patch_size^2 C): row by row of patches, and of pixels, channels last.

    >>> patchify(torch.arange(8.0).view(1, 2, 2, 2), 2).tolist()
    [[[0.0, 4.0, 1.0, 5.0, 2.0, 6.0, 3.0, 7.0]]]
    """
    batch, channels, height, width = images_BCHW.shape
    rows, columns = height // patch_size, width // patch_size
    cut = images_BCHW.reshape(batch, channels, rows, patch_size, columns, patch_size)
    return cut.permute(0, 2, 4, 3, 5, 1).reshape(batch, rows * columns, patch_size**2 * channels)


class Masking(NamedTuple):
    """The places of the visible and of the hidden patches of each image.

    `visible` (B, K): the places of the visible ones, in a random order. `restore` (B, N): the place of each patch if
    the visible ones come first and the hidden ones follow. `mask` (B, N): 1 for hidden patches, 0 for visible ones.
    """

    visible: Tensor
    restore: Tensor
    mask: Tensor


def num_visible(num_patches: int, mask_ratio: float) -> int:
    """Return how many patches stay visible: rounded down, as in MAE's code.

    >>> num_visible(196, 0.75), num_visible(4, 0.6)
    (49, 1)
    """
    return int(num_patches * (1 - mask_ratio))


def random_masking(noise_BN: Tensor, mask_ratio: float) -> Masking:
    """Return the masking that keeps the patches with the smallest numbers, as in MAE's code (`random_masking`).

    >>> found = random_masking(torch.tensor([[0.9, 0.1, 0.5, 0.7]]), 0.5)
    >>> found.visible.tolist(), found.restore.tolist(), found.mask.tolist()
    ([[1, 2]], [[3, 0, 1, 2]], [[1.0, 0.0, 0.0, 1.0]])
    """
    kept = num_visible(noise_BN.shape[1], mask_ratio)
    order_BN = noise_BN.argsort(dim=1)
    restore_BN = order_BN.argsort(dim=1)
    return Masking(order_BN[:, :kept], restore_BN, (restore_BN >= kept).to(noise_BN.dtype))


class PatchDecoder(nn.Module):
    """MAE's decoder: from the tokens of the class and of visible patches to the pixels of all patches.

    Tokens (B, 1 + K, H) are mapped to the decoder's width, hidden patches get one learnt token, fixed positions are
    added, and `depth` blocks, a LayerNorm and a linear map follow. Linear maps start as in MAE's code, Xavier-uniform
    with biases 0, and the token from a normal distribution of deviation 0.02.
    """

    positions: Tensor

    def __init__(
        self, in_width: int, num_patches: int, num_pixels: int, *, width: int, depth: int, num_heads: int
    ) -> None:
        super().__init__()
        self.embed = nn.Linear(in_width, width)
        self.mask_token = nn.Parameter(torch.empty(1, 1, width))
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width, eps=EPSILON)
        self.predict = nn.Linear(width, num_pixels)
        self.register_buffer("positions", sine_positions(width, round(num_patches**0.5)), persistent=False)
        nn.init.normal_(self.mask_token, std=_MASK_DEVIATION)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)

    def forward(self, tokens_BTH: Tensor, restore_BN: Tensor) -> Tensor:
        """Return the predicted pixels (B, N, P)."""
        tokens = self.embed(tokens_BTH).to(self.mask_token.dtype)
        batch, num_tokens, width = tokens.shape
        hidden = self.mask_token.expand(batch, restore_BN.shape[1] + 1 - num_tokens, -1)
        patches = torch.cat([tokens[:, 1:], hidden], dim=1)
        patches = patches.gather(1, restore_BN[:, :, None].expand(-1, -1, width))
        decoded = self.blocks(torch.cat([tokens[:, :1], patches], dim=1) + self.positions)
        predicted: Tensor = self.predict(self.norm(decoded))[:, 1:]
        return predicted


def sine_positions(width: int, side: int) -> Tensor:
    """Return the fixed positions (1, 1 + side^2, width) of a class token, 0, and of a square of patches, row by row.

    For the column x and the row y of a patch, and the frequencies w_k = 10000^(-4k/width), k < width / 4:

        sin(x w), cos(x w), sin(y w), cos(y w)

    as in MAE's code (`get_2d_sincos_pos_embed`). `width` is a multiple of 4. Computed in float64, returned in float32.
    """
    frequencies = 10_000.0 ** -(torch.arange(width // 4, dtype=torch.float64, device="cpu") / (width / 4))
    angles = torch.arange(side, dtype=torch.float64, device="cpu")[:, None] * frequencies
    waves = torch.cat([angles.sin(), angles.cos()], dim=1)
    by_patch = torch.cat([waves.repeat(side, 1), waves.repeat_interleave(side, dim=0)], dim=1)
    return torch.cat([torch.zeros(1, width, dtype=torch.float64, device="cpu"), by_patch]).float()[None]
