"""`fedssl run evaluate`, `run evaluations` and `run cancel-evaluation`: encoders evaluated by the coordinator."""

import math
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from pydantic import ValidationError

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import MIN_PREFIX, connect, find_run, short
from fedssl.cli.errors import EvaluationNotCompleted, NoSuchJob, UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table
from fedssl.cli.run import site_evaluations
from fedssl.evaluation.comparable import grouped, names_of, setting_of
from fedssl.evaluation.selection import choose_best
from fedssl.protocol.evaluation import JudgingConfig, MapMethod, Settings
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import first_problem
from fedssl.protocol.views import EvaluationView

if TYPE_CHECKING:
    from fedssl.client import Client

POLL_SECONDS = 0.5
PATIENCE_SECONDS = 120.0
_ACCURACIES = ("probe", "knn")
_NUMBERS = ("uniformity", "alignment", "effective_rank", "feature_std")
_ENDED = ("completed", "failed", "cancelled")


def request_evaluation(
    run: RunArgument,
    *,
    at: Annotated[
        Literal["coordinator", "sites"],
        typer.Option(help="Where: on the coordinator's labelled images, or at each site on its own ones."),
    ] = "coordinator",
    data: Annotated[
        str | None,
        typer.Option(metavar="NAME", help="An evaluation data set of the coordinator.  [default: the spec's]"),
    ] = None,
    round_number: Annotated[
        int | None,
        typer.Option(
            "--round",
            min=0,
            help="Evaluate the encoder after this round; 0: before training.  [default: the newest round]",
        ),
    ] = None,
    measures: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="What to measure: any of probe, knn and geometry, separated by commas.  "
            "[default: the spec's, else all]",
        ),
    ] = None,
    settings: Annotated[
        Settings | None,
        typer.Option(help="Whose settings to use for the linear probe.  [default: the spec's, else fast]"),
    ] = None,
    num_labels: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Number of labelled training images for the classifiers; 0: all.  [default: the spec's, else 10000]",
        ),
    ] = None,
    num_test: Annotated[
        int | None, typer.Option(min=0, help="Number of test images; 0: all.  [default: the spec's, else all]")
    ] = None,
    embedding_map: Annotated[
        MapMethod | None,
        typer.Option("--map", help="Also compute a map of the test images, for `fedssl run embedding`."),
    ] = None,
    wait: Annotated[
        bool, typer.Option("--wait", help="Wait for the results. Exits with 1 if the evaluation fails or is cancelled.")
    ] = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Ask the coordinator to evaluate a run's encoder on a labelled data set that is registered with it.

    Example: `fedssl run evaluate RUN --data held-out --wait`

    The run continues meanwhile. Options that you leave out are taken from the [evaluation] of the run's spec. The same
    evaluation is done only once; if it failed or was cancelled, asking again repeats it. `fedssl evaluation-dataset ls`
    lists the data sets. `fedssl evaluate` evaluates an encoder on this machine instead.

    With --at sites, each site of the run is asked, except those that have sent counts of this round before. A site that
    refused is asked again. `fedssl run site-evaluations` shows the answers.
    """
    given = {
        "dataset": data,
        "measures": None if measures is None else [name.strip() for name in measures.split(",")],
        "settings": settings,
        "embedding_map": embedding_map,
    }
    limits = {"max_train": num_labels, "max_test": num_test}
    if at == "sites":
        _require_only_a_round(given | limits, wait)
        site_evaluations.request_at_sites(run, round_number, url, token_file, output)
        return
    with connect(url, token_file, patience_seconds=PATIENCE_SECONDS if wait else 3.0) as client:
        view = client.run(find_run(client, run))
        config = _config(view.spec, given, limits)
        row = client.request_evaluation(view.id, config, round_number)
        note(f"evaluation {short(row.id)} of round {row.round_number} on {row.dataset} is {row.state}")
        while wait and row.state not in _ENDED:
            time.sleep(POLL_SECONDS)
            row = client.evaluation(row.id)
    failed = wait and row.state != "completed"
    if output is Format.JSON:
        show_json(row)
    else:
        _show([row.model_copy(update={"reason": ""}) if failed else row])
    if failed:
        raise EvaluationNotCompleted(f"evaluation {row.id} is {row.state}" + (f": {row.reason}" if row.reason else ""))


def _require_only_a_round(given: dict[str, Any], wait: bool) -> None:  # noqa: FBT001
    """Raise UsageError if an option is given that does not apply to sites."""
    names = {"measures": "--measures", "settings": "--settings", "embedding_map": "--map", "dataset": "--data"}
    names |= {"max_train": "--num-labels", "max_test": "--num-test"}
    found = [names[name] for name, value in given.items() if value is not None]
    if found:
        raise UsageError(
            f"--at sites does not take {' and '.join(found)}: the sites measure what the [evaluation] of the run's "
            "spec names, on their own images"
        )
    if wait:
        raise UsageError(
            "--at sites does not take --wait: a site that is offline answers when it is back; "
            "`fedssl run site-evaluations` shows the answers"
        )


def list_evaluations(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """List the evaluations of a run's encoder, round by round, with the last and the best round marked, and chance.

    The best round is chosen on the test set itself, so report it only together with the last.
    """
    with connect(url, token_file) as client:
        rows = list(client.evaluations(find_run(client, run)))
    if output is Format.JSON:
        show_json(rows)
        return
    _show(rows)
    judged = [row for row in rows if (row.results or {}).keys() & {*_ACCURACIES}]
    if judged:
        note("round 0 is the encoder before training")
    names = names_of(rows)
    for name, chance in dict.fromkeys((names[setting_of(row)], row.chance) for row in judged):
        if chance is not None:
            note(f"chance on {name} is {100 * chance.accuracy:.2f} %: {chance.how}")


def cancel_evaluation(
    run: RunArgument,
    evaluation: Annotated[
        str, typer.Argument(metavar="EVALUATION", help="An evaluation's id, or the first characters of it.")
    ],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Cancel a queued or running evaluation. The run is not affected, and you can request the evaluation again."""
    with connect(url, token_file) as client:
        row = client.cancel_evaluation(_find(client, run, evaluation).id)
    if output is Format.JSON:
        show_json(row)
    else:
        _show([row])


