"""`fedssl data check`: what a folder of images holds, in the terminal and as a page."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from fedssl.cli.destinations import require_place
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, note, show_json, show_pairs, size
from fedssl.cli.progress_bar import progress_bar
from fedssl.cli.specs import read_spec
from fedssl.data.contents import readable
from fedssl.data.datasets import list_files
from fedssl.data.decode_file import thumbnail
from fedssl.data.image_files import ImageFiles
from fedssl.data.reading import num_tolerated
from fedssl.data.survey import Survey, cache_of, memory_of, spread, survey
from fedssl.embeddings.page import Bar, Section, Shown, Table, Thumbnail, write_page
from fedssl.protocol.data import MAX_UNREADABLE, DataConfig

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

_NUM_NAMED = 10
_MOST_ROWS = 100
_NUM_PICTURES = 60
_EXAMPLE_SIZE, _EXAMPLE_CACHE = 224, 256
_PERCENTILE_NAMES = ("lowest", "0.5 %", "median", "99.5 %", "highest")


def check_data(
    data: str, spec: str | None, changes: list[str] | None, sample: int | None, out: Path | None, output: Format
) -> None:
    """Report what a folder holds. Exits with 1 if a worker would not read it."""
    if changes and spec is None:
        raise UsageError("--set changes a key of a spec: give the spec with --spec")
    if out is not None:
        require_place("--out", out)
    files = list_files(data, "train")
    if files is None:
        raise UsageError(f"{data} is not a folder of image files: `fedssl doctor --data {data}` describes arrays")
    names = files.names if sample is None else spread(files.names, sample)
    with progress_bar("decoding", len(names), suffix=" images") as decoded:
        found = survey(files, names, decoded)
    config = read_spec(spec, changes).data if spec is not None else _example(found)
    document = _document(files, found, config, is_example=spec is None)
    if out is not None:
        _write(out, files, found, document)
    if output is Format.JSON:
        show_json(document)
    else:
        show_pairs(_pairs(found, document))
    if out is not None:
        note(f"{out}: open it in a browser. It holds small copies of the images, so keep it where they are")
    if not document["is_usable"]:
        note(
            f"training on these images would stop: {len(found.unreadable):,} cannot be read, and max_unreadable allows "
            f"{document['most_unreadable']:,}. Repair or remove them, or raise data.max_unreadable"
        )
        raise typer.Exit(1)


def _example(found: Survey) -> DataConfig:
    """Return the settings for which memory is estimated if no spec is given."""
    return DataConfig(channels=found.channels, image_size=_EXAMPLE_SIZE, cache_size=_EXAMPLE_CACHE)


def _document(files: ImageFiles, found: Survey, config: DataConfig, *, is_example: bool) -> dict[str, Any]:
    tolerated = num_tolerated(MAX_UNREADABLE if is_example else config.max_unreadable, found.decoded)
    return {
        "folder": files.title,
        "num_images": found.num_images,
        "num_decoded": found.decoded,
        "is_usable": len(found.unreadable) <= tolerated,
        "sizes": [{"width": width, "height": height, "num": num} for (width, height), num in found.sizes.items()],
        "kinds": found.kinds,
        "num_more_than_8_bits": found.num_deep,
        "histograms": {
            kind: {
                "edges": each.edges,
                "counts": each.counts,
                **dict(zip(_PERCENTILE_NAMES, each.percentiles, strict=True)),
            }
            for kind, each in found.histograms.items()
        },
        "unreadable": [{"name": name, "reason": why} for name, why in found.unreadable],
        "most_unreadable": tolerated,
        "constant": found.constant,
        "duplicates": [{"name": name, "equals": earlier} for name, earlier in found.duplicates],
        "classes": found.classes,
        "num_groups": found.num_groups,
        "left_out": "" if files.contents is None else files.contents.describe(),
        "settings": {
            "channels": config.channels,
            "image_size": config.image_size,
            "cache_size": config.cache_size,
            "from_spec": not is_example,
        },
        "memory_bytes": memory_of(config, found.num_images),
        "cache_bytes": cache_of(files, config),
    }


def _pairs(found: Survey, document: dict[str, Any]) -> dict[str, object]:
    pairs: dict[str, object] = {
        "folder": document["folder"],
        "images": f"{found.num_images:,}"
        + (f"; {found.decoded:,} of them were decoded" if found.decoded < found.num_images else ""),
        "sizes": _counted((f"{width} x {height}", num) for (width, height), num in found.sizes.items()),
        "kinds": _counted(found.kinds.items()),
        "classes": _counted(found.classes.items()) if found.classes else "none: there are no labels",
        "groups": None if found.num_groups is None else f"{found.num_groups:,} (patients, or files without one)",
        "unreadable": f"{len(found.unreadable):,} (max_unreadable allows {document['most_unreadable']:,})"
        + _listed(f"{name}: {why}" for name, why in found.unreadable),
        "one value": f"{len(found.constant):,}" + _listed(found.constant),
        "duplicates": f"{len(found.duplicates):,}" + _listed(f"{one} = {other}" for one, other in found.duplicates),
        "left out": document["left_out"].removeprefix("left out: ") or None,
    }
    for kind, each in found.histograms.items():
        values = ", ".join(
            f"{name} {value:,.6g}" for name, value in zip(_PERCENTILE_NAMES, each.percentiles, strict=True)
        )
        pairs[f"values, {kind}"] = f"{_bars(each.counts)}  {values}"
    if found.num_deep:
        pairs["window"] = (
            "a run needs [data.window] for all bits of these images: percentiles = [0.5, 99.5], for example"
        )
    pairs |= _expected(document)
    return pairs


def _expected(document: dict[str, Any]) -> dict[str, object]:
    """Return the expected memory and cache, in words."""
    settings = document["settings"]
    shape = f"{settings['channels']} x {settings['image_size']} x {settings['image_size']}"
    source = "the spec" if settings["from_spec"] else "an example; --spec gives a run's"
    pairs: dict[str, object] = {"memory": f"{size(document['memory_bytes'])} as squares of {shape} ({source})"}
    if document["cache_bytes"] is not None:
        words = f"about {size(document['cache_bytes'])} on the disk with data.cache_size = {settings['cache_size']}"
        pairs["cache"] = words + ", in place of that memory"
    return pairs


def _counted(counts: "Iterable[tuple[str, int]]") -> str:
    """Return the most frequent values with their numbers.

    >>> _counted([("8 x 8", 3), ("9 x 9", 1)])
    '8 x 8 (3), 9 x 9 (1)'
    """
    pairs = list(counts)
    more = f" and {len(pairs) - _NUM_NAMED:,} others" if len(pairs) > _NUM_NAMED else ""
    return ", ".join(f"{value} ({num:,})" for value, num in pairs[:_NUM_NAMED]) + more


def _listed(found: "Iterable[str]") -> str:
    names = list(found)
    return "".join(f"\n{name}" for name in names[:_NUM_NAMED]) + "\n..." * (len(names) > _NUM_NAMED)


def _bars(counts: "Sequence[int]") -> str:
    """Return a histogram of one line.

    >>> _bars([0, 1, 8])
    ' ▁█'
    """
    most = max(1, *counts)
    return "".join(" ▁▂▃▄▅▆▇█"[-(-8 * count // most)] for count in counts)


def _write(out: Path, files: ImageFiles, found: Survey, document: dict[str, Any]) -> None:
    pairs = _pairs(found, document)
    described = ("images", "groups", "left out", "window", "memory", "cache")
    about = [f"{name}: {pairs[name]}" for name in described if pairs.get(name)]
    tables = [
        Table("Sizes", ("width x height", "images"), [(f"{w} x {h}", f"{n:,}") for (w, h), n in found.sizes.items()]),
        Table("Kinds", ("channels and bits", "images"), [(kind, f"{num:,}") for kind, num in found.kinds.items()]),
        Table("Classes", ("class", "images"), [(name, f"{num:,}") for name, num in found.classes.items()]),
        *(
            Table(
                f"Values of the images of {kind}, in a sample of all values",
                ("from", "to", "values", ""),
                [
                    (f"{low:,.6g}", f"{high:,.6g}", f"{num:,}", Bar(num / max(1, *each.counts)))
                    for low, high, num in zip(each.edges, each.edges[1:], each.counts, strict=False)
                ],
            )
            for kind, each in found.histograms.items()
        ),
        Table("Images that cannot be read", ("image", "reason"), found.unreadable),
        Table("Images of one value", ("image",), [(name,) for name in found.constant]),
        Table("Images that equal an earlier one", ("image", "equals"), found.duplicates),
    ]
    label_of = {} if files.labels is None else dict(zip(files.names, files.labels.tolist(), strict=True))
    shown = [
        Shown(readable(name), files.class_names[label_of[name]] if name in label_of else "", _thumbnail(files, name))
        for name in spread(files.names, _NUM_PICTURES)
    ]
    sections = [Section("Some of the images, spread over all", shown)]
    write_page(out, f"Images in {document['folder']}", about, sections, [_cut(each) for each in tables if each.rows])


def _cut(table: Table) -> Table:
    """Return the first rows of a table, so that the page stays small."""
    if len(table.rows) <= _MOST_ROWS:
        return table
    heading = f"{table.heading}: the first {_MOST_ROWS} of {len(table.rows):,}"
    return Table(heading, table.columns, table.rows[:_MOST_ROWS])


def _thumbnail(files: ImageFiles, name: str) -> Thumbnail:
    return lambda _, side: thumbnail(files, name, side)
