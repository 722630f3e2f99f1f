"""`fedssl data`: which data sets are here. And where the command line finds them, and how it gets those that it can."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cache import cache_folder
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table

if TYPE_CHECKING:
    from fedssl.data import KnownDataset

FETCHED_UNASKED = "fashion-mnist"

app = typer.Typer(help="Look for data sets on this machine, and fetch those that can be had.", no_args_is_help=True)


@app.command("ls")
def list_datasets(output: FormatOption = Format.TABLE) -> None:
    """List the data sets that are known by name: what they are, where they lie here, or how to get them.

    They are looked for in the folder of fetched ones, the folder that FEDSSL_DATA names, and /usr/share/datasets.
    """
    from fedssl.data import KNOWN

    found = {name: _places(known) for name, known in KNOWN.items()}
    if output is Format.JSON:
        show_json([_document(known, found[name]) for name, known in KNOWN.items()])
        return
    rows = [
        (known.name, known.num_classes, known.num_train, known.num_test,
         f"{known.channels} x {known.image_size} x {known.image_size}", _where(known, found[name]))
        for name, known in KNOWN.items()
    ]  # fmt: skip
    show_table(["data set", "#classes", "#train", "#test", "images", "where"], rows)
    for name, known in KNOWN.items():
        if not found[name] and not known.fetchable and known.find is not None:
            note(f"{name}: {_how_to_get(known)}")
    note("any image folder (one sub-folder a class) and any .npz file is a data set too, by its path")


@app.command("fetch")
def fetch(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A data set from `fedssl data ls`.")],
    output: FormatOption = Format.TABLE,
) -> None:
    """Download a data set from its authors' server, checked against the published checksums; what is here stays.

    It goes into ~/.cache/fedssl (or $XDG_CACHE_HOME/fedssl), where all commands of this user find it.
    """
    from fedssl.data import KNOWN

    known = KNOWN.get(name)
    if known is None:
        raise UsageError(f"there is no data set {name!r}; there are {', '.join(KNOWN)}")
    if not (places := _places(known)) and known.find is not None:
        if not known.fetchable:
            raise UsageError(f"{known.title} cannot be fetched: {_how_to_get(known)}")
        if not _fetch(name, note):
            raise UsageError(f"{known.title} could not be fetched. By hand: {_how_to_get(known)}")
        places = _places(known)
    if output is Format.JSON:
        show_json(_document(known, places))
    else:
        typer.echo(f"{known.title} is here: {_where(known, places)}")


def data_folder() -> Path:
    """The folder that fetched data sets are kept in, for all of a user's federations."""
    return cache_folder()


def ensure(name: str, progress: Callable[[str], None]) -> bool:
    """Fetch a data set that is not here yet, where that is done unasked; False: it could not be had.

    Names and paths that nothing is known of count as present: reading them says what is wrong with them. From here on
    `progress` is also told how the reading of images goes, and what is odd about them.
    """
    _listen(progress)
    return _fetch(name, progress) if name == FETCHED_UNASKED else True


def _fetch(name: str, progress: Callable[[str], None]) -> bool:
    from fedssl.data.download import download
    from fedssl.data.fetch import fetch_fashion_mnist

    try:
        if name == "fashion-mnist":
            return fetch_fashion_mnist(data_folder(), progress) is not None
        return download(name, data_folder(), progress) is not None
    except OSError as error:
        progress(
            f"data sets cannot be kept in {data_folder()} ({error.strerror}): set XDG_CACHE_HOME to another folder"
        )
        return False


class _Listener(logging.Handler):
    def __init__(self, progress: Callable[[str], None]) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress(record.getMessage())


def _listen(progress: Callable[[str], None]) -> None:
    """Passes on what the reading of data sets logs, to one listener at a time."""
    logger = logging.getLogger("fedssl.data")
    for handler in [handler for handler in logger.handlers if isinstance(handler, _Listener)]:
        logger.removeHandler(handler)
    logger.addHandler(_Listener(progress))
    logger.setLevel(logging.INFO)


def _places(known: "KnownDataset") -> list[Path]:
    """Where the set lies, one place where both splits lie in one; none unless both are here."""
    from fedssl.data import find_dataset

    found = [find_dataset(known.name, split, data_folder()) for split in ("train", "test")]
    places = [path for path in found if path is not None]
    return list(dict.fromkeys(places)) if len(places) == len(found) else []


def _where(known: "KnownDataset", places: list[Path]) -> str:
    if known.find is None:
        return known.source
    if places:
        return ", ".join(map(str, places))
    return f"not here: fedssl data fetch {known.name}" if known.fetchable else "not here: see below"


def _how_to_get(known: "KnownDataset") -> str:
    from fedssl.data import how_to_get

    return how_to_get(known)


def _document(known: "KnownDataset", places: list[Path]) -> dict[str, Any]:
    return {
        "name": known.name,
        "title": known.title,
        "num_classes": known.num_classes,
        "num_train": known.num_train,
        "num_test": known.num_test,
        "channels": known.channels,
        "image_size": known.image_size,
        "here": known.find is None or bool(places),
        "places": [str(path) for path in places],
        "fetchable": known.fetchable,
        "files": known.files,
        "source": known.source,
    }
