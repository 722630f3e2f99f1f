"""Measure both readings of SSD's hard separation next to SSD and its base, as in Figure 6b.

    python tests/bench/measure_hard_separation.py results.jsonl --data DIR [--seeds 0,1,2] [--set KEY=VALUE]

DIR is a folder of data sets with CIFAR-10. The setting is that of `fedssl compare --ladder best --on cifar10-dir0.1`.
Measures of the global model on 4,000 test images: the linear probe; -Lu and the mean squared distance of two augmented
views (alignment, smaller is better), of representations h and of embeddings z, all of length 1.

Every finished run is a line of the results' file, and is not repeated.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from fedssl.cli.specs import apply_change
from fedssl.data import normalize, random_view, to_float
from fedssl.data.datasets import load_dataset
from fedssl.evaluation import alignment, uniformity
from fedssl.evaluation.suite import load_encoder, load_projected
from fedssl.experiments.ladders import read_ladder
from fedssl.experiments.overlays import overlay
from fedssl.experiments.reproduction import dataset_places
from fedssl.experiments.variants import Variant, build_spec, values_of
from fedssl.simulation import Result, simulate

NUM_TEST = 4000
VARIANTS = (
    Variant("base", "fedalignuniform"),
    Variant("ssd", "ssd"),
    Variant("mask", "fedalignuniform", changes={"hsd": {"variant": "mask"}, "pd": {}}),
    Variant("projection", "fedalignuniform", changes={"hsd": {"variant": "projection"}, "pd": {}}),
)


@torch.no_grad()
def geometry(result: Result, place: str, root: Path) -> dict[str, float]:
    """Return -Lu and alignment of h and z."""
    spec = result.spec
    images = to_float(torch.from_numpy(load_dataset(place, "test", root).images[:NUM_TEST]))
    generator = torch.Generator().manual_seed(0)
    views = [images, *(random_view(images, spec.data.augmentation, generator) for _ in range(2))]
    found: dict[str, float] = {}
    for name, network in (("h", load_encoder(result.model, spec)), ("z", load_projected(result.model, spec))):
        network.eval()
        outputs = []
        for view in views:
            parts = [network(normalize(x_BCHW, spec.data)) for x_BCHW in torch.split(view, 500)]
            outputs.append(torch.cat(parts).float())
        plain, first, second = (F.normalize(output, dim=1) for output in outputs)
        found |= {f"uniformity_{name}": float(uniformity(plain)), f"alignment_{name}": float(alignment(first, second))}
    return found


def main() -> None:
    """Run every setting that is not finished."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--set", action="append", default=[], dest="changes")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    place = dataset_places(["cifar10"], arguments.data)["cifar10"]
    named = {"dataset": place}
    base: dict[str, Any] = overlay(
        read_ladder("best").setting("cifar10-dir0.1"),
        {"partition": named, "evaluation": {**named, "measures": ["probe"], "max_test": NUM_TEST}},
    )
    for change in arguments.changes:
        apply_change(base, change)
    lines = arguments.results.read_text().splitlines() if arguments.results.exists() else []
    done = [(each["variant"], each["seed"], each["changes"]) for each in map(json.loads, lines)]
    for seed in map(int, arguments.seeds.split(",")):
        for variant in VARIANTS:
            if (variant.name, seed, arguments.changes) in done:
                continue
            result = simulate(build_spec(values_of(base, variant, seed)))
            evaluations = result.evaluations_by_round
            line = {
                "variant": variant.name,
                "seed": seed,
                "untrained": evaluations[0]["probe"],
                "probe": evaluations[max(evaluations)]["probe"],
                **geometry(result, place, arguments.data),
                "changes": arguments.changes,
            }
            with arguments.results.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
