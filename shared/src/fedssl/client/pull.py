"""Downloads a run: its weights, and the files that describe them."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol
from uuid import UUID

from fedssl.client import model_card, model_files
from fedssl.client.downloads import OnBytes, OnSize
from fedssl.client.errors import BadAnswer, ClientError
from fedssl.errors import ResultsError
from fedssl.protocol.views import EvaluationView, RoundView, RunView, SiteRoundView
from fedssl.run_files import LINEAGE, read_json

OnFetch = Callable[[], tuple[OnBytes, OnSize]]
"""Called before each download. Returns the functions that receive its progress, and its size once that is known."""


class RunSource(Protocol):
    """The part of :class:`fedssl.client.Client` that `pull` uses."""

    def run(self, run_id: UUID) -> RunView: ...
    def rounds(self, run_id: UUID) -> Iterable[RoundView]: ...
    def evaluations(self, run_id: UUID) -> Iterable[EvaluationView]: ...
    def site_evaluations(self, run_id: UUID) -> Iterable[SiteRoundView]: ...
    def download_model(
        self,
        run_id: UUID,
        destination: Path,
        which: Literal["latest", "initial"],
        *,
        on_bytes: OnBytes,
        on_size: OnSize,
    ) -> str: ...


@dataclass(frozen=True, slots=True)
class PulledRun:
    """A run's files. `files` has the paths by what they hold, and `digest` is the sha256 of the weights."""

    run: RunView
    folder: Path
    files: dict[str, Path]
    digest: str


def pull(client: RunSource, run_id: UUID, folder: Path | None, *, initial: bool, on_fetch: OnFetch) -> PulledRun:
    """Download a run to a folder, as :meth:`fedssl.client.Client.pull` describes."""
    view = client.run(run_id)
    folder = folder or Path(f"run-{str(view.id)[:8]}")
    _require_no_other_run(folder, view.id)
    model = folder / (model_files.INITIAL if initial else model_files.MODEL)

    def fetch(which: Literal["latest", "initial"]) -> str:
        on_bytes, on_size = on_fetch()
        return client.download_model(run_id, model, which, on_bytes=on_bytes, on_size=on_size)

    digest = fetch("initial" if initial else "latest")
    while not initial and view.model != digest:  # a round has closed since: the card must describe these weights
        view = client.run(run_id)
        if view.model != digest:
            before, digest = digest, fetch("latest")
            if digest == before:
                raise BadAnswer(
                    f"the coordinator's newest weights of this run are {view.model}, but it sends {digest}: does a "
                    "proxy in between answer with older weights?"
                )
    spec = folder / model_files.SPEC
    model_files.write_spec(view.spec, spec)
    files = {"model": model, "spec": spec}
    if not initial:
        encoder = folder / model_files.ENCODER
        model_files.export_encoder(model, encoder)
        rounds, evaluations = client.rounds(run_id), client.evaluations(run_id)
        sites = () if view.spec.site_evaluation is None else client.site_evaluations(run_id)
        card = model_card.write_card(view, rounds, evaluations, digest, encoder, folder, sites)
        files |= {"encoder": encoder} | card
    return PulledRun(view, folder, files, digest)


def _require_no_other_run(folder: Path, run_id: UUID) -> None:
    """Raise ClientError if the folder holds another run, whose weights would be next to this run's spec."""
    try:
        lineage = read_json(folder / LINEAGE)
    except ResultsError:
        return  # damaged: the file is written again
    if lineage is not None and lineage.get("run", str(run_id)) != str(run_id):
        raise ClientError(f"{folder} holds the files of run {lineage['run']}: choose another folder")
