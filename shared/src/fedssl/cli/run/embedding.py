"""`fedssl run embedding`: a map of a run's representations after a round, as a picture."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json
from fedssl.protocol.views import EmbeddingMapView, EvaluationView

if TYPE_CHECKING:
    from fedssl.client import Client


def draw_embedding(
    run: RunArgument,
    *,
    round_number: Annotated[
        int | None,
        typer.Option(
            "--round", min=0, help="Draw the map after this round; 0: before training.  [default: the newest map]"
        ),
    ] = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE", help="The PNG file to write.", dir_okay=False)
    ] = Path("map.png"),
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Draw a map of a run's embeddings: each test image is a point, coloured by its class.

    The coordinator computes a map with an evaluation if the spec has `embedding_map = "pca"` (or `"tsne"`) under
    [evaluation], or for `fedssl run evaluate RUN --map pca`. `--format json` prints the points instead.
    """
    with connect(url, token_file) as client:
        found = client.evaluation_map(_mapped(client, run, round_number).id)
    if output is Format.JSON:
        show_json(found)
        return
    _draw(found, out)
    note(f"{len(found.points):,} test images of {found.dataset} {_when(found.round_number)}: {out}")


def _mapped(client: "Client", run: str, round_number: int | None) -> EvaluationView:
    """Return the run's newest evaluation with a map. Raises UsageError if there is none."""
    run_id = find_run(client, run)
    rows = [row for row in client.evaluations(run_id) if row.config.embedding_map is not None]
    of_round = [row for row in rows if round_number in (None, row.round_number)]
    completed = [row for row in of_round if row.state == "completed"]
    if completed:
        return completed[-1]
    which = "" if round_number is None else f" --round {round_number}"
    asking = f"`fedssl run evaluate {run}{which} --map pca --wait`"
    if of_round:
        raise UsageError(f"the map is not ready, because its evaluation is {of_round[-1].state}: try again in a moment")
    if rows:
        known = ", ".join(str(row.round_number) for row in rows[-10:])
        raise UsageError(f"round {round_number} has no map (rounds with a map: {known}): request one with {asking}")
    raise UsageError(f"no round of the run has a map: request one with {asking}")


def _draw(found: EmbeddingMapView, out: Path) -> None:
    import numpy as np

    from fedssl.evaluation import plot_map

    title = f"{found.dataset}: {len(found.points):,} test images {_when(found.round_number)}, {_NAMES[found.method]}"
    plot_map(out, np.array(found.points), np.array(found.labels, np.int64), found.class_names, title)


_NAMES = {"pca": "PCA", "tsne": "t-SNE"}


def _when(round_number: int) -> str:
    return f"after round {round_number}" if round_number else "before training"
