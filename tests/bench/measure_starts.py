"""Measure what a start from an encoder that was pretrained on other classes is worth, and what it costs in bytes.

Run it with `python tests/bench/measure_starts.py --data-folder FOLDER --out results.jsonl --seed 0`, once per seed, and
with `--table` for the means. FOLDER has `cifar10`, or another data set of ten classes (`--dataset`).

Per seed, one encoder is trained centrally on the classes 0 to 4. Three clients then train on the classes 5 to 9, from
that encoder and from random weights: all parameters, the last block, or adapters (LoRA). Every run has the same images,
rounds and epochs. Linear probe and kNN are on the classes 5 to 9, of test images too; the start itself is evaluated as
well. Bytes are of one client's round, besides the frozen tensors, which it receives once, next to those that the
numbers of the network give (`formula`).
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
DATA: dict[str, int] = {"channels": 3, "image_size": 16}
WIDTH, PROJECTOR, RANK = 192, (128, 64), 4
ALL, LAST, LORA = "all parameters", "last block", f"LoRA, rank {RANK}"


def model_of(trained: str, depth: int) -> dict[str, Any]:
    """Return the settings of the model that train this part of it."""
    if trained == LAST:
        return {"trainable": [f"blocks.{depth - 1}.*", "norm.*"]}
    return {"lora": {"rank": RANK, "layers": ["blocks.*.attn.*"]}} if trained == LORA else {}


def formula(trained: str, depth: int, patch_size: int) -> int:
    """Return the bytes of the numbers that a client sends: 4 per number, and 8 for BatchNorm's counter.

    A block has 12 w^2 + 13 w parameters, an adapter rank (in + out). A file has a header, too, with the names.
    """
    w, (hidden, out) = WIDTH, PROJECTOR
    block = 12 * w**2 + 13 * w
    tokens = 1 + (DATA["image_size"] // patch_size) ** 2
    embedding = (1 + tokens) * w + (DATA["channels"] * patch_size**2 + 1) * w
    adapters = depth * (RANK * (w + 3 * w) + RANK * (w + w))
    encoder = {ALL: embedding + depth * block + 2 * w, LAST: block + 2 * w, LORA: adapters}[trained]
    head = w * hidden + 4 * hidden + hidden * out + out  # no bias before BatchNorm
    return 4 * (encoder + head) + 8


def chosen(images: ImageData, classes: range, per_class: int, seed: int) -> ImageData:
    """Return some images of each of these classes, whose numbers begin with 0."""
    generator, labels = np.random.default_rng(seed), images.labels
    assert labels is not None, "a data set with classes"
    indices = [generator.permutation(np.flatnonzero(labels == number))[:per_class] for number in classes]
    found = images.subset(generator.permutation(np.concatenate(indices)))
    assert found.labels is not None, "those of the images"
    return ImageData(found.images, found.labels - classes.start)


def spec_of(arguments: argparse.Namespace, num_rounds: int, local_epochs: int, **model: Any) -> RunSpec:
    """Return the spec of a run."""
    encoder = {"name": "vit-tiny", "patch_size": arguments.patch_size, "depth": arguments.depth}
    return RunSpec.model_validate(
        {
            "seed": arguments.seed,
            "num_rounds": num_rounds,
            "method": {"name": "fedsimclr"},
            "data": DATA,
            "model": {
                "encoder": encoder,
                "projector": {"hidden_dims": [PROJECTOR[0]], "out_dim": PROJECTOR[1]},
                **model,
            },
            "training": {
                "batch_size": 32,
                "local_epochs": local_epochs,
                "optimizer": {"name": "adamw", "learning_rate": 5e-4, "weight_decay": 0.05},
            },
        }
    )


def scores_of(model: Tensors, spec: RunSpec, labelled: Labelled) -> dict[str, float]:
    """Return the linear probe and kNN of an encoder."""
    config = JudgingConfig(dataset="held-out", measures=("probe", "knn"))
    scores = evaluate_encoder(load_encoder(model, spec), labelled, config, spec.data)
    return {"probe": scores["probe"], "knn": scores["knn"]}


def bytes_of(result: Result) -> dict[str, int]:
    """Return the bytes of a client's round, and of what it receives once."""
    last = result.history[-1]
    down, up = last.bytes_down // NUM_CLIENTS, last.bytes_up // NUM_CLIENTS
    once = result.history[0].bytes_down // NUM_CLIENTS - down
    return {"down": down, "up": up, "once": once}


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
        pretrained = simulate(spec_of(arguments, 1, arguments.pretraining_epochs), {"central": central}).model
        start = Path(folder) / "start.safetensors"
        save_tensors(_encoder(pretrained), start)
        for trained in (ALL, LAST, LORA):
            for begin, initial in (("pretrained", {"initial": {"weights": str(start)}}), ("random", {})):
                model = model_of(trained, arguments.depth)
                spec = spec_of(arguments, arguments.rounds, arguments.epochs, **model, **initial)
                result = simulate(spec, clients)
                if trained == ALL:
                    append(arguments, begin, "nothing", scores_of(result.initial, result.spec, labelled))
                sizes = {**bytes_of(result), "formula": formula(trained, arguments.depth, arguments.patch_size)}
                append(arguments, begin, trained, {**scores_of(result.model, result.spec, labelled), **sizes})


def append(arguments: argparse.Namespace, begin: str, trained: str, found: dict[str, float]) -> None:
    """Append what was measured of a run to the file of results."""
    row = {"seed": arguments.seed, "start": begin, "trained": trained, **found}
    with arguments.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def table(path: Path) -> None:
    """Print the means over the seeds, with the standard deviations of the scores."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for trained in ("nothing", ALL, LAST, LORA):
        for begin in ("pretrained", "random"):
            own = [row for row in rows if (row["trained"], row["start"]) == (trained, begin)]
            scores = [_mean([row[name] for row in own]) for name in ("probe", "knn")]
            size = [f"{own[0].get(name, 0):,}" for name in ("down", "up", "formula", "once")]
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
    parser.add_argument("--depth", type=int, default=12, help="blocks of the ViT-Tiny")
    parser.add_argument("--patch-size", type=int, default=8)
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
