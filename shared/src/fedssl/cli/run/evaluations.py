"""`fedssl run evaluate`, `run evaluations` and `run cancel-evaluation`: encoders judged on the coordinator."""

import math
import time
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.cli.connection.target import MIN_PREFIX, RunArgument, TokenFileOption, UrlOption, connect, find_run, short
from fedssl.cli.errors import EvaluationNotCompleted, NoSuchJob, UsageError
from fedssl.cli.evaluate.command import SettingsName
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedssl.client import Client
    from fedssl.protocol.evaluation import JudgingConfig
    from fedssl.protocol.runs import RunSpec
    from fedssl.protocol.views import EvaluationView

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
_ACCURACIES = ("probe", "knn")
_NUMBERS = ("uniformity", "alignment", "effective_rank", "feature_std")
_ENDED = ("completed", "failed", "cancelled")


class MapName(StrEnum):
    """How a map is drawn."""

    PCA = "pca"
    TSNE = "tsne"


def request_evaluation(
    run: RunArgument,
    *,
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An evaluation data set of the coordinator.  [default: the spec's]"),
    ] = None,
    round_number: Annotated[
        int | None,
        typer.Option("--round", min=0, help="After which round; 0: before training.  [default: the newest]"),
    ] = None,
    measures: Annotated[
        str | None,
        typer.Option(metavar="LIST", help="Of probe, knn and geometry, with commas.  [default: the spec's, else all]"),
    ] = None,
    settings: Annotated[
        SettingsName | None, typer.Option(help="The linear probe's settings.  [default: the spec's, else fast]")
    ] = None,
    num_labels: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Labelled training images that classifiers may see; 0: all.  [default: the spec's, else 10000]",
        ),
    ] = None,
    num_test: Annotated[
        int | None, typer.Option(min=0, help="Test images; 0: all.  [default: the spec's, else all]")
    ] = None,
    embedding_map: Annotated[
        MapName | None,
        typer.Option("--map", help="Keep a map of the test images too: see `fedssl run embedding`."),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the numbers; exit with 1 if there are none.")] = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Have the coordinator judge a run's encoder on a labelled data set that is registered with it.

    The run goes on meanwhile. What the run's spec says of its own evaluation holds for what is not given. Asked for
    twice, the same is done once; one that failed or was cancelled is done anew. `fedssl evaluation-dataset ls` lists
    the data sets, and `fedssl evaluate` judges an encoder on this machine.
    """
    given = {
        "dataset": data,
        "measures": None if measures is None else [name.strip() for name in measures.split(",")],
        "settings": settings,
        "embedding_map": embedding_map,
    }
    limits = {"max_train": num_labels, "max_test": num_test}
    with connect(url, token_file, patience_seconds=PATIENCE_SECONDS if wait else 3.0) as client:
        view = client.run(find_run(client, run))
        config = _config(view.spec, given, limits)
        row = client.request_evaluation(view.id, config, round_number)
        note(f"evaluation {short(row.id)} of round {row.round_number} on {row.dataset} is {row.state}")
        while wait and row.state not in _ENDED:
            time.sleep(POLL_SECONDS)
            row = client.evaluation(row.id)
    if output is Format.JSON:
        show_json(row)
    else:
        _show([row])
    if wait and row.state != "completed":
        raise EvaluationNotCompleted(f"evaluation {row.id} is {row.state}" + (f": {row.reason}" if row.reason else ""))


def list_evaluations(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List how good a run's encoder was after which round, with the last and the best round marked.

    The best is chosen on the test set itself: report it only beside the last.
    """
    with connect(url, token_file) as client:
        rows = list(client.evaluations(find_run(client, run)))
    if output is Format.JSON:
        show_json(rows)
    else:
        _show(rows)


def cancel_evaluation(
    run: RunArgument,
    evaluation: Annotated[str, typer.Argument(metavar="EVALUATION", help="Its id, or its beginning.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Call off an evaluation that waits or runs. The run does not notice; the same can be asked for again."""
    with connect(url, token_file) as client:
        row = client.cancel_evaluation(_find(client, run, evaluation).id)
    if output is Format.JSON:
        show_json(row)
    else:
        _show([row])


def best_rounds(rows: "Sequence[EvaluationView]") -> "tuple[dict[Any, list[str]], list[str]]":
    """Marks by evaluation, `last` and `best by ...`, and for each data set a sentence on what the best was chosen on.

    Only rounds that were judged alike are compared.
    """
    from fedssl.selection import choose_best

    alike: dict[str, list[EvaluationView]] = {}
    for row in rows:
        if row.state == "completed":
            alike.setdefault(row.config.model_dump_json(), []).append(row)
    marks: dict[Any, list[str]] = {}
    sentences = []
    for group in alike.values():
        history = [(row.round_number, _numbers(row)) for row in group]
        measure = next((name for name in _ACCURACIES if name in history[0][1]), None)
        if measure is None or len(group) == 1:
            continue
        choice = choose_best(history, measure)
        by_round = {row.round_number: row.id for row in group}
        marks.setdefault(by_round[choice.last_round], []).append("last")
        marks.setdefault(by_round[choice.best_round], []).append(f"best by {measure}")
        sentences.append(f"{group[0].dataset}, {choice.chosen}")
    return marks, sentences


def _config(spec: "RunSpec", given: dict[str, Any], limits: dict[str, int | None]) -> "JudgingConfig":
    """What is asked for: what is given, and for the rest the run's own evaluation. Raises UsageError."""
    from pydantic import ValidationError

    from fedssl.protocol.evaluation import JudgingConfig

    wanted = {} if spec.evaluation is None else spec.evaluation.model_dump(exclude={"every"})
    wanted |= {name: value for name, value in given.items() if value is not None}
    wanted |= {name: value or None for name, value in limits.items() if value is not None}  # 0: no limit
    if "dataset" not in wanted:
        raise UsageError("the run's spec names no evaluation data set: give --data NAME")
    try:
        return JudgingConfig.model_validate(wanted)
    except ValidationError as error:
        mistake = error.errors()[0]
        raise UsageError(f"{'.'.join(map(str, mistake['loc']))}: {mistake['msg']}") from None


def _find(client: "Client", run: str, text: str) -> "EvaluationView":
    wanted = text.lower().replace("-", "")
    if len(wanted) < MIN_PREFIX:
        raise UsageError(
            f"{text!r} is too short: give at least the first {MIN_PREFIX} characters of the evaluation's id"
        )
    fitting = [row for row in client.evaluations(find_run(client, run)) if row.id.hex.startswith(wanted)]
    if len(fitting) != 1:
        raise NoSuchJob(
            f"{len(fitting)} of the run's evaluations begin with {text}: see `fedssl run evaluations {run}`"
        )
    return fitting[0]


def _show(rows: "Sequence[EvaluationView]") -> None:
    marks, sentences = best_rounds(rows)
    names = [*_ACCURACIES, *_NUMBERS]
    lines = []
    for row in rows:
        numbers = _numbers(row)
        cells = [_cell(name, numbers.get(name)) for name in names]
        lines.append(
            (short(row.id), row.round_number, row.dataset, *cells, _state(row), ", ".join(marks.get(row.id, [])))
        )
    columns = ["evaluation", "#round", "data set", *(f"#{name.replace('_', ' ')}" for name in names), "state", "which"]
    show_table(columns, lines)
    for sentence in sentences:
        note(sentence)


def _numbers(row: "EvaluationView") -> dict[str, float]:
    """What is known so far; NaN where training has diverged."""
    so_far = {} if row.progress is None else row.progress.results
    found = so_far if row.results is None else row.results
    return {name: math.nan if value is None else value for name, value in found.items()}


def _cell(name: str, value: float | None) -> str | None:
    if value is None or math.isnan(value):
        return None if value is None else "diverged"
    return f"{100 * value:.2f} %" if name in _ACCURACIES else f"{value:.4g}"


def _state(row: "EvaluationView") -> str:
    if row.state == "running" and row.progress is not None and row.progress.doing:
        share = "" if row.progress.share is None else f" {100 * row.progress.share:.0f} %"
        return f"{row.state}: {row.progress.doing}{share}"
    return f"{row.state}: {row.reason}" if row.reason else row.state
