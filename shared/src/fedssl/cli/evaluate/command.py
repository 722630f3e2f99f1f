"""`fedssl evaluate`: how good an encoder is, by the papers' protocols."""

from pathlib import Path
from typing import Annotated, Literal, get_args

import typer

from fedssl.cli.arguments import DataFolderOption, DeviceOption, EncoderThreadsOption
from fedssl.cli.destinations import require_place
from fedssl.cli.errors import UsageError
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption
from fedssl.protocol.evaluation import MapMethod, Measure, Settings

NUM_LABELS = 10_000
NUM_MAPPED = 3000

# The keys of `fedssl.evaluation.FINE_TUNINGS`, which a test compares: importing that would import torch for `--help`.
TuningName = Literal["fast", "fedx", "fedu", "fedu-reference", "ssd", "fedrlc"]
PlainEncoder = Literal["resnet18", "resnet34", "resnet50", "resnet101"]


def evaluate(
    model: Annotated[
        Path,
        typer.Argument(
            metavar="MODEL",
            help="A .safetensors file from `fedssl run pull` or `fedssl simulate`, or their folder: its "
            "model.safetensors.",
        ),
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A labelled data set with a test split.  [default: the spec's data set]"),
    ] = None,
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="The run's spec.  [default: spec.yaml in the model's folder]")
    ] = None,
    encoder: Annotated[
        PlainEncoder | None,
        typer.Option(help="Read MODEL as torchvision's network of this name, which needs no spec."),
    ] = None,
    settings: Annotated[
        Settings, typer.Option(help="Whose settings to use for the linear probe, --semi and --transfer.")
    ] = "fast",
    measures: Annotated[
        str,
        typer.Option(
            metavar="LIST", help="What to measure: any of probe, knn and geometry, separated by commas, or none."
        ),
    ] = "probe,knn,geometry",
    num_labels: Annotated[
        int,
        typer.Option(min=0, help="Number of labelled training images for the classifiers; 0: all, as in the papers."),
    ] = NUM_LABELS,
    num_test: Annotated[int, typer.Option(min=0, help="Number of test images; 0: all.")] = 0,
    semi: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Also fine-tune with these percentages of all labels: `--semi 1,5,10`."),
    ] = None,
    semi_settings: Annotated[
        TuningName | None, typer.Option(help="The settings of --semi.  [default: as --settings]")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Also evaluate the encoder on this other labelled data set.")
    ] = None,
    angles: Annotated[
        Path | None,
        typer.Option(
            metavar="GLOBAL",
            exists=True,
            help="Also measure FedX's angles between the embeddings of MODEL, a client's model, and this global model.",
        ),
    ] = None,
    map_: Annotated[
        Path | None,
        typer.Option(
            "--map", metavar="PNG", help="Also draw a map of the test images, coloured by class.", dir_okay=False
        ),
    ] = None,
    map_method: Annotated[
        MapMethod, typer.Option(help="How to draw the map: t-SNE preserves neighbourhoods, PCA distances.")
    ] = "tsne",
    map_images: Annotated[int, typer.Option(min=2, help="Number of test images on the map.")] = NUM_MAPPED,
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    threads: EncoderThreadsOption = 1,
    *,
    baselines: Annotated[
        bool,
        typer.Option(help="Also measure an untrained encoder, by the same probe and neighbours. Takes as long again."),
    ] = True,
    output: FormatOption = Format.TABLE,
) -> None:
    """Evaluate an encoder on a labelled data set.

    Example: `fedssl evaluate run-1a2b3c4d --data fashion-mnist`

    \b
    probe     a linear classifier on its frozen representations
    knn       the 200 nearest neighbours, weighted by cosine similarity
    geometry  how the representations are spread in their space: uniformity,
              alignment, effective rank, feature standard deviation

    Next to the accuracies are those of an untrained encoder (initial.safetensors in MODEL's folder, else random weights
    of the same shape), and the chance of being right without an encoder.

    Accuracies are those after the last epoch. If a protocol reports the best epoch, chosen on the test set, that one is
    shown too. docs/evaluation.md describes the settings, and how `fast` agrees with those of the papers.
    """
    if map_ is not None:
        require_place("--map", map_)
    if semi_settings is not None and semi is None:
        raise UsageError("--semi-settings are those of --semi: give percentages of labels too, for example --semi 1,10")
    from fedssl.cli.evaluate import report, steps
    from fedssl.cli.evaluate.models import read_model

    opened = read_model(model, spec, encoder)
    request = steps.Request(
        model=model,
        data=data or opened.dataset(),
        settings=settings,
        measures=_read_measures(measures),
        num_labels=num_labels or None,
        num_test=num_test or None,
        semi=_read_shares(semi),
        tuning=_choose_tuning(settings, semi_settings) if semi else "fast",
        transfer=transfer,
        angles=angles,
        baselines=baselines,
        map=map_,
        map_method=map_method,
        num_mapped=map_images,
        device=device,
    )
    machine = prepare(device, threads, data_folder, {request.data, *filter(None, [transfer])})
    report.show(steps.carry_out(request, opened, machine.data_root), output)


def _read_measures(text: str) -> tuple[Measure, ...]:
    """Return the value of `--measures`. Raises UsageError."""
    known: tuple[Measure, ...] = get_args(Measure)
    names = [] if text.strip() == "none" else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--measures {text}: there is no {unknown[0]!r}; give any of {', '.join(known)}, or none")
    return tuple(name for name in known if name in names)


def _read_shares(text: str | None) -> tuple[float, ...]:
    """Return the value of `--semi` as shares, 0..1. Raises UsageError."""
    try:
        percentages = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        percentages = [0.0]
    if not all(0 < percentage <= 100 for percentage in percentages):
        raise UsageError(f"--semi {text}: give percentages above 0 and up to 100, for example --semi 1,5,10")
    return tuple(percentage / 100 for percentage in percentages)


def _choose_tuning(settings: Settings, chosen: TuningName | None) -> TuningName:
    """Return the settings of `--semi`. Raises UsageError if `--settings` has none."""
    if chosen is not None:
        return chosen
    if settings == "flesd" or settings == "orchestra":
        known = ", ".join(get_args(TuningName))
        raise UsageError(f"{settings} has no semi-supervised evaluation: give --semi-settings, one of {known}")
    return settings
