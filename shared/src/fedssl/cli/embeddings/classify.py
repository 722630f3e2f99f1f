"""`fedssl classify`: the probabilities of many images' classes, in one CSV file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.arguments import (
    DataFolderOption,
    DeviceOption,
    EncoderThreadsOption,
    ImagesArgument,
    SplitOption,
    TokenFileOption,
    UrlOption,
)
from fedssl.cli.destinations import require_place
from fedssl.cli.embeddings.models import ModelOption, read_model
from fedssl.cli.errors import UsageError
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption, note, show_json, show_pairs, show_table
from fedssl.cli.progress_bar import progress_bar
from fedssl.protocol.chance import Chance, chance_of, chance_of_labels

if TYPE_CHECKING:
    from fedssl.classification.fit import Fit
    from fedssl.embeddings.encoders import Model
    from fedssl.embeddings.sources import Source
    from fedssl.models.classifier import Head

LabelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LABELS",
        help="Fit a classifier to these labelled images: a folder with one sub-folder per class, an .npz file or a "
        "known data set; or a CSV file (path,label[,group]) with a line for each of IMAGES. A label may be empty.",
    ),
]
HeadOption = Annotated[
    Path | None,
    typer.Option(
        "--head",
        metavar="HEAD",
        help="A classifier that --save-head has written, or the folder of a run of `ridge-probe` or `classifier`.",
    ),
]
SaveHeadOption = Annotated[
    Path | None,
    typer.Option("--save-head", metavar="FILE", help="Write the classifier to a .safetensors file.", dir_okay=False),
]
PredictionsOption = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE", help="The CSV file to write.", dir_okay=False)
]


def classify(
    images: ImagesArgument,
    *,
    model: ModelOption,
    labels: LabelsOption = None,
    head: HeadOption = None,
    save_head: SaveHeadOption = None,
    out: PredictionsOption = Path("predictions.csv"),
    split: SplitOption = None,
    data_folder: DataFolderOption = None,
    device: DeviceOption = "cpu",
    threads: EncoderThreadsOption = 1,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Predict the class of every image by a linear classifier on top of an encoder.

    Example: `fedssl classify photos --model run-1a2b3c4d --labels labelled`

    FILE has one line per image: its path, the predicted class, and a probability per class in columns p_CLASS. If the
    labels are a CSV file with one column per class, an image may have several; those with 0.5 or more are predicted.

    --labels fits the classifier (ridge regression on the representations) to your labelled images. A fifth of them is
    held out to choose its penalty and the scale of its probabilities, and to report how many it gets right; images of
    one `group`, for example a patient, stay together. --save-head keeps the classifier, --head uses it again, and
    `fedssl export --to onnx --head` makes one file of encoder and classifier. The classifier of a run of `ridge-probe`
    or `classifier` needs no labels here: `--head FOLDER` takes it from the run's folder.

    An image that cannot be decoded is left out, and named. Nothing is sent anywhere; if MODEL is a run's id, its
    weights are fetched from the coordinator.
    """
    require_one_head(labels, head, save_head)
    for option, file in (("--out", out), ("--save-head", save_head)):
        if file is not None:
            require_place(option, file)
    machine = prepare(device, threads, data_folder, set())
    from fedssl.embeddings.sources import open_source

    source = open_source(images, split, machine.data_root)
    encoder, _ = read_model(model, url, token_file)
    write_predictions(source, encoder, labels, head, save_head, out, device, machine.data_root, output)


def require_one_head(labels: str | None, head: Path | None, save_head: Path | None) -> None:
    """Raise UsageError unless the options name exactly one classifier."""
    if (labels is None) == (head is None):
        raise UsageError("give either --labels, to fit a classifier to labelled images, or --head, to use one again")
    if save_head is not None and head is not None:
        raise UsageError("--save-head keeps the classifier that --labels fits: --head names one that exists already")


