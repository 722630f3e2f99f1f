"""Vision transformers, with timm's tensor names."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedssl.models.encoders import Encoder
from fedssl.models.positions import resized_positions
from fedssl.protocol.model import EncoderConfig

_MLP_RATIO = 4
EPSILON = 1e-6
"""Added to the variance in a LayerNorm."""
_DEVIATION = 0.02  # deviation of the truncated normal distribution from which weights and position embeddings start


@dataclass(frozen=True, slots=True)
class _Size:
    width: int
    num_heads: int


_SIZES = {"vit-tiny": _Size(192, 3), "vit-small": _Size(384, 6), "vit-base": _Size(768, 12)}


class PatchEmbed(nn.Module):
    """A linear map of each patch, as a convolution whose stride is its size: (B, C, S, S) to (B, N, H)."""

    def __init__(self, channels: int, patch_size: int, width: int) -> None:
        super().__init__()
        self.proj = nn.Conv2d(channels, width, kernel_size=patch_size, stride=patch_size)

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.proj(x)
        return patches.flatten(2).transpose(1, 2)


class Attention(nn.Module):
    """Multi-head self-attention over tokens (B, N, H), by torch's scaled_dot_product_attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        qkv = self.qkv(x).reshape(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, tokens, width)
        attended: Tensor = self.proj(mixed)
        return attended


class MLP(nn.Module):
    """Two linear layers with GELU between them, applied to each token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, _MLP_RATIO * width)
        self.fc2 = nn.Linear(_MLP_RATIO * width, width)

    def forward(self, x: Tensor) -> Tensor:
        mapped: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return mapped


class Block(nn.Module):
    """Attention and MLP, each after a LayerNorm and with a shortcut around it."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=EPSILON)
        self.attn = Attention(width, num_heads)
        self.norm2 = nn.LayerNorm(width, eps=EPSILON)
        self.mlp = MLP(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        mapped: Tensor = x + self.mlp(self.norm2(x))
        return mapped


class VisionTransformer(Encoder):
    """The vision transformer of Dosovitskiy et al. 2021 (sizes of Touvron et al. 2021, DeiT), as timm has it.

    Patches, a class token and learnt position embeddings pass `config.depth` blocks, 12 by default. The representation
    is the class token after the last LayerNorm, `norm`; with `pooling="mean"`, it is the LayerNorm, `fc_norm`, of the
    mean over the patches, as timm's `global_pool="avg"`. Weights load in both directions, without timm's classifier
    `head`. They start as timm's: linear maps and position embeddings truncated normal of deviation 0.02, biases 0.

    Raises ValueError if the image size is unknown or not a multiple of the patch size.
    """

    libraries = ("timm",)
    positions = "pos_embed"

    def __init__(self, config: EncoderConfig, channels: int, image_size: int | None) -> None:
        super().__init__()
        if image_size is None:
            raise ValueError(f"{config.name} has position embeddings: build it with the size of its images")
        config.check_image_size(image_size)
        size, num_patches = _SIZES[config.name], (image_size // config.patch_size) ** 2
        self.patch_size, self.num_patches = config.patch_size, num_patches
        self.pools_patches = config.pooling == "mean"
        self.feature_dim = size.width
        self.cls_token = nn.Parameter(torch.empty(1, 1, size.width))
        self.pos_embed = nn.Parameter(torch.empty(1, 1 + num_patches, size.width))
        self.patch_embed = PatchEmbed(channels, config.patch_size, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.num_heads) for _ in range(config.depth)))
        self.add_module("fc_norm" if self.pools_patches else "norm", nn.LayerNorm(size.width, eps=EPSILON))
        self._initialise()

    def _initialise(self) -> None:
        nn.init.normal_(self.cls_token, std=1e-6)
        nn.init.trunc_normal_(self.pos_embed, std=_DEVIATION)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=_DEVIATION)
                nn.init.zeros_(module.bias)

    def layer_prefixes(self) -> list[tuple[str, ...]]:
        """Return the embedding of patches, and one layer per block. The last LayerNorm belongs to the heads (MAE)."""
        return [
            ("cls_token", "pos_embed", "patch_embed."),
            *((f"blocks.{number}.",) for number in range(len(self.blocks))),
        ]

    def convolutions(self) -> list[str]:
        """Return nothing: the one convolution is the linear map of the patches."""
        return []

    def forward(self, x: Tensor) -> Tensor:
        patches: Tensor = self.patch_embed(x)
        positions = self._positions(x.shape[2] // self.patch_size, x.shape[3] // self.patch_size)
        tokens = torch.cat([self.cls_token.expand(x.shape[0], -1, -1), patches], dim=1) + positions
        return self._last_norm(self.pooled(self.run_blocks(self.blocks, tokens)))

    def _positions(self, rows: int, columns: int) -> Tensor:
        """Return the position embeddings (1, 1 + N, H) of a grid of patches.

        If the encoder was built for images of another size, they are interpolated.
        """
        if rows * columns == self.num_patches:
            return self.pos_embed
        return resized_positions(self.pos_embed, rows, columns)

    def visible_tokens(self, x: Tensor, visible_BK: Tensor) -> Tensor:
        """Return the tokens (B, 1 + K, H) of the class and of K patches of each image, as if there were no others.

        `visible_BK` has the places of the patches, 0 to N - 1, row by row. Each token is normalised by the last
        LayerNorm.
        """
        patches: Tensor = self.patch_embed(x).to(self.pos_embed.dtype)
        patches = patches + self.pos_embed[:, 1:]
        patches = patches.gather(1, visible_BK[:, :, None].expand(-1, -1, patches.shape[2]))
        first = (self.cls_token + self.pos_embed[:, :1]).expand(x.shape[0], -1, -1)
        return self._last_norm(self.run_blocks(self.blocks, torch.cat([first, patches], dim=1)))

    def pooled(self, tokens_BTH: Tensor) -> Tensor:
        """Return one vector (B, H) per image from its tokens: that of the class, or the mean of the patches."""
        return tokens_BTH[:, 1:].mean(dim=1) if self.pools_patches else tokens_BTH[:, 0]

    def _last_norm(self, tokens: Tensor) -> Tensor:
        normalised: Tensor = self.get_submodule("fc_norm" if self.pools_patches else "norm")(tokens)
        return normalised


def build_vision_transformer(config: EncoderConfig, channels: int, image_size: int | None) -> Encoder:
    """Return the vision transformer of the config's name and patch size."""
    return VisionTransformer(config, channels, image_size)
