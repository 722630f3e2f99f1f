"""Crafted weights: a dishonest coordinator can make an update contain pixels, as docs/privacy.md describes.

FedMAE's decoder predicts 0 for every pixel, from features that depend only on a patch's place. The gradient of its last
layer is then a sum over the hidden patches: the pixels of each, times features that the coordinator knows.
"""

import torch
from torch import Tensor

from fedssl.artifacts.tensors import Tensors
from fedssl.engine.secure_rounds import run_secure_round
from fedssl.methods import METHODS
from fedssl.methods.api import Update
from fedssl.models.patches import PatchDecoder, patchify, random_masking
from support.methods import context, method_spec
from support.rounds import local_round, start, training

CLIENTS = ("client-0", "client-1", "client-2")
WIDTH, NUM_PATCHES, NUM_PIXELS, BATCH_SIZE = 16, 4, 16, 2
DECODER, PREDICTION = "decoder.", "decoder.predict.weight"
SPEC = method_spec(
    "fedmae",
    seed=0,
    method={
        "name": "fedmae",
        "mask_ratio": 1 / NUM_PATCHES,  # one patch of each image
        "normalize_pixels": False,
        "decoder_width": WIDTH,
        "decoder_depth": 1,
    },
    model={"encoder": {"name": "vit-tiny", "patch_size": 4, "depth": 1}},
    partition={"dataset": "digits", "num_clients": 3, "max_images": 30},
    data={"channels": 1, "image_size": 8, "augmentation": {"preset": "none"}},
    training={
        "batch_size": BATCH_SIZE,
        "epoch_fraction": 0.001,  # one step
        "optimizer": {"learning_rate": 1.0, "momentum": 0, "weight_decay": 0},
    },
    aggregation={"arithmetic": "fixed"},
    secure_aggregation={"min_cohort": 3, "collusion": 1},
)


def crafted_decoder(in_width: int) -> PatchDecoder:
    """Return a decoder that attends to nothing and predicts 0, with different features for each place."""
    decoder = PatchDecoder(in_width, NUM_PATCHES, NUM_PIXELS, width=WIDTH, depth=1, num_heads=4)
    torch.manual_seed(0)
    for name, parameter in decoder.named_parameters():
        torch.nn.init.normal_(parameter) if "mlp" in name else torch.nn.init.zeros_(parameter)
    torch.nn.init.ones_(decoder.norm.weight)
    torch.nn.init.ones_(decoder.blocks[0].norm2.weight)  # type: ignore[arg-type, union-attr]
    return decoder


def hidden_patches(client: str) -> Tensor:
    """Return which patches a client hides, (B, N). The seed derives from the spec and the client's name."""
    noise = torch.rand((BATCH_SIZE, NUM_PATCHES), generator=context(SPEC, 1, client).generator("masks"))
    return random_masking(noise, SPEC.method.mask_ratio).mask.bool()  # type: ignore[union-attr]


def test_a_secure_sum_reveals_pixels_of_one_image_if_the_coordinator_chooses_the_weights() -> None:
    first = start(SPEC)
    decoder = crafted_decoder(first.broadcast["decoder.embed.weight"].shape[1])
    weights: Tensors = {f"{DECODER}{name}": tensor for name, tensor in decoder.state_dict().items()}
    state, broadcast = ({**tensors, **weights} for tensors in (first.state, first.broadcast))
    results = {client: local_round(SPEC, broadcast, client) for client in CLIENTS}
    updates = [Update(name, it.num_examples, lambda sent=it.update: sent) for name, it in results.items()]  # type: ignore[misc]
    found = run_secure_round(METHODS["fedmae"], state, broadcast, updates, context(SPEC, 1))
    assert found.survivors == CLIENTS

    with torch.no_grad():
        features_NW = decoder.norm(decoder.blocks(decoder.positions))[0, 1:].double()
    num_images = {client: it.num_examples for client, it in results.items()}
    total_PW = -found.result.state[PREDICTION].double() * sum(num_images.values())  # the learning rate is 1
    sums_NP = -BATCH_SIZE * NUM_PIXELS / 2 * torch.linalg.lstsq(features_NW.T, total_PW.T).solution

    hidden = {client: hidden_patches(client) for client in CLIENTS}
    [place] = torch.stack(list(hidden.values())).sum(dim=(0, 1)).eq(1).nonzero()[0].tolist()
    [victim] = (client for client in CLIENTS if hidden[client][:, place].any())
    batch = training(SPEC, victim, broadcast=broadcast).batch()  # the coordinator knows all but the images
    [number] = hidden[victim][:, place].nonzero().flatten().tolist()
    own = patchify(batch.views[0], 4)[number, place].double()
    assert own.max() > 0.5
    torch.testing.assert_close(sums_NP[place] / num_images[victim], own, atol=1e-5, rtol=0)
