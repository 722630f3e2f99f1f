"""`fedssl evaluate`: how good an encoder is, by a linear probe and by its nearest neighbours."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs

if TYPE_CHECKING:
    from torch import nn

    from fedssl.data import ImageData
    from fedssl.protocol.runs import RunSpec

NUM_LABELS = 10_000
_PREFIX = "encoder."


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Shares of the test set, 0..1."""

    linear_probe: float
    knn: float


@dataclass(frozen=True, slots=True)
class Task:
    """Labelled images to judge encoders by: the classifiers see `train`, the accuracies are of `test`."""

    train: "ImageData"
    test: "ImageData"


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A .safetensors file from `fedssl run pull` or `fedssl simulate`.")
    ],
    data: Annotated[str, typer.Option(metavar="NAME", help="A labelled data set with a test split.")],
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="The run's spec.  [default: spec.yaml beside the model]")
    ] = None,
    num_labels: Annotated[
        int, typer.Option(min=1, help="Labelled training images that the classifiers may see.")
    ] = NUM_LABELS,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    output: FormatOption = Format.TABLE,
) -> None:
    """Judge an encoder: a linear classifier and weighted nearest neighbours on its frozen representations."""
    from fedssl.cli import export
    from fedssl.cli.datasets import ensure
    from fedssl.cli.specs import read_spec

    source = spec or str(model.parent / export.SPEC)
    if spec is None and not Path(source).exists():
        raise UsageError(f"there is no {source}: give the run's spec with --spec")
    wanted = read_spec(source)
    ensure(data, note)
    task = load_task(data, wanted, num_labels)
    accuracy = judge(load_encoder(model, wanted), task, wanted, device)
    if output is Format.JSON:
        show_json({"model": str(model), "data": data, "num_labels": len(task.train), "num_test": len(task.test),
                   "linear_probe": accuracy.linear_probe, "knn": accuracy.knn})  # fmt: skip
        return
    show_pairs(
        {
            "linear probe": f"{accuracy.linear_probe:.2%}",
            "kNN": f"{accuracy.knn:.2%}",
            "labels": len(task.train),
            "test images": len(task.test),
        }
    )


def load_task(name: str, spec: "RunSpec", num_labels: int) -> Task:
    """A data set's splits in the shape of the run's images, the training split cut down by the run's seed.

    Raises:
        DataError: the images cannot be read, or have no labels.
    """
    from fedssl.cli.datasets import data_folder
    from fedssl.data import choose_images, conform, load_dataset
    from fedssl.errors import DataError

    train, test = (conform(load_dataset(name, split, data_folder()), spec.data) for split in ("train", "test"))
    if train.labels is None or test.labels is None:
        raise DataError(f"{name} has no labels: an encoder is judged by how well they can be told from its output")
    return Task(train.subset(choose_images(len(train), num_labels, spec.seed)), test)


def load_encoder(model: Path, spec: "RunSpec") -> "nn.Module":
    """The encoder in a model's file. Raises UsageError where the file is not one of this spec's models."""
    from safetensors import SafetensorError

    from fedssl.artifacts.tensors import load_tensors
    from fedssl.models import build_encoder

    encoder = build_encoder(spec.model.encoder, spec.data.channels)
    try:
        tensors = load_tensors(model)
        own = {name.removeprefix(_PREFIX): tensor for name, tensor in tensors.items() if name.startswith(_PREFIX)}
        encoder.load_state_dict(own)
    except FileNotFoundError:
        raise UsageError(f"there is no {model}") from None
    except (SafetensorError, RuntimeError) as error:
        reason = str(error).splitlines()[0].rstrip(":")
        raise UsageError(f"{model} does not hold the encoder that the spec describes ({reason})") from None
    return encoder


def judge(encoder: "nn.Module", task: Task, spec: "RunSpec", device: str = "cpu") -> Accuracy:
    """The accuracies of an encoder's representations."""
    import torch

    from fedssl.evaluation import extract_features, knn_accuracy, linear_probe

    encoder.to(device)
    sides: list[Any] = []
    for images in (task.train, task.test):
        assert images.labels is not None, "a task has labels"
        sides += [extract_features(encoder, images, spec.data, device), torch.from_numpy(images.labels)]
    return Accuracy(linear_probe(*sides).accuracy, knn_accuracy(*sides))
