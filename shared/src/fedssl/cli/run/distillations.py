"""`fedssl run distillations` and `run cancel-distillation`: training by the coordinator itself (FLESD, FedCA)."""

from typing import Annotated
from uuid import UUID

import typer

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run, short
from fedssl.cli.errors import NoSuchJob
from fedssl.cli.output import Format, FormatOption, duration, note, show_json, show_table
from fedssl.protocol.views import DistillationJobView


def list_distillations(
    run: RunArgument,
    *,
    job: Annotated[UUID | None, typer.Option(metavar="JOB", help="Only the job with this id, given in full.")] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """List the training jobs of the coordinator in a run: their progress, loss and remaining time.

    Methods that only combine their clients' weights have no such jobs. Round 0 is the job before the first round:
    FedCA's base model.
    """
    with connect(url, token_file) as client:
        if job is not None:
            jobs = [client.distillation_job(job)]
        else:
            jobs = list(client.distillation_jobs(find_run(client, run)))
    if output is Format.JSON:
        show_json(jobs)
    else:
        _show(jobs)


def cancel_distillation(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Cancel the coordinator's queued or running training job in a run, and pause the run.

    The job stops after its current epoch. `fedssl run resume` restarts the job from scratch; `fedssl run stop` ends the
    run.
    """
    with connect(url, token_file) as client:
        view = client.run(find_run(client, run))
        if view.distillation is None:
            raise NoSuchJob(f"run {short(view.id)} has no distillation in progress, so there is nothing to cancel")
        job = client.cancel_distillation(view.distillation.id)
    if output is Format.JSON:
        show_json(job)
    else:
        _show([job])
        note(f"run {short(view.id)} is paused; `fedssl run resume` restarts the training from scratch")


def _show(jobs: list[DistillationJobView]) -> None:
    rows = [
        (short(job.id), job.round_number, job.state, f"{job.epoch}/{job.num_epochs}", job.loss,
         None if job.eta_seconds is None else duration(job.eta_seconds), job.started_at, job.reason)
        for job in jobs
    ]  # fmt: skip
    show_table(["job", "#round", "state", "#epochs", "#loss", "#left", "started", "reason"], rows)
