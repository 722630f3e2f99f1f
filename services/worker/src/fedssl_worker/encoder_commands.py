"""`fedssl-worker embed` and `classify`: what a trained encoder does on the site's own images, without any network."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.arguments import DeviceOption, EncoderThreadsOption
from fedssl.cli.embeddings.classify import (
    HeadOption,
    PredictionsOption,
    SaveHeadOption,
    require_one_head,
    write_predictions,
)
from fedssl.cli.embeddings.embed import RepresentationsOption, write_representations
from fedssl.cli.machine import prepare
from fedssl.cli.output import Format, FormatOption
from fedssl.cli.usage import in_words
from fedssl.errors import FedSSLError, SpecError

if TYPE_CHECKING:
    from fedssl.embeddings.encoders import Model

EXIT_UNUSABLE = 2
_OWN = "own"

DataOption = Annotated[
    str,
    typer.Option(
        envvar="FEDSSL_WORKER_DATA",
        help="The images, as of `run`: a folder with images at any depth, an .npz file, or a known data set.",
    ),
]
ModelOption = Annotated[
    Path,
    typer.Option(
        metavar="FOLDER", help="The encoder: a folder that `fedssl run pull` wrote, or a file of weights in it."
    ),
]
LabelsOption = Annotated[
    str | None,
    typer.Option(
        metavar="LABELS",
        help="Fit a classifier: to the images' own labels with `own`, or to those in a CSV file (path,label[,group]).",
    ),
]


def embed(
    *,
    data: DataOption,
    model: ModelOption,
    out: RepresentationsOption,
    device: DeviceOption = "cpu",
    threads: EncoderThreadsOption = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Compute the representation of every image of this site, and write them into one file. Sends nothing.

    Example: `fedssl-worker embed --data ~/images --model run-1a2b3c4d --out images.npz`

    It needs no coordinator, token or state, and opens no connection. It is `fedssl embed`, whose help describes the
    file; `fedssl search`, `duplicates` and `outliers` read it. If the command is interrupted, run it again to continue.
    """
    with _reported():
        prepare(device, threads, None, set())
        from fedssl.embeddings.sources import open_source

        source = open_source(data, None, None)
        write_representations(source, _own_model(model), str(model.expanduser().absolute()), out, device, output)


def classify(
    *,
    data: DataOption,
    model: ModelOption,
    labels: LabelsOption = None,
    head: HeadOption = None,
    save_head: SaveHeadOption = None,
    out: PredictionsOption = Path("predictions.csv"),
    device: DeviceOption = "cpu",
    threads: EncoderThreadsOption = 1,
    output: FormatOption = Format.TABLE,
) -> None:
    """Predict the class of every image of this site by a linear classifier on top of an encoder. Sends nothing.

    Example: `fedssl-worker classify --data ~/images --model run-1a2b3c4d --labels labels.csv`

    It needs no coordinator, token or state, and opens no connection. It is `fedssl classify`, whose help describes the
    classifier and the CSV file. The classifier is computed from this site's labels; --save-head keeps it on this
    machine.
    """
    with _reported():
        require_one_head(labels, head, save_head)
        prepare(device, threads, None, set())
        from fedssl.embeddings.sources import open_source

        source = open_source(data, None, None)
        write_predictions(
            source,
            _own_model(model),
            data if labels == _OWN else labels,
            head,
            save_head,
            out,
            device,
            None,
            output,
        )


def _own_model(path: Path) -> "Model":
    """Return the encoder of a folder on this machine. Raises SpecError, ArtifactError."""
    from fedssl.embeddings.encoders import load_model

    if not path.expanduser().exists():
        raise SpecError(
            f"--model {path}: there is no such folder. A worker fetches no weights for this: copy a folder here that "
            "`fedssl run pull` wrote"
        )
    return load_model(path.expanduser())


@contextmanager
def _reported() -> Iterator[None]:
    """Turn errors into one line and an exit code."""
    try:
        yield
    except FedSSLError as error:
        message = str(error)
    except OSError as error:  # the disk is full, or --out cannot be written
        message = in_words(error)
    else:
        return
    typer.echo(f"fedssl-worker: {message}", err=True)
    raise typer.Exit(EXIT_UNUSABLE)
