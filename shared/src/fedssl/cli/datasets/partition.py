"""`fedssl partition`: who would hold what, as a table and as a picture, before anything is trained."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.cli.specs import SetOption, SpecArgument, read_spec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from fedssl.protocol.data import PartitionConfig
    from fedssl.protocol.runs import RunSpec
    from fedssl.shards import Holdings

_CELLS = "·▁▂▃▄▅▆▇█"
_MAX_CELLS = 50
_NUM_NAMED = 3


def partition(
    spec: SpecArgument,
    set_: SetOption = None,
    out: Annotated[
        Path | None, typer.Option(metavar="PNG", help="Draw it: a bar for each client, coloured by class.")
    ] = None,
    shards: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Write each client's images to DIR/CLIENT/images.npz, for a worker's --data."),
    ] = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show how the [partition] of a spec deals images out: how many, of which classes, how unevenly.

    The effective number of classes is the exponential of the entropy of a client's labels: 1 where it holds one class,
    10 where it holds as many images of each of ten. Only labels are read, and nothing is trained; --shards reads the
    images too, and writes the same files whenever it is repeated.
    """
    read = read_spec(spec, set_)
    wanted = read.partition
    if wanted is None:
        raise UsageError(f"{spec} has no [partition], which says whose images to train on: see examples/demo.toml")
    from fedssl.cli.datasets.commands import data_folder, ensure

    ensure(wanted.dataset, note)
    from fedssl.data import effective_classes, plot_partition
    from fedssl.shards import holdings

    held = holdings(wanted, data_folder())
    if out is not None:
        plot_partition(out, held.counts, held.class_names, title=_title(wanted, held), subtitle=describe(wanted))
    if shards is not None:
        _write_shards(read, wanted, shards)
    effective_K = effective_classes(held.counts)
    if output is Format.JSON:
        show_json(_document(wanted, held, effective_K, out))
        return
    typer.echo(f"{_title(wanted, held)}\n{describe(wanted)}")
    _show(held, effective_K)
    if out is not None:
        note(f"drawn: {out}")


def _write_shards(spec: "RunSpec", config: "PartitionConfig", folder: Path) -> None:
    """One file a client, each appearing whole."""
    from fedssl.cli.datasets.commands import data_folder
    from fedssl.data import save_npz
    from fedssl.shards import deal

    for client, images in deal(config, spec.data, data_folder()).by_client.items():
        path = folder / client / "images.npz"
        partial = path.with_name(f".{path.name}.partial")
        save_npz(partial, images)
        partial.replace(path)
    note(f"dealt: {folder}")


def describe(config: "PartitionConfig") -> str:
    """A partition in a line: its scheme and what decides it.

    >>> from fedssl.protocol.data import PartitionConfig
    >>> describe(PartitionConfig(alpha=0.5, share=0.1))
    "dirichlet (fedx), alpha 0.5, seed 0, 10% of each client's images kept"
    """
    if config.pooled:
        parts = ["pooled at one client"]
    elif config.scheme == "dirichlet":
        parts = [f"dirichlet ({config.variant})", f"alpha {config.alpha:g}"]
    else:
        parts = [{"iid": "iid", "classes": "whole classes"}[config.scheme]]
    parts.append(f"seed {config.seed}")
    if config.max_images is not None:
        parts.append(f"at most {config.max_images:,} images")
    if config.share < 1:
        parts.append(f"{100 * config.share:.4g}% of each client's images kept")
    return ", ".join(parts)


def _title(config: "PartitionConfig", held: "Holdings") -> str:
    clients = f"{len(held.by_client):,} client{'s' * (len(held.by_client) > 1)}"
    return f"{config.dataset}: {int(held.counts.sum()):,} images at {clients}"


def _show(held: "Holdings", effective_K: "NDArray[np.float64]") -> None:
    from fedssl.data import effective_classes

    total_C = held.counts.sum(axis=0)
    rows = [
        (client, int(counts_C.sum()), f"{effective:.1f}", cells(counts_C, held.counts), _largest(counts_C, held))
        for client, counts_C, effective in zip(held.by_client, held.counts, effective_K, strict=True)
    ]
    everybody = float(effective_classes(total_C[None])[0])
    rows.append(("all", int(total_C.sum()), f"{everybody:.1f}", cells(total_C, total_C[None]), ""))
    show_table(["client", "#images", "#effective classes", "images by class", "most of"], rows)
    width = -(-held.counts.shape[1] // _MAX_CELLS)
    cell = f"{width} classes a cell" if width > 1 else "a class a cell"
    note(f"{cell}, in the order of their numbers; {_CELLS[-1]} is the most that any client has, {_CELLS[0]} is none")


def cells(counts_C: "NDArray[np.int64]", counts_KC: "NDArray[np.int64]") -> str:
    """A client's images by class as a row of bars, scaled by the fullest cell of all clients; many classes share cells.

    >>> import numpy as np
    >>> cells(np.array([0, 1, 50, 100]), np.array([[0, 1, 50, 100]]))
    '·▁▄█'
    """
    import numpy as np

    width = -(-len(counts_C) // _MAX_CELLS)
    starts = np.arange(0, len(counts_C), width)
    most = max(1, int(np.add.reduceat(counts_KC, starts, axis=1).max()))
    heights = np.add.reduceat(counts_C, starts) * (len(_CELLS) - 1) / most
    return "".join(_CELLS[0] if height == 0 else _CELLS[max(1, round(height))] for height in heights)


def _largest(counts_C: "NDArray[np.int64]", held: "Holdings") -> str:
    order = [int(number) for number in (-counts_C).argsort(kind="stable")[:_NUM_NAMED] if counts_C[number] > 0]
    names = held.class_names
    return ", ".join(f"{names[i] if i < len(names) else f'class {i}'} {counts_C[i]:,}" for i in order)


def _document(
    config: "PartitionConfig", held: "Holdings", effective_K: "NDArray[np.float64]", out: Path | None
) -> dict[str, Any]:
    return {
        "partition": config,
        "num_images": int(held.counts.sum()),
        "class_names": held.class_names,
        "counts_by_class": held.counts.sum(axis=0).tolist(),
        "clients": [
            {
                "client": client,
                "num_images": int(counts_C.sum()),
                "effective_classes": float(effective),
                "counts_by_class": counts_C.tolist(),
            }
            for client, counts_C, effective in zip(held.by_client, held.counts, effective_K, strict=True)
        ],
        "picture": None if out is None else str(out),
    }
