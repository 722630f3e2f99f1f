"""The data sets that fedssl knows by name, and where they are on this machine."""

from pathlib import Path
from typing import Any

import typer

from fedssl.cli.datasets.fetching import data_folder, fetch
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, note, show_json, show_table
from fedssl.data import KNOWN, KnownDataset, find_dataset, how_to_get


def show_known(output: Format) -> None:
    """Show all known data sets, and how to get those that are not here."""
    found = {name: _places(known) for name, known in KNOWN.items()}
    if output is Format.JSON:
        show_json([_document(known, found[name]) for name, known in KNOWN.items()])
        return
    rows = [
        (known.name, known.num_classes, known.num_train, known.num_test,
         f"{known.channels} x {known.image_size} x {known.image_size}", _location(known, found[name]))
        for name, known in KNOWN.items()
    ]  # fmt: skip
    show_table(["data set", "#classes", "#train", "#test", "images", "where"], rows)
    for name, known in KNOWN.items():
        if not found[name] and not known.fetchable and known.find is not None:
            note(f"{name}: {how_to_get(known)}")
    note("a folder of images (one sub-folder per class) or an .npz file is also a data set: give its path as the name")


def fetch_known(name: str, output: Format) -> None:
    """Download a known data set, and show where it is. Raises UsageError if that is not possible."""
    known = KNOWN.get(name)
    if known is None:
        raise UsageError(f"there is no data set {name!r}; known: {', '.join(KNOWN)}")
    if not (places := _places(known)) and known.find is not None:
        if not known.fetchable:
            raise UsageError(f"{known.title} cannot be downloaded by this command: {how_to_get(known)}")
        if not fetch(name, note):
            raise UsageError(f"{known.title} could not be downloaded. To get it by hand: {how_to_get(known)}")
        places = _places(known)
    if output is Format.JSON:
        show_json(_document(known, places))
    else:
        typer.echo(f"{known.title} is here: {_location(known, places)}")


def _places(known: KnownDataset) -> list[Path]:
    """Return where the data set is: one path, or two if its splits are in different places. Empty if one is missing."""
    found = [find_dataset(known.name, split, data_folder()) for split in ("train", "test")]
    places = [path for path in found if path is not None]
    return list(dict.fromkeys(places)) if len(places) == len(found) else []


def _location(known: KnownDataset, places: list[Path]) -> str:
    if known.find is None:
        return known.source
    if places:
        return ", ".join(map(str, places))
    return f"not here: fedssl data fetch {known.name}" if known.fetchable else "not here: see below"


def _document(known: KnownDataset, places: list[Path]) -> dict[str, Any]:
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
