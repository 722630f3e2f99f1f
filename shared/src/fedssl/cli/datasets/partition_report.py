"""The output and the files of `fedssl partition`."""

from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from fedssl.cli.datasets.fetching import data_folder
from fedssl.cli.output import Format, note, show_json, show_table
from fedssl.data import effective_classes, plot_partition, save_npz
from fedssl.data.partitioning import PartitionPlan, partition_dataset, partition_plan
from fedssl.files import replaced_file
from fedssl.protocol.data import PartitionConfig
from fedssl.protocol.runs import RunSpec

_CELLS = "·▁▂▃▄▅▆▇█"
_MAX_CELLS = 50
_NUM_NAMED = 3


def show_partition(
    spec: RunSpec, config: PartitionConfig, picture: Path | None, shards: Path | None, output: Format
) -> None:
    """Show the partition as a table or as JSON, and write the picture and the shards that are asked for."""
    held = partition_plan(config, data_folder())
    if picture is not None:
        plot_partition(picture, held.counts, held.class_names, title=_title(config, held), subtitle=describe(config))
    if shards is not None:
        _write_shards(spec, config, shards)
    effective_K = effective_classes(held.counts)
    if output is Format.JSON:
        show_json(_document(config, held, effective_K, picture))
        return
    typer.echo(f"{_title(config, held)}\n{describe(config)}")
    _show_table(held, effective_K)
    if picture is not None:
        note(f"the picture is in {picture}")


def describe(config: PartitionConfig) -> str:
    """Describe a partition in one line: its scheme and parameters.

    >>> describe(PartitionConfig(alpha=0.5, share=0.1))
    "dirichlet (fedx), alpha 0.5, seed 0, 10% of each client's images kept"
    >>> describe(PartitionConfig(scheme="file", file="splits/dir0.1.json"))
    'as in splits/dir0.1.json'
    """
    if config.pooled:
        parts = ["pooled at one client"]
    elif config.scheme == "dirichlet":
        parts = [f"dirichlet ({config.variant})", f"alpha {config.alpha:g}"]
    elif config.scheme == "file":
        parts = [f"as in {config.file}"]
    else:
        parts = [{"iid": "iid", "classes": "whole classes"}[config.scheme]]
    if config.scheme != "file" or config.pooled or config.share < 1:
        parts.append(f"seed {config.seed}")
    if config.hold_out:
        parts.append(f"{100 * config.hold_out:.4g}% of each class held out")
    if config.max_images is not None:
        parts.append(f"at most {config.max_images:,} images")
    if config.share < 1:
        parts.append(f"{100 * config.share:.4g}% of each client's images kept")
    return ", ".join(parts)


def cells(counts_C: NDArray[np.int64], counts_KC: NDArray[np.int64]) -> str:
    """Draw a client's images by class as a row of bars, scaled by the fullest cell of all clients.

    If there are many classes, several share a cell.

    >>> import numpy as np
    >>> cells(np.array([0, 1, 50, 100]), np.array([[0, 1, 50, 100]]))
    '·▁▄█'
    """
    width = -(-len(counts_C) // _MAX_CELLS)
    starts = np.arange(0, len(counts_C), width)
    most = max(1, int(np.add.reduceat(counts_KC, starts, axis=1).max()))
    heights = np.add.reduceat(counts_C, starts) * (len(_CELLS) - 1) / most
    return "".join(_CELLS[0] if height == 0 else _CELLS[max(1, round(height))] for height in heights)


def _write_shards(spec: RunSpec, config: PartitionConfig, folder: Path) -> None:
    """Write one file per client. Each appears only when it is complete."""
    for client, images in partition_dataset(config, spec.data, data_folder()).by_client.items():
        path = folder / client / "images.npz"
        with replaced_file(path) as incoming:
            save_npz(incoming, images, window=spec.data.window)
    note(f"the clients' images are in {folder}")


def _title(config: PartitionConfig, held: PartitionPlan) -> str:
    clients = f"{len(held.by_client):,} client{'s' * (len(held.by_client) > 1)}"
    return f"{config.dataset}: {int(held.counts.sum()):,} images at {clients}"


def _show_table(held: PartitionPlan, effective_K: NDArray[np.float64]) -> None:
    total_C = held.counts.sum(axis=0)
    rows = [
        (client, int(counts_C.sum()), f"{effective:.1f}", cells(counts_C, held.counts), _largest(counts_C, held))
        for client, counts_C, effective in zip(held.by_client, held.counts, effective_K, strict=True)
    ]
    effective_of_all = float(effective_classes(total_C[None])[0])
    rows.append(("all", int(total_C.sum()), f"{effective_of_all:.1f}", cells(total_C, total_C[None]), ""))
    show_table(["client", "#images", "#effective classes", "images by class", "most of"], rows)
    width = -(-held.counts.shape[1] // _MAX_CELLS)
    per_cell = f"{width} classes per cell" if width > 1 else "one class per cell"
    note(f"{per_cell}, in numerical order; {_CELLS[-1]} is the most that any client has, {_CELLS[0]} is zero")


def _largest(counts_C: NDArray[np.int64], held: PartitionPlan) -> str:
    order = [int(number) for number in (-counts_C).argsort(kind="stable")[:_NUM_NAMED] if counts_C[number] > 0]
    names = held.class_names
    return ", ".join(f"{names[i] if i < len(names) else f'class {i}'} {counts_C[i]:,}" for i in order)


def _document(
    config: PartitionConfig, held: PartitionPlan, effective_K: NDArray[np.float64], picture: Path | None
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
        "picture": None if picture is None else str(picture),
    }
