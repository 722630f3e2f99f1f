"""Measure what a start from an encoder that was pretrained on other classes is worth, and what it costs in bytes.

Run it with `python tests/bench/measure_starts.py --data-folder FOLDER --out results.jsonl --seed 0`, once per seed, and
with `--table` for the means. FOLDER has `cifar10`, or another data set of ten classes (`--dataset`).

Per seed, one encoder is trained centrally on the classes 0 to 4. Three clients then train on the classes 5 to 9, from
that encoder and from random weights: all parameters, the last block, or adapters (LoRA). Every run has the same images,
rounds and epochs. Linear probe and kNN are on the classes 5 to 9, of test images too; bytes are of one client's round,
besides the frozen tensors, which it receives once.
"""

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from fedssl.artifacts.tensors import Tensors, save_tensors
from fedssl.data import ImageData
from fedssl.data.datasets import load_conformed
from fedssl.evaluation.suite import Labelled, evaluate_encoder, load_encoder
from fedssl.protocol.data import DataConfig
from fedssl.protocol.evaluation import JudgingConfig
from fedssl.protocol.runs import RunSpec
from fedssl.simulation import Result, simulate

NUM_CLIENTS, NUM_PRETRAINED = 3, 5
DATA = {"channels": 3, "image_size": 16}
TRAINED: dict[str, dict[str, Any]] = {
    "all parameters": {},
    "last block": {"trainable": ["blocks.11.*", "norm.*"]},
    "LoRA, rank 4": {"lora": {"rank": 4, "layers": ["blocks.*.attn.*"]}},
}


def chosen(images: ImageData, classes: range, per_class: int, seed: int) -> ImageData:
    """Return some images of each of these classes, whose numbers begin with 0."""
    generator, labels = np.random.default_rng(seed), images.labels
    assert labels is not None, "a data set with classes"
    indices = [generator.permutation(np.flatnonzero(labels == number))[:per_class] for number in classes]
    found = images.subset(generator.permutation(np.concatenate(indices)))
    assert found.labels is not None, "those of the images"
    return ImageData(found.images, found.labels - classes.start)


def spec_of(seed: int, num_rounds: int, local_epochs: int, **model: Any) -> RunSpec:
    """Return the spec of a run."""
    return RunSpec.model_validate(
        {
            "seed": seed,
            "num_rounds": num_rounds,
            "method": {"name": "fedsimclr"},
            "data": DATA,
            "model": {
                "encoder": {"name": "vit-tiny", "patch_size": 8},
                "projector": {"hidden_dims": [128], "out_dim": 64},
                **model,
            },
            "training": {
                "batch_size": 32,
                "local_epochs": local_epochs,
                "optimizer": {"name": "adamw", "learning_rate": 5e-4, "weight_decay": 0.05},
            },
        }
    )


def measured(result: Result, labelled: Labelled) -> dict[str, float]:
    """Return the scores of the last encoder, and the bytes of a client's round."""
    config = JudgingConfig(dataset="held-out", measures=("probe", "knn"))
    scores = evaluate_encoder(load_encoder(result.model, result.spec), labelled, config, result.spec.data)
    last = result.history[-1]
    down, up = last.bytes_down // NUM_CLIENTS, last.bytes_up // NUM_CLIENTS
    once = result.history[0].bytes_down // NUM_CLIENTS - down
    return {"probe": scores["probe"], "knn": scores["knn"], "down": down, "up": up, "once": once}


def run(arguments: argparse.Namespace) -> None:
    """Measure one seed, and append a line per run."""
    seed, data = arguments.seed, DataConfig.model_validate(DATA)
    train, test = (load_conformed(arguments.dataset, split, data, arguments.data_folder) for split in ("train", "test"))
    first, second = range(NUM_PRETRAINED), range(NUM_PRETRAINED, 2 * NUM_PRETRAINED)
    central = chosen(train, first, arguments.pretraining_images, seed)
    own = chosen(train, second, arguments.images, seed)
    labelled = Labelled(own, chosen(test, second, arguments.test_images, seed))
    clients = {
        f"client-{number}": own.subset(part)
        for number, part in enumerate(np.array_split(np.arange(len(own)), NUM_CLIENTS))
    }
    with tempfile.TemporaryDirectory() as folder:
        pretrained = simulate(spec_of(seed, 1, arguments.pretraining_epochs), {"central": central}).model
        start = Path(folder) / "start.safetensors"
        save_tensors(_encoder(pretrained), start)
        for trained, model in TRAINED.items():
            for begin, initial in (("pretrained", {"initial": {"weights": str(start)}}), ("random", {})):
                spec = spec_of(seed, arguments.rounds, arguments.epochs, **model, **initial)
                found = measured(simulate(spec, clients), labelled)
                row = {"seed": seed, "start": begin, "trained": trained, **found}
                with arguments.out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(row) + "\n")


def table(path: Path) -> None:
    """Print the means over the seeds, with the standard deviations of the scores."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for trained in TRAINED:
        for begin in ("pretrained", "random"):
            own = [row for row in rows if (row["trained"], row["start"]) == (trained, begin)]
            scores = [_mean([row[name] for row in own]) for name in ("probe", "knn")]
            size = [f"{own[0][name]:,}" for name in ("down", "up", "once")]
            sys.stdout.write(f"| {' | '.join([trained, begin, *scores, *size])} |\n")


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0:.3f}"


def _encoder(model: Tensors) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name.startswith("encoder.")}


def main() -> None:
    """Measure a seed, or print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--dataset", default="cifar10")
    parser.add_argument("--data-folder", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--images", type=int, default=60, help="per class, of the federation")
    parser.add_argument("--test-images", type=int, default=100, help="per class")
    parser.add_argument("--pretraining-images", type=int, default=100, help="per class")
    parser.add_argument("--pretraining-epochs", type=int, default=6)
    parser.add_argument("--table", action="store_true")
    arguments = parser.parse_args()
    if arguments.table:
        table(arguments.out)
    else:
        run(arguments)


if __name__ == "__main__":
    main()
