"""`fedssl run`: submit, list, show, control, follow and fetch runs."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import (
    ProjectOption,
    RunArgument,
    SetOption,
    SpecArgument,
    TokenFileOption,
    UrlOption,
    seconds_of,
)
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect, find_run, short
from fedssl.cli.dry_run import DryRunOption, document_of, estimate_of, participants_of, show_dry_run, with_times
from fedssl.cli.errors import RunNotCompleted, UsageError
from fedssl.cli.output import Format, FormatOption, cell, note, show_json, show_json_line, show_list, show_pairs
from fedssl.cli.run import dimensions, distillations, embedding, evaluations, metrics, pull, site_evaluations, state
from fedssl.cli.specs import read_spec
from fedssl.protocol.states import RunState
from fedssl.protocol.views import RoundView, RunView
from fedssl.wording import in_one_line

app = typer.Typer(
    help="Submit runs, follow them and fetch their results.\n\n"
    "Example: `fedssl run submit examples/demo.toml --watch`, then `fedssl run pull RUN`",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)


@app.command()
def submit(
    spec: SpecArgument,
    *,
    set_: SetOption = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Follow the run until it ends. Ctrl-C stops following, not the run.")
    ] = False,
    start: Annotated[bool, typer.Option("--start/--no-start", help="Start the run at once.")] = True,
    project: ProjectOption = None,
    dry_run: DryRunOption = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Submit a run.

    Example: `fedssl run submit spec.toml --set num_rounds=20 --watch`
    """
    wanted = read_spec(spec, set_)
    with connect(url, token_file) as client:
        if dry_run:
            estimate = estimate_of(client, wanted, project)
            document = document_of(wanted, participants_of(client, wanted, project, estimate))
            show_dry_run(with_times(document, estimate), output)
            return
        run = client.create_run(wanted, start=start, project=project)
        note(f"run {run.id} {'submitted' if start else 'created; `fedssl run start` starts it'}")
        if not watch:
            _show_result(run, output)
            return
    _follow(str(run.id), url, token_file, output)