def write_predictions(
    source: "Source",
    model: "Model",
    labels: str | None,
    head_file: Path | None,
    save_head: Path | None,
    out: Path,
    device: str,
    data_root: Path | None,
    output: Format,
) -> None:
    """Fit or read the classifier, write the file of probabilities, and show what is in it."""
    from fedssl.classification.classify import classify as write
    from fedssl.classification.head_file import require_encoder, require_name, write_head
    from fedssl.classification.run_head import head_at

    if save_head is not None:
        require_name(save_head)
    fit = None if labels is None else _fitted(source, model, labels, device, data_root)
    if fit is None:
        assert head_file is not None, "one of the two is given"
        head = head_at(head_file)
        require_encoder(head, model, str(head_file))
    else:
        head = fit.head
    if save_head is not None:
        write_head(head, save_head)
        note(f"{save_head}: the classifier, for --head")
    with progress_bar("classifying", len(source), suffix=" images") as update:
        found = write(source, model, head, out, device=device, on_progress=update)
    for each in found.left_out["first"]:
        note(f"left out {each['path']}: {each['reason']}")
    if output is Format.JSON:
        show_json(
            {
                "file": str(out),
                "num_images": found.num,
                "num_predicted": found.num_predicted,
                "left_out": found.left_out,
                "not_read": source.left_out(),
                "classifier": _described(head, fit),
            }
        )
        return
    _show_fit(head, fit)
    show_table(["class", "#predicted"], list(found.num_predicted.items()))
    show_pairs(
        {
            "file": str(out),
            "classified": f"{found.num:,} of {len(source):,} images",
            "left out": f"{found.left_out['num']:,} that cannot be decoded" if found.left_out["num"] else None,
            "not read": source.left_out() or None,
        }
    )


def _fitted(source: "Source", model: "Model", labels: str, device: str, data_root: Path | None) -> "Fit":
    from fedssl.classification.fit import fit_head
    from fedssl.classification.labelled import label_images, open_labelled

    if labels.lower().endswith(".csv"):
        labelled = label_images(source, Path(labels).expanduser())
    else:
        labelled = open_labelled(labels, data_root)
    with progress_bar("embedding labelled", len(labelled.source), suffix=" images") as update:
        fit = fit_head(labelled, model, device=device, on_progress=update)
    for each in fit.left_out:
        note(f"left out of the labelled images: {each['path']}: {each['reason']}")
    return fit


def _described(head: "Head", fit: "Fit | None") -> dict[str, Any]:
    about = {"classes": head.class_names, "multi_label": head.multi_label, **head.about["fit"]}
    if fit is None:
        return about
    rows = [
        {"name": c.name, "num_images": c.num_images, "num_held_out": c.num_held_out, "num_right": c.num_right}
        for c in fit.classes
    ]
    chance = _chance(head, fit)
    return {**about, "chance": None if chance is None else chance.as_json(), "per_class": rows}


def _chance(head: "Head", fit: "Fit") -> Chance | None:
    """Return the accuracy by chance on the held-out images."""
    if head.multi_label:
        return chance_of_labels([each.num_held_out for each in fit.classes], head.about["fit"]["num_held_out"])
    return chance_of(number for number, each in enumerate(fit.classes) for _ in range(each.num_held_out))


def _show_fit(head: "Head", fit: "Fit | None") -> None:
    if fit is None:
        return
    rows = [(each.name, each.num_images, each.num_held_out, each.num_right) for each in fit.classes]
    show_table(["class", "#labelled", "#held out", "#of them right"], rows)
    what = "labels" if head.multi_label else "images"
    chance = _chance(head, fit)
    baseline = "" if chance is None else f" (chance: {100 * chance.accuracy:.2f} %, {chance.how})"
    note(
        f"{100 * fit.accuracy:.2f} % of the held-out {what} are right{baseline}, by a classifier that was fitted "
        "without them; the one that is used is fitted to all"
    )
