"""Run one simulation in its own folder. It can be interrupted at any time and resumed; its results are kept."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fedssl.artifacts.tensors import Tensors
from fedssl.data import ImageData
from fedssl.data.image_cache.build import CachedData
from fedssl.errors import DataError, ResultsError, SpecError
from fedssl.experiments.checkpoints import CROSS_SITE, SITES, FolderCheckpoint, code_version, run_key, write_durably
from fedssl.experiments.spread import best_round
from fedssl.locks import FolderLock
from fedssl.methods import METHODS
from fedssl.models.start_files import pinned
from fedssl.protocol.chance import CHANCE_KEY, Chance
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.site_evaluation import SiteCounts
from fedssl.run_files import (
    CHECKPOINT,
    CLIENTS,
    DEVICE,
    ENCODER,
    HISTORY,
    INITIAL,
    LOCK,
    MEASURES,
    MODEL,
    RESULT,
    SPEC,
    read_json,
    write_json,
    write_spec,
)
from fedssl.simulation import (
    OnDistillation,
    OnEvaluation,
    OnJudging,
    OnProgress,
    Result,
    RoundRecord,
    judged_models,
    simulate,
)
from fedssl.simulation.inputs import files_stamp, images_digest

SITES_KEY, CROSS_SITE_KEY = "site_evaluations", "cross_site"
_PREFIX = "encoder."


@dataclass(frozen=True, slots=True)
class FinishedRun:
    """The results of a finished run, without its models.

    Attributes:
        evaluations: the measures by round; round 0 is before training.
        megabytes_by_round: 10^6 bytes that all clients sent and received up to and including a round.
        losses: one loss per round.
        chance: the accuracy without an encoder; None if the run was not evaluated, or by an older version.
        site_evaluations: by round, each site's counts on its own labelled images, or why it has none.
        cross_site: by round and by the site that a classifier is from, the counts of every other site.
        sources: digests of the sources of each version of fedssl that has computed a part of the run; empty if an older
            version has finished it.
    """

    num_rounds: int
    num_images: int
    bytes_down: int
    bytes_up: int
    seconds: float
    evaluations: dict[int, dict[str, float]]
    megabytes_by_round: dict[int, float]
    losses: list[float | None]
    chance: Chance | None = None
    site_evaluations: dict[int, dict[str, SiteCounts | str]] = field(default_factory=dict)
    cross_site: dict[int, dict[str, dict[str, SiteCounts | str]]] = field(default_factory=dict)
    sources: tuple[str, ...] = ()

    @property
    def mixed(self) -> str | None:
        """A warning if several versions of fedssl have computed the run: its bits may be those of none of them."""
        return _mixed(self.sources)

    @property
    def last(self) -> dict[str, float]:
        """The measures of the last evaluated round; empty if there was no evaluation."""
        return self.evaluations[max(self.evaluations)] if self.evaluations else {}

    @property
    def untrained(self) -> dict[str, float]:
        """The measures before training; empty if there was no evaluation then."""
        return self.evaluations.get(0, {})

    def best(self, measure: str) -> tuple[int, float] | None:
        """Return the trained round with the largest value, and the value: see :func:`.best_round`."""
        return best_round(self.evaluations, measure)


@dataclass(frozen=True, slots=True, kw_only=True)
class Calls:
    """Callbacks of a run, as in :func:`fedssl.simulation.simulate`. `on_resume` gets the number of finished rounds, and
    `on_warning` what is unusual about the run that is resumed."""

    on_resume: Callable[[int], None] = lambda rounds_done: None
    on_warning: Callable[[str], None] = lambda warning: None
    on_round: Callable[[RoundRecord], None] = lambda record: None
    on_progress: OnProgress = lambda number, client, progress: None
    on_distillation: OnDistillation = lambda number, progress: None
    on_judging: OnJudging = lambda number, what, share: None
    on_evaluation: OnEvaluation = lambda number, measures: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ComputeSettings:
    """Where a run computes: the device, a folder in which its images are searched before the usual places, and the
    number of processes that train its clients."""

    device: str = "cpu"
    data_root: Path | None = None
    jobs: int = 1


SILENT, HERE = Calls(), ComputeSettings()


def run_in_folder(
    spec: RunSpec,
    folder: Path,
    *,
    machine: ComputeSettings = HERE,
    calls: Calls = SILENT,
    clients: Mapping[str, ImageData | CachedData] | None = None,
    public: ImageData | None = None,
    keep_clients: bool = False,
    is_locked: bool = False,
) -> FinishedRun:
    """Run or resume a simulation in `folder`; if it is finished, only read its results.

    Writes the models, the encoder (each client's, if clients send nothing), the spec, `history.json` and, last,
    `result.json`. `clients` and `public` are those of :func:`fedssl.simulation.simulate`. With `keep_clients` also
    `clients/CLIENT.safetensors`: the model of each client of the last round, as trained, before the models were
    averaged. `is_locked`: the caller has the folder in `locked_folder`.

    Raises ResultsError if the folder is another run's, its run had other images, or it has no clients' models although
    `keep_clients` asks for them, SpecError if it asks for them and clients send something other than weights,
    FolderInUseError if another process works in it, and the errors of a simulation.
    """
    spec = pinned(spec)
    if keep_clients:
        require_weights(spec)
    with nullcontext() if is_locked else locked_folder(folder):
        stamp = files_stamp(spec, machine.data_root) if clients is None and public is None else ""
        checkpoint = FolderCheckpoint(folder / CHECKPOINT)
        if (finished := find_finished(spec, folder)) is not None:
            checkpoint.discard()  # an earlier start may have been killed just before it did
            if keep_clients:
                _require_clients(folder)
            _require_images(spec, folder, stamp, machine, clients, public)
            return finished
        if (begun := checkpoint.load(spec)) is not None:
            calls.on_resume(begun.rounds_done)
            if (warning := _mixed(checkpoint.sources)) is not None:
                calls.on_warning(warning)
            if keep_clients and begun.rounds_done >= spec.num_rounds:
                _require_clients(folder)

        def keep(number: int, name: str, model: Tensors) -> None:
            if number == spec.num_rounds:
                (folder / CLIENTS).mkdir(exist_ok=True)
                write_durably(folder / CLIENTS / f"{name}.safetensors", model)

        result = simulate(
            spec,
            clients,
            public=public,
            data_root=machine.data_root,
            device=machine.device,
            jobs=machine.jobs,
            checkpoint=checkpoint,
            on_round=calls.on_round,
            on_progress=calls.on_progress,
            on_distillation=calls.on_distillation,
            on_judging=calls.on_judging,
            on_evaluation=calls.on_evaluation,
            on_trained=keep if keep_clients else None,
        )
        finished = _write(result, folder, stamp, checkpoint.sources)
        checkpoint.discard()
        return finished


@contextmanager
def locked_folder(folder: Path) -> Iterator[None]:
    """Hold the lock of a folder of results, so that no other command writes into it. The folder is created.

    Raises FolderInUseError if another process has it.
    """
    folder.mkdir(parents=True, exist_ok=True)  # with the usual permissions, not those that the lock would set
    lock = FolderLock(folder, LOCK)
    lock.acquire()
    try:
        yield
    finally:
        lock.release()
        _remove_if_unused(folder)


def require_weights(spec: RunSpec) -> None:
    """Raise SpecError if the coordinator sees something other than weights of the clients."""
    update = METHODS[spec.method.name].bind(spec).plan.update
    if update and all(tensor.kind != "weights" for tensor in update):
        raise SpecError(
            f"clients' models cannot be kept: clients of {spec.method.name} with this reducer send "
            f"{update[0].kind} and no weights"
        )


def _mixed(sources: tuple[str, ...]) -> str | None:
    if len(sources) < 2:
        return None
    return (
        f"{len(sources)} versions of fedssl's code compute this run, and its results may differ from those of one "
        "version: start again with --restart if that matters"
    )


def _require_clients(folder: Path) -> None:
    if not client_models(folder):
        raise ResultsError(
            f"{folder} holds this run without its clients' models: start again with --restart, or take another folder"
        )


def _require_images(
    spec: RunSpec,
    folder: Path,
    stamp: str,
    machine: ComputeSettings,
    clients: Mapping[str, ImageData | CachedData] | None,
    public: ImageData | None,
) -> None:
    """Raise ResultsError if the images have changed since the run in the folder was finished."""
    document = read_json(folder / RESULT) or {}
    known = document.get("images")  # an earlier version kept none
    if stamp and document.get("files") == stamp:
        return
    try:
        if not known or images_digest(spec, clients, public=public, data_root=machine.data_root) == known:
            return
    except DataError:
        return  # the results can be read on machines without the images
    raise ResultsError(
        f"the images of the clients or of the evaluation have changed since the run in {folder} was finished: start "
        "again with --restart, or take another folder"
    )


def client_models(folder: Path) -> list[Path]:
    """Return the files of the clients' models of a run with `keep_clients`, in the order of the clients' names."""
    return sorted((folder / CLIENTS).glob("*.safetensors"))


def _remove_if_unused(folder: Path) -> None:
    """Remove the folder if it holds only the lock, because the run failed before its first round."""
    if [path.name for path in folder.iterdir()] == [LOCK]:
        (folder / LOCK).unlink()
        folder.rmdir()


def find_finished(spec: RunSpec, folder: Path) -> FinishedRun | None:
    """Return the finished run in this folder, or None. Raises ResultsError if the folder holds another run."""
    document = read_json(folder / RESULT)
    if document is None:
        return None
    if document.get("key") != run_key(pinned(spec)):
        raise ResultsError(
            f"{folder} holds the results of another spec, or of other code: take another folder, or start again with "
            "--restart"
        )
    return parse_result(document)


def encoders(folder: Path) -> list[Path]:
    """Return the files of a finished run's encoders: one, or one per client if clients sent nothing."""
    return sorted(folder.glob("encoder-*.safetensors")) or [folder / ENCODER]


def is_of(spec: RunSpec, folder: Path) -> bool:
    """Return whether the folder is free for this run, or already its own."""
    manifest = read_json(folder / CHECKPOINT / "manifest.json")
    found = [document for document in (read_json(folder / RESULT), manifest) if document is not None]
    return not found or all(document.get("key") == run_key(pinned(spec)) for document in found)


def require_own(spec: RunSpec, folder: Path) -> None:
    """Raise ResultsError if the folder holds another run."""
    if not is_of(spec, folder):
        raise ResultsError(
            f"{folder} holds another spec's run, or was made by other code: take another folder, or start again with "
            "--restart"
        )


def clear(folder: Path) -> None:
    """Remove a run's result and checkpoint, so that it starts again. Raises FolderInUseError if it is running."""
    if not folder.exists():
        return
    with locked_folder(folder):
        for name in (MEASURES, DEVICE, RESULT):  # the result last: without it, a new one would get the old measures
            (folder / name).unlink(missing_ok=True)
        if (folder / CHECKPOINT).is_dir():
            shutil.rmtree(folder / CHECKPOINT)
        shutil.rmtree(folder / CLIENTS, ignore_errors=True)
        for path in folder.glob("encoder-*.safetensors"):  # only a method that sends nothing would replace them
            path.unlink()


def parse_result(document: Mapping[str, Any]) -> FinishedRun:
    """Parse a run's `result.json`. Raises ResultsError if it is not valid."""
    try:
        evaluations = {int(at): _numbers(values) for at, values in document["evaluations"].items()}
        return FinishedRun(
            num_rounds=document["num_rounds"],
            num_images=document["num_images"],
            bytes_down=document["bytes_down"],
            bytes_up=document["bytes_up"],
            seconds=document["seconds"],
            evaluations=evaluations,
            megabytes_by_round={int(at): value for at, value in document["megabytes_by_round"].items()},
            losses=list(document["losses"]),
            chance=_chance(document.get(CHANCE_KEY)),
            site_evaluations=SITES.validate_python(document.get(SITES_KEY, {})),
            cross_site=CROSS_SITE.validate_python(document.get(CROSS_SITE_KEY, {})),
            sources=tuple(document.get("sources", ())),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ResultsError(f"result.json is not a run's result ({error!r}): start again with --restart") from error


def _chance(document: Mapping[str, Any] | None) -> Chance | None:
    return None if document is None else Chance(document["accuracy"], document["num_classes"])


def _numbers(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: float("nan") if value is None else value for name, value in values.items()}


def _write(result: Result, folder: Path, stamp: str, sources: tuple[str, ...]) -> FinishedRun:
    history = result.history
    sent, megabytes = 0, {0: 0.0}
    for record in history:
        sent += record.bytes_down + record.bytes_up
        megabytes[record.round_number] = sent / 1e6
    finished = FinishedRun(
        num_rounds=len(history),
        num_images=sum(record.num_images for record in history),
        bytes_down=sum(record.bytes_down for record in history),
        bytes_up=sum(record.bytes_up for record in history),
        seconds=sum(record.seconds for record in history),
        evaluations=result.evaluations_by_round,
        megabytes_by_round=megabytes,
        losses=[record.loss for record in history],
        chance=result.chance,
        site_evaluations=result.site_evaluations,
        cross_site=result.cross_site,
        sources=sources,
    )
    for name, tensors in ((MODEL, result.model), (INITIAL, result.initial), (ENCODER, _encoder(result.model))):
        write_durably(folder / name, tensors)
    for client, state in judged_models(result).items():
        if client:
            write_durably(folder / f"encoder-{client}.safetensors", _encoder(state))
    write_spec(result.spec, folder / SPEC)
    write_json(folder / HISTORY, [_entry(record, result) for record in history])
    document = {each.name: getattr(finished, each.name) for each in fields(FinishedRun)}
    document |= {"images": result.images, "files": stamp}
    document[SITES_KEY] = SITES.dump_python(result.site_evaluations, mode="json")
    document[CROSS_SITE_KEY] = CROSS_SITE.dump_python(result.cross_site, mode="json")
    document[CHANCE_KEY] = None if finished.chance is None else finished.chance.as_json()
    write_json(folder / RESULT, {"key": run_key(result.spec), "code": code_version(result.spec), **document})
    return finished


def _encoder(model: Tensors) -> Tensors:
    return {name: tensor for name, tensor in model.items() if name.startswith(_PREFIX)}


def _entry(record: RoundRecord, result: Result) -> dict[str, Any]:
    entry = {
        "round": record.round_number,
        "loss": record.loss,
        "clients": record.clients,
        "num_examples": record.num_examples,
        "server": record.server,
        "num_images": record.num_images,
        "bytes_down": record.bytes_down,
        "bytes_up": record.bytes_up,
        "seconds": record.seconds,
        "alarms": record.alarms,
        "rejected": list(record.rejected),
        "updates": record.updates,
        "unusual": list(record.unusual),
    }
    if record.skipped is not None:
        entry["skipped"] = record.skipped
    measured = result.evaluations_by_round.get(record.round_number)
    return entry if measured is None else {**entry, "evaluation": measured}