@app.command("ls")
def list_runs(
    *,
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List runs, newest first."""
    with connect(url, token_file) as client:
        runs = list(client.runs(state))
    rows = [
        (short(run.id), run.name, run.method, run.outcome or run.state, f"{run.rounds_closed}/{run.num_rounds}",
         run.created_at, run.reason)
        for run in runs
    ]  # fmt: skip
    columns = ["run", "name", "method", "state", "#rounds", "created", "reason"]
    show_list(runs, columns, rows, output, projects=[run.project for run in runs])


@app.command()
def show(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show one run: its state, its losses, its scores next to their baselines, and its newest round.

    The baselines are the encoder before training (round 0) and chance. `--format json` also shows the run's spec.
    """
    from fedssl.cli.run.run_scores import find_scores, scores_as_json, show_run_scores

    with connect(url, token_file) as client:
        view = client.run(find_run(client, run))
        scores = find_scores(client, view.id)
        if output is Format.JSON:
            show_json({**view.model_dump(mode="json"), "scores": scores_as_json(scores)})
            return
        losses = [metric for metric in client.metrics(view.id, "loss") if metric.client_id is None]
    show_pairs(_summary(view) | {"last losses": ", ".join(f"{loss.value:.4f}" for loss in losses[-8:])})
    show_run_scores(scores, view.spec.model.initial)
    if view.current_round is not None:
        _show_round(view.current_round)


@app.command()
def watch(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Follow a run until it ends. Ctrl-C stops following, not the run. Exits with 1 if it failed, 6 if stopped."""
    _follow(run, url, token_file, output)


@app.command()
def wait(
    run: RunArgument,
    *,
    timeout: Annotated[
        str | None, typer.Option(metavar="TIME", help="Stop waiting after this time: 30m, 12h.  [default: never]")
    ] = None,
    through_pauses: Annotated[
        bool, typer.Option("--through-pauses", help="Keep waiting while the run is paused, until it is resumed.")
    ] = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Wait silently for a run to end, for scripts. The exit code shows how it ended.

    Example: `fedssl run wait RUN --timeout 12h && fedssl run pull RUN`

    \b
    0  the run completed
    1  it failed
    6  it was stopped
    7  it is paused, and does not resume by itself (not with --through-pauses)
    8  it did not end within --timeout

    In each of these cases the run is shown on standard output. `fedssl --help` lists the other exit codes.
    """
    from fedssl.cli.run import watch as following

    seconds = None if timeout is None else seconds_of("--timeout", timeout)
    with connect(url, token_file) as client:
        run_id = find_run(client, run)
    with connect(url, token_file, patience_seconds=following.PATIENCE_SECONDS) as client:
        view = following.wait(client, run_id, timeout_seconds=seconds, through_pauses=through_pauses)
    _show_end(view, output)


@app.command()
def start(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Start a run that was submitted with --no-start."""
    _control("start", run, url, token_file, output)


@app.command()
def pause(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Pause a run: no new work is given out, and updates that are being trained are still accepted."""
    _control("pause", run, url, token_file, output)


@app.command()
def resume(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Resume a paused run, or a failed one from its last closed round once the cause has been removed."""
    _control("resume", run, url, token_file, output)


@app.command()
def stop(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Stop a run permanently. Its weights so far are kept."""
    _control("stop", run, url, token_file, output)


@app.command("continue")
def continue_run(
    run: RunArgument,
    *,
    rounds: Annotated[int, typer.Option(min=1, max=100_000, help="How many further rounds to train.")],
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Train a completed run for further rounds, with its weights and with the states that its clients still have.

    Example: `fedssl run continue RUN --rounds 20`

    If every client still has its state, the result is that of a run which was submitted with all rounds at once. A
    client that has lost its state is named in `fedssl run logs RUN --kind client.state_lost`.
    """
    with connect(url, token_file) as client:
        run_id = find_run(client, run)
        view = client.continue_run(run_id, client.run(run_id).num_rounds + rounds)
    _show_result(view, output)


@app.command()
def edit(
    run: RunArgument,
    *,
    name: Annotated[str | None, typer.Option(help="The name that is shown. The spec keeps its own.")] = None,
    tag: Annotated[
        list[str] | None, typer.Option("--tag", metavar="TAG", help="A tag; repeat it for several. They replace all.")
    ] = None,
    no_tags: Annotated[bool, typer.Option("--no-tags", help="Remove all tags.")] = False,
    notes: Annotated[str | None, typer.Option(metavar="TEXT", help="What you want to remember about the run.")] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Change the name, the tags or the notes of a run, at any time. Nothing else changes.

    Example: `fedssl run edit RUN --tag baseline --tag table-1 --notes "first try with eight sites"`
    """
    if tag and no_tags:
        raise UsageError("--tag and --no-tags contradict each other: give one of them")
    tags = [] if no_tags else tag
    if name is None and not tags and not no_tags and notes is None:
        raise UsageError("there is nothing to change: give --name, --tag, --no-tags or --notes")
    with connect(url, token_file) as client:
        view = client.edit_run(find_run(client, run), name=name, tags=tags, notes=notes)
    _show_result(view, output)


@app.command()
def delete(
    run: RunArgument,
    *,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
) -> None:
    """Delete a finished run with its weights and numbers, permanently. Needs an admin's token.

    Run `fedssl run pull` first if you want to keep the weights. The coordinator's audit log keeps the run's events.
    """
    with connect(url, token_file) as client:
        view = client.run(find_run(client, run))
        if not yes:
            typer.confirm(f"Delete run {view.id} ({view.name}) with its weights, permanently?", abort=True, err=True)
        client.delete_run(view.id)
    note(f"run {view.id} deleted")


@app.command()
def logs(
    run: RunArgument,
    *,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Keep printing events until the run has finished.")
    ] = False,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Only events of this kind, for example `round.closed`.")
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Show the audit log of a run. With --follow, JSON output has one event per line."""
    with connect(url, token_file) as client:
        run_id = find_run(client, run)
        if output is Format.JSON and not follow:
            show_json(list(client.event_log(run_id, kind)))
            return
        for event in client.events(run_id) if follow else client.event_log(run_id, kind):
            if kind not in (None, event.kind):
                continue
            if output is Format.JSON:
                show_json_line(event)
                continue
            number = "-" if event.round_number is None else str(event.round_number)
            typer.echo(f"{cell(event.at)}  {number:>5}  {in_one_line(event.kind):<22}  {in_one_line(event.message)}")


def _follow(run: str, url: str | None, token_file: Path | None, output: Format) -> None:
    from fedssl.cli.run import watch as following

    with connect(url, token_file) as client:
        run_id = find_run(client, run)
    try:
        with connect(url, token_file, patience_seconds=following.PATIENCE_SECONDS) as client:
            view = following.watch(client, run_id)
    except KeyboardInterrupt:
        note(f"no longer watching; the run continues: `fedssl run watch {short(run_id)}` follows it again")
        raise
    _show_end(view, output)


def _control(verb: str, run: str, url: str | None, token_file: Path | None, output: Format) -> None:
    with connect(url, token_file) as client:
        view = getattr(client, verb)(find_run(client, run))
    _show_result(view, output)


def _show_result(run: RunView, output: Format) -> None:
    if output is Format.JSON:
        show_json(run)
    else:
        show_pairs(_summary(run))


def _show_end(run: RunView, output: Format) -> None:
    """Show a run that has ended, or is no longer waited for. Raises RunNotCompleted, whose message has the reason."""
    from fedssl.cli.run.watch import require_completed

    try:
        require_completed(run)
    except RunNotCompleted:
        _show_result(run.model_copy(update={"reason": ""}) if output is Format.TABLE else run, output)
        raise
    _show_result(run, output)


def _summary(run: RunView) -> dict[str, object]:
    return {
        "run": str(run.id),
        "name": run.name,
        "project": run.project,
        "tags": ", ".join(run.tags) or None,
        "notes": run.notes or None,
        "method": run.method,
        "state": run.outcome or run.state,
        "reason": run.reason,
        "rounds": f"{run.rounds_closed} of {run.num_rounds}",
        "clients": ", ".join(run.clients[:8]) + (f" and {len(run.clients) - 8} more" if len(run.clients) > 8 else ""),
        "left out": "; ".join(f"{name}: {why}" for name, why in run.left_out.items()) or None,
        "created": run.created_at,
        "started": run.started_at,
        "finished": run.finished_at,
        "model": run.model,
    }


def _show_round(current: RoundView) -> None:
    reason = f" ({in_one_line(current.reason)})" if current.reason else ""
    typer.echo(f"\nround {current.number}: {current.verdict or current.state}{reason}")
    if (secure := current.secure) is not None:
        show_pairs(
            {
                "phase": secure.phase,
                "waits for": ", ".join(secure.awaited) or None,
                "not in the sum": ", ".join(secure.lost) or None,
                "own masks revealed of": ", ".join(secure.own_masks) or None,
                "mask keys revealed of": ", ".join(secure.mask_keys) or None,
            }
        )
        note(secure.not_promised)
    metrics.show_assignments(current.assignments)


app.command("pull")(pull.pull)
app.command("rounds")(metrics.list_rounds)
app.command("metrics")(metrics.list_metrics)
app.command("export-metrics")(metrics.export_metrics)
app.command("state")(state.show_state)
app.command("dimensions")(dimensions.show_dimensions)
app.command("distillations")(distillations.list_distillations)
app.command("cancel-distillation")(distillations.cancel_distillation)
app.command("evaluate")(evaluations.request_evaluation)
app.command("evaluations")(evaluations.list_evaluations)
app.command("embedding")(embedding.draw_embedding)
app.command("site-evaluations")(site_evaluations.list_site_evaluations)
app.command("cross-site")(site_evaluations.show_cross_site)
app.command("cancel-evaluation")(evaluations.cancel_evaluation)