def best_rounds(rows: Sequence[EvaluationView]) -> tuple[dict[Any, list[str]], list[str]]:
    """Return marks (`last`, `best by ...`) by evaluation, and a sentence per data set on how the best was chosen.

    Only rounds with the same evaluation settings are compared.
    """
    names = names_of(rows)
    marks: dict[Any, list[str]] = {}
    sentences = []
    for (setting, _), group in grouped(row for row in rows if row.state == "completed").items():
        history = [(row.round_number, _numbers(row)) for row in group]
        measure = next((name for name in _ACCURACIES if name in history[0][1]), None)
        if measure is None or len(group) == 1:
            continue
        choice = choose_best(history, measure)
        by_round = {row.round_number: row.id for row in group}
        marks.setdefault(by_round[choice.last_round], []).append("last")
        marks.setdefault(by_round[choice.best_round], []).append(f"best by {measure}")
        sentences.append(f"{names[setting]}, {choice.chosen}")
    return marks, sentences


def _config(spec: RunSpec, given: dict[str, Any], limits: dict[str, int | None]) -> JudgingConfig:
    """Return the evaluation of the run's spec, changed by the given options. Raises UsageError."""
    config = spec.central_evaluation
    wanted = {} if config is None else config.model_dump(exclude={"every", "at", "sites"})
    wanted |= {name: value for name, value in given.items() if value is not None}
    wanted |= {name: value or None for name, value in limits.items() if value is not None}  # 0: no limit
    if "dataset" not in wanted:
        raise UsageError("the run's spec has no evaluation data set: give --data NAME")
    try:
        return JudgingConfig.model_validate(wanted)
    except ValidationError as error:
        first = first_problem(error)
        raise UsageError(f"{first.place}: {first.message}") from None


def _find(client: "Client", run: str, text: str) -> EvaluationView:
    wanted = text.lower().replace("-", "")
    if len(wanted) < MIN_PREFIX:
        raise UsageError(
            f"{text!r} is too short: give at least the first {MIN_PREFIX} characters of the evaluation's id"
        )
    fitting = [row for row in client.evaluations(find_run(client, run)) if row.id.hex.startswith(wanted)]
    if len(fitting) != 1:
        raise NoSuchJob(
            f"{len(fitting)} evaluations of the run have ids that begin with {text}: `fedssl run evaluations {run}` "
            "lists them"
        )
    return fitting[0]


def _show(rows: Sequence[EvaluationView]) -> None:
    marks, sentences = best_rounds(rows)
    names, settings = [*_ACCURACIES, *_NUMBERS], names_of(rows)
    lines = []
    for row in rows:
        numbers, setting = _numbers(row), settings[setting_of(row)]
        cells = [_cell(name, numbers.get(name)) for name in names]
        lines.append((short(row.id), row.round_number, setting, *cells, _state(row), ", ".join(marks.get(row.id, []))))
    columns = ["evaluation", "#round", "data set", *(f"#{name.replace('_', ' ')}" for name in names), "state", "which"]
    show_table(columns, lines)
    for sentence in sentences:
        note(sentence)


def _numbers(row: EvaluationView) -> dict[str, float]:
    """Return the results so far; NaN if training diverged."""
    so_far = {} if row.progress is None else row.progress.results
    found = so_far if row.results is None else row.results
    return {name: math.nan if value is None else value for name, value in found.items()}


def _cell(name: str, value: float | None) -> str | None:
    if value is None or math.isnan(value):
        return None if value is None else "diverged"
    return f"{100 * value:.2f} %" if name in _ACCURACIES else f"{value:.4g}"


def _state(row: EvaluationView) -> str:
    if row.state == "running" and row.progress is not None and row.progress.doing:
        share = "" if row.progress.share is None else f" {100 * row.progress.share:.0f} %"
        return f"{row.state}: {row.progress.doing}{share}"
    return f"{row.state}: {row.reason}" if row.reason else row.state
