"""`fedssl evaluate`: how good an encoder is, by the papers' protocols."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, get_args

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption
from fedssl.cli.simulate import DataFolderOption, DeviceOption

if TYPE_CHECKING:
    from fedssl.protocol.evaluation import EvaluationConfig, Measure

NUM_LABELS = 10_000
NUM_MAPPED = 3000


# Written out: importing them from where they are used would import pydantic, or torch, for every `--help`.
SettingsName = Literal["fast", "fedx", "fedu", "ssd", "fedrlc", "flesd", "orchestra"]
TuningName = Literal["fast", "fedx", "fedu", "fedu-reference", "ssd", "fedrlc"]
MapMethod = Literal["tsne", "pca"]
PlainEncoder = Literal["resnet18", "resnet50"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What was asked for. `num_labels`, `num_test` None: all images; `semi`: shares 0..1; `tuning`: its settings."""

    model: Path
    data: str
    settings: SettingsName
    measures: "tuple[Measure, ...]"
    num_labels: int | None
    num_test: int | None
    semi: tuple[float, ...] = ()
    tuning: TuningName = "fast"
    transfer: str | None = None
    angles: Path | None = None
    map: Path | None = None
    map_method: MapMethod = "tsne"
    num_mapped: int = NUM_MAPPED
    device: str = "cpu"

    @property
    def config(self) -> "EvaluationConfig":
        """The measures as a run's spec says them; there must be one."""
        from fedssl.protocol.evaluation import EvaluationConfig

        return EvaluationConfig.model_validate(
            {"dataset": self.data, "measures": self.measures, "settings": self.settings}
        )


def evaluate(
    model: Annotated[
        Path, typer.Argument(metavar="MODEL", help="A .safetensors file from `fedssl run pull` or `fedssl simulate`.")
    ],
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="A labelled data set with a test split.  [default: the spec's]"),
    ] = None,
    spec: Annotated[
        str | None, typer.Option(metavar="SPEC", help="The run's spec.  [default: spec.yaml beside the model]")
    ] = None,
    encoder: Annotated[
        PlainEncoder | None,
        typer.Option(help="MODEL holds torchvision's network of this name, and needs no spec."),
    ] = None,
    settings: Annotated[
        SettingsName, typer.Option(help="The linear probe's settings, and those of --semi and --transfer.")
    ] = "fast",
    measures: Annotated[
        str, typer.Option(metavar="LIST", help="Of probe, knn and geometry, with commas; or none.")
    ] = "probe,knn,geometry",
    num_labels: Annotated[
        int, typer.Option(min=0, help="Labelled training images that classifiers may see; 0: all, as the papers do.")
    ] = NUM_LABELS,
    num_test: Annotated[int, typer.Option(min=0, help="Test images; 0: all.")] = 0,
    semi: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Fine-tune with these percentages of all labels: `--semi 1,5,10`."),
    ] = None,
    semi_settings: Annotated[
        TuningName | None, typer.Option(help="The fine-tuning's settings.  [default: as --settings]")
    ] = None,
    transfer: Annotated[
        str | None, typer.Option(metavar="NAME", help="Judge the encoder on another labelled data set, too.")
    ] = None,
    angles: Annotated[
        Path | None,
        typer.Option(metavar="GLOBAL", help="FedX's angles between the embeddings of MODEL, a client's, and this one."),
    ] = None,
    map_: Annotated[
        Path | None, typer.Option("--map", metavar="PNG", help="Draw a map of the test images, coloured by class.")
    ] = None,
    map_method: Annotated[MapMethod, typer.Option(help="t-SNE keeps neighbourhoods, PCA distances.")] = "tsne",
    map_images: Annotated[int, typer.Option(min=2, help="Test images on the map.")] = NUM_MAPPED,
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    threads: Annotated[int, typer.Option(min=1, help="CPU threads; 1 gives the same numbers every time.")] = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Judge an encoder on a labelled data set.

    \b
    probe     a linear classifier on its frozen representations
    knn       the 200 nearest neighbours, weighted by their cosine
    geometry  how the representations fill their space: uniformity, alignment,
              effective rank, feature standard deviation

    Accuracies are of the last epoch. Where a protocol reports the best epoch, which it chooses on the test set, that is
    given beside it. What the settings are, and how `fast` agrees with the papers', is in docs/evaluation.md.
    """
    from fedssl.cli.evaluate.models import read_model
    from fedssl.cli.evaluate.report import show
    from fedssl.cli.evaluate.steps import carry_out
    from fedssl.cli.simulate import prepare

    opened = read_model(model, spec, encoder)
    request = Request(
        model=model,
        data=data or opened.dataset(),
        settings=settings,
        measures=_measures(measures),
        num_labels=num_labels or None,
        num_test=num_test or None,
        semi=_shares(semi),
        tuning=_tuning(settings, semi_settings) if semi else "fast",
        transfer=transfer,
        angles=angles,
        map=map_,
        map_method=map_method,
        num_mapped=map_images,
        device=device,
    )
    machine = prepare(device, threads, data_folder, {request.data, *filter(None, [transfer])})
    show(carry_out(request, opened, machine.data_root), output)


def _measures(text: str) -> "tuple[Measure, ...]":
    from fedssl.protocol.evaluation import Measure

    known: tuple[Measure, ...] = get_args(Measure)
    names = [] if text.strip() in ("", "none") else [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"--measures {text}: there is no {unknown[0]!r}; there are {', '.join(known)} and none")
    return tuple(name for name in known if name in names)


def _shares(text: str | None) -> tuple[float, ...]:
    try:
        percentages = [float(part) for part in text.split(",")] if text is not None else []
    except ValueError:
        percentages = [0.0]
    if not all(0 < percentage <= 100 for percentage in percentages):
        raise UsageError(f"--semi {text}: give percentages above 0 and up to 100, for example --semi 1,5,10")
    return tuple(percentage / 100 for percentage in percentages)


def _tuning(settings: SettingsName, chosen: TuningName | None) -> TuningName:
    if chosen is not None:
        return chosen
    if settings == "flesd" or settings == "orchestra":
        known = ", ".join(get_args(TuningName))
        raise UsageError(f"{settings} has no semi-supervised evaluation: choose --semi-settings from {known}")
    return settings
