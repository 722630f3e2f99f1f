"""Pins the spec of a new run to the weights that it starts from: registered ones, or those of a finished run."""

from sqlalchemy.orm import Session

from fedssl.protocol.data import DataConfig
from fedssl.protocol.initial import InitialConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import RunState
from fedssl.wording import plural
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.problems import ProblemError, invalid_spec
from fedssl_coordinator.core.run_documents import spec_of
from fedssl_coordinator.federation import run_rows
from fedssl_coordinator.storage.artifacts import repository as artifacts
from fedssl_coordinator.storage.weights import service as weights

_PREPARATION = ("mean", "std", "window", "image_size")


def pinned(session: Session, project: str, spec: RunSpec) -> RunSpec:
    """Return the spec of a new run with the digest of the weights that it starts from, and the round of their run.

    The weights stay stored until the transaction ends; the run's row refers to them from then on. Raises ProblemError
    if they do not exist in the project, are no longer stored, or differ from what the spec states.
    """
    config = spec.model.initial
    if config is None:
        return spec
    config = _of_run(session, project, spec, config) if config.run else _registered(session, project, config)
    assert config.digest is not None, "both have set it"
    if not artifacts.hold(session, config.digest):
        key = "run" if config.run else "weights"
        raise _invalid(key, f"the weights of {config.source} are no longer stored: start from others")
    return _with_initial(spec, config)


def difference(session: Session, spec: RunSpec) -> str | None:
    """Return how a new run prepares images differently from the run whose weights it starts from, or None.

    How images were prepared for registered weights is not known.
    """
    config = spec.model.initial
    source = None if config is None or config.run is None else run_rows.get(session, config.run)
    if source is None:
        return None
    theirs = RunSpec.model_validate(source.spec).data
    found = [key for key in _PREPARATION if getattr(theirs, key) != getattr(spec.data, key)]
    if not found:
        return None
    values = (f"data.{key} was {_shown(theirs, key)}, and is {_shown(spec.data, key)}" for key in found)
    return f"run {source.id}, whose weights are the start, had other images: {'; '.join(values)}"


def _shown(data: DataConfig, key: str) -> str:
    value = data.model_dump(mode="json")[key]
    return "not set" if value is None else str(value)


def as_asked(asked: RunSpec, stored: RunSpec) -> RunSpec:
    """Return `stored`, without the digest and the round of its start that `asked` leaves open."""
    before, after = asked.model.initial, stored.model.initial
    if before is None or after is None:
        return stored
    left_open = {name: None for name in ("digest", "round") if getattr(before, name) is None}
    return _with_initial(stored, after.model_copy(update=left_open))


def _registered(session: Session, project: str, config: InitialConfig) -> InitialConfig:
    assert config.weights is not None, "a start is a run or weights"
    found = weights.of_project(session, project, config.weights)
    if found is None:
        raise _invalid(
            "weights",
            f"no weights {config.weights} are registered: register them (`fedssl weights add FILE --as NAME`) and give "
            "their name",
        )
    _require_digest(config, found.digest)
    return config.model_copy(update={"digest": found.digest})


def _of_run(session: Session, project: str, spec: RunSpec, config: InitialConfig) -> InitialConfig:
    assert config.run is not None, "a start is a run or weights"
    run = run_rows.get(session, config.run)
    if run is None or run.project != project:
        raise _invalid("run", f"there is no run {config.run}: it does not exist, or was deleted")
    if run.state != RunState.FINISHED or run.broadcast is None:
        raise _invalid("run", f"run {run.id} is {run.state}: only a finished run that has weights can be a start")
    number = run.rounds_closed if config.round is None else config.round
    if number > run.rounds_closed:
        raise _invalid(
            "round", f"run {run.id} has {plural(run.rounds_closed, 'round')}: there are no weights after {number}"
        )
    _require_same_network(run, spec, config)
    digest = run_rows.weights_after(session, run, number)
    _require_digest(config, digest)
    return config.model_copy(update={"digest": digest, "round": number})


def _require_same_network(run: Run, spec: RunSpec, config: InitialConfig) -> None:
    theirs = spec_of(run)
    if theirs.model.batch_norm == "local":
        raise _invalid(
            "run",
            f"each site of run {run.id} keeps its own BatchNorm, which a start would lack: continue that run "
            "(`fedssl run continue`), or start from another one",
        )
    if not theirs.model.encoder.is_same_network(spec.model.encoder):
        raise _invalid(
            "run",
            f"run {run.id} trained the encoder {theirs.model.encoder}, and this one has {spec.model.encoder}: set "
            "model.encoder to the other run's",
        )
    if theirs.data.channels != spec.data.channels and not config.adapt:
        raise _invalid(
            "adapt",
            f"run {run.id} trained on images of {theirs.data.channels} channels, and these have {spec.data.channels}: "
            "name the first convolution here, or change data.channels",
        )


def _require_digest(config: InitialConfig, digest: str) -> None:
    if config.digest not in (None, digest):
        raise _invalid("digest", f"the weights of {config.source} have digest {digest}: leave it out")


def _with_initial(spec: RunSpec, config: InitialConfig) -> RunSpec:
    return spec.model_copy(update={"model": spec.model.model_copy(update={"initial": config})})


def _invalid(key: str, message: str) -> ProblemError:
    """Return a 422 that names a key of the spec's start."""
    return invalid_spec(f"model.initial.{key}", message)
