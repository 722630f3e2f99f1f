"""Patches: how they are cut, hidden, given positions and reassembled."""

import math

import numpy as np
import pytest
import torch

from fedssl.models import build_encoder, initialised
from fedssl.models.patches import PatchDecoder, num_visible, patchify, random_masking, sine_positions
from fedssl.models.vision_transformer import VisionTransformer
from fedssl.protocol.model import EncoderConfig


def test_patches_are_cut_row_by_row_with_channels_last() -> None:
    """The pixels are 100 channel + 10 row + column of a 4 x 4 image of two channels."""
    rows, columns = torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")
    image = torch.stack([10 * rows + columns, 100 + 10 * rows + columns])[None]
    found = patchify(image, 2)
    assert found.shape == (1, 4, 8)
    assert found[0, 0].tolist() == [0, 100, 1, 101, 10, 110, 11, 111]
    assert found[0, 1].tolist() == [2, 102, 3, 103, 12, 112, 13, 113]
    assert found[0, 2].tolist() == [20, 120, 21, 121, 30, 130, 31, 131]


@pytest.mark.parametrize(("num_patches", "ratio", "kept"), [(196, 0.75, 49), (4, 0.5, 2), (9, 0.5, 4), (16, 0.9, 1)])
def test_the_number_of_visible_patches_is_rounded_down(num_patches: int, ratio: float, kept: int) -> None:
    assert num_visible(num_patches, ratio) == kept
    masking = random_masking(torch.rand(3, num_patches, generator=torch.Generator().manual_seed(0)), ratio)
    assert masking.visible.shape == (3, kept)
    assert masking.mask.sum(dim=1).tolist() == [num_patches - kept] * 3


def test_visible_patches_are_those_that_are_not_masked() -> None:
    masking = random_masking(torch.rand(50, 9, generator=torch.Generator().manual_seed(1)), 0.6)
    patches = torch.arange(9).expand(50, -1)
    hidden = torch.full((50, 6), -1)
    together = torch.cat([patches.gather(1, masking.visible), hidden], dim=1).gather(1, masking.restore)
    assert torch.equal(together, torch.where(masking.mask.bool(), -1, patches))
    counts = masking.mask.sum(dim=0)  # each patch is hidden about equally often
    assert int(counts.min()) > 20
    assert int(counts.max()) < 45


def test_positions_are_sines_and_cosines_of_column_and_row() -> None:
    """Width 8 has the frequencies 1 and 1/100. Patch 5 of a square of 3 is in row 1 and column 2."""
    found = sine_positions(8, 3)
    assert found.shape == (1, 10, 8)
    assert found[0, 0].tolist() == [0] * 8
    expected = [f(place * w) for place in (2, 1) for f in (math.sin, math.cos) for w in (1, 0.01)]
    np.testing.assert_allclose(found[0, 1 + 5].numpy(), expected, rtol=1e-6)


def test_the_decoder_restores_the_order_of_the_patches() -> None:
    """Without blocks and positions, each predicted patch depends only on its own token or on the mask's token."""
    decoder = initialised(lambda: PatchDecoder(4, 4, 3, width=8, depth=1, num_heads=2), 0)
    decoder.blocks, decoder.positions = torch.nn.Sequential(), torch.zeros_like(decoder.positions)
    tokens = torch.randn(1, 3, 4, generator=torch.Generator().manual_seed(2))
    masking = random_masking(torch.tensor([[0.9, 0.1, 0.5, 0.2]]), 0.5)
    assert masking.visible.tolist() == [[1, 3]]
    with torch.no_grad():
        found = decoder(tokens, masking.restore)
        own = decoder.predict(decoder.norm(decoder.embed(tokens)))
        hidden = decoder.predict(decoder.norm(decoder.mask_token))[0, 0]
    for place, expected in ((0, hidden), (1, own[0, 1]), (2, hidden), (3, own[0, 2])):
        torch.testing.assert_close(found[0, place], expected)


@pytest.mark.parametrize("pooling", ["class_token", "mean"])
def test_all_patches_visible_give_the_tokens_of_the_whole_image(pooling: str) -> None:
    config = EncoderConfig.model_validate({"name": "vit-tiny", "patch_size": 4, "pooling": pooling})
    encoder = initialised(lambda: build_encoder(config, 1, 8), 0).eval()
    assert isinstance(encoder, VisionTransformer)
    images = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    order = torch.tensor([[2, 0, 3, 1], [0, 1, 2, 3]])
    with torch.no_grad():
        tokens = encoder.visible_tokens(images, order)
        assert tokens.shape == (2, 5, 192)
        if pooling == "class_token":  # attention does not depend on the order of the tokens
            torch.testing.assert_close(encoder.pooled(tokens), encoder(images), rtol=1e-4, atol=1e-5)
        shuffled = encoder.visible_tokens(images, order[:1].expand(2, -1))
        torch.testing.assert_close(shuffled[1, 1 + 1], tokens[1, 1 + 0], rtol=1e-4, atol=1e-5)


def test_hidden_patches_do_not_influence_the_tokens() -> None:
    config = EncoderConfig(name="vit-tiny", patch_size=4)
    encoder = initialised(lambda: build_encoder(config, 1, 8), 0).eval()
    assert isinstance(encoder, VisionTransformer)
    images = torch.zeros(1, 1, 8, 8)
    changed = images.clone()
    changed[:, :, :4, :4] = 7.0  # patch 0
    visible = torch.tensor([[1, 3]])
    with torch.no_grad():
        assert torch.equal(encoder.visible_tokens(images, visible), encoder.visible_tokens(changed, visible))
