"""Writes the encoders that clients declared into a run's spec, if it asks for them: the spec decides the result."""

from typing import Any

from pydantic import ValidationError
from sqlalchemy.orm import Session

from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.model import EncoderConfig
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.validation import first_problem
from fedssl.wording import plural
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity import clients

_PATH = ("method", "reducer", "client_encoders")
_CLIENTS_SHOWN = 5


def pinned(session: Session, project: str, spec: RunSpec) -> RunSpec:
    """Return the spec of a new run, with the declared encoders that differ from its model's encoder.

    Clients that declared none train the model's encoder. Raises ProblemError if some of the run's clients are unknown,
    or if the method cannot use the declared encoders.
    """
    if not _is_open(spec):
        return spec
    declared = clients.declared_encoders(session, project, spec.cohort.clients)
    _check_known(spec, list(declared))
    others = {
        name: encoder
        for name, encoder in declared.items()
        if encoder is not None and not encoder.is_same_network(spec.model.encoder)
    }
    try:
        return RunSpec.model_validate(_with_encoders(spec, others))
    except ValidationError as error:
        message = first_problem(error).message
        detail = "nothing was changed: the encoders that the clients declared do not fit the spec"
        raise ProblemError("invalid-request", detail, errors=[{"loc": ["spec", *_PATH], "msg": message}]) from None


def as_asked(asked: RunSpec, stored: RunSpec) -> RunSpec:
    """Return `stored`, without its encoders if `asked` leaves them open."""
    if not _is_open(asked) or distillation_of(stored.method) is None:
        return stored
    return RunSpec.model_validate(_with_encoders(stored, "declared"))


def _is_open(spec: RunSpec) -> bool:
    config = distillation_of(spec.method)
    return config is not None and config.client_encoders == "declared"


def _check_known(spec: RunSpec, known: list[str]) -> None:
    if missing := sorted(set(spec.cohort.clients or ()) - set(known)):
        names = ", ".join(missing[:_CLIENTS_SHOWN]) + " and others" * (len(missing) > _CLIENTS_SHOWN)
        why = f"{names} of cohort.clients have not registered or were revoked"
    elif len(known) < spec.cohort.min_clients:
        needed = plural(spec.cohort.min_clients, "client")
        why = f"{len(known)} of {needed} (cohort.min_clients) {'has' if len(known) == 1 else 'have'} registered"
    else:
        return
    raise ProblemError(
        "conflict",
        f"not all encoders are declared: {why}. Start their workers first, or list the encoders in client_encoders",
    )


def _with_encoders(spec: RunSpec, encoders: "dict[str, EncoderConfig] | str") -> dict[str, Any]:
    values = spec.model_dump(mode="json")
    values["method"]["reducer"]["client_encoders"] = encoders
    return values
