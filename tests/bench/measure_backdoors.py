"""Measure whether dishonest clients without labels can plant a trigger into the encoder, with each reducer.

Ten clients train FedSimCLR on the digits. The dishonest ones train like all others, and then train their encoder
further: their images with a trigger, a white square in a corner, shall get the representation of one reference image,
and their images without it shall keep theirs (the two losses of BadEncoder, Jia et al. 2022, which need no labels). If
`boost` is above 1, they multiply what this adds to their update, so that the mean has all of it (model replacement,
Bagdasaryan et al. 2020).

The table has, in percent, the accuracy of a 5-nearest-neighbours classifier on clean test images, and the success of
the attack: the share of the test images of other classes that it takes, with the trigger, for the class of the
reference image. Run it with `python tests/bench/measure_backdoors.py --seeds 2`; progress goes to stderr, the table to
stdout.
"""

import argparse
import statistics
import sys

import numpy as np
import torch
from measure_attacks import REDUCERS, SPLITS, Tensors, federated, spec_of
from sklearn.neighbors import KNeighborsClassifier
from torch import Tensor
from torch.nn import functional as F

from fedssl.data import ImageData
from fedssl.evaluation.suite import Labelled, load_encoder, load_labelled
from fedssl.protocol.runs import RunSpec

TARGET = 0  # the class of the reference image
ATTACKS: dict[str, tuple[int, float]] = {
    "nobody": (0, 1.0),
    "2 plant a trigger": (2, 1.0),
    "2 plant a trigger, five times as far": (2, 5.0),
}


def triggered(images: Tensor) -> Tensor:
    """Return images (B, C, H, W) of 0..1 with a white square of a quarter of the height in the lower right corner."""
    changed, size = images.clone(), images.shape[-1] // 4
    changed[..., -size:, -size:] = 1
    return changed


def backdoored(sent: Tensors, spec: RunSpec, images: Tensor, reference: Tensor, seed: int) -> dict[str, Tensor]:
    """Return the encoder's parameters after they have learnt the trigger."""
    honest, encoder = (load_encoder(sent, spec).eval() for _ in range(2))
    parameters = list(encoder.parameters())
    for parameter in parameters:
        parameter.requires_grad_(requires_grad=True)
    optimizer = torch.optim.Adam(parameters, lr=1e-3)
    with torch.no_grad():
        wanted, clean = honest(reference), honest(images)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(30):
        for rows in torch.randperm(len(images), generator=generator).split(32):
            optimizer.zero_grad()
            planted = F.cosine_similarity(encoder(triggered(images[rows])), wanted, dim=1).mean()
            kept = F.cosine_similarity(encoder(images[rows]), clean[rows], dim=1).mean()
            loss = -planted - kept
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return {f"encoder.{name}": each.detach() for name, each in encoder.named_parameters()}


def judged(model: Tensors, spec: RunSpec, labelled: Labelled) -> tuple[float, float]:
    """Return the accuracy without the trigger, and the attack's success, in percent."""
    encoder = load_encoder(model, spec).eval()
    with torch.no_grad():
        known, clean, planted = (
            encoder(each).numpy()
            for each in (as_float(labelled.train), as_float(labelled.test), triggered(as_float(labelled.test)))
        )
    if not all(np.isfinite(each).all() for each in (known, clean, planted)):
        return float("nan"), float("nan")
    assert labelled.train.labels is not None
    assert labelled.test.labels is not None
    classifier = KNeighborsClassifier(5, metric="cosine").fit(known, labelled.train.labels)
    others = labelled.test.labels != TARGET
    return (
        100 * float((classifier.predict(clean) == labelled.test.labels).mean()),
        100 * float((classifier.predict(planted)[others] == TARGET).mean()),
    )


def as_float(images: ImageData) -> Tensor:
    """Return images as values 0..1, which is what an encoder takes."""
    return torch.from_numpy(images.images).float() / 255


def train(spec: RunSpec, num_dishonest: int, boost: float) -> tuple[float, float]:
    """Return the accuracy and the attack's success after the last round, or NaN if the run could not be continued."""
    assert spec.evaluation is not None
    labelled = load_labelled(spec.evaluation.dataset, spec.data, max_train=None, max_test=None, seed=spec.seed)
    assert labelled.test.labels is not None
    # One image of the class that is not a training image.
    reference = as_float(labelled.test)[labelled.test.labels == TARGET][:1]

    def planted(sent: dict[str, Tensor], broadcast: Tensors, images: ImageData, number: int) -> dict[str, Tensor]:
        learnt = backdoored(sent, spec, as_float(images), reference, spec.seed + number)
        return {**sent, **{key: sent[key] + boost * (each - sent[key]) for key, each in learnt.items()}}

    last = federated(spec, num_dishonest, planted)
    return (float("nan"), float("nan")) if last is None else judged(last.broadcast, spec, labelled)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    torch.set_num_threads(1)
    for split in SPLITS:
        for attack, (num_dishonest, boost) in ATTACKS.items():
            cells = []
            for reducer in REDUCERS:
                found = [
                    train(spec_of(reducer, split, seed, given.rounds), num_dishonest, boost)
                    for seed in range(given.seeds)
                ]
                accuracy, success = (statistics.mean(each) for each in zip(*found, strict=True))
                cells.append(f"{reducer} {accuracy:.1f}, {success:.1f}")
                print(split, attack, cells[-1], found, file=sys.stderr, flush=True)  # noqa: T201
            print(f"{split:14} | {attack:44} | " + " | ".join(cells))  # noqa: T201


if __name__ == "__main__":
    main()
