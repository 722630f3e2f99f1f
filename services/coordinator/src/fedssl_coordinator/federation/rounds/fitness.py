"""Clients that cannot take part in a run, as far as the registrations of their workers show it.

What a worker declares is only advice: each worker checks its work again before it trains.
"""

from collections import Counter
from collections.abc import Mapping, Sequence

from sqlalchemy.orm import Session

from fedssl.protocol.data import fixed_shape_refusal
from fedssl.protocol.methods.base import MethodConfig
from fedssl.protocol.methods.composed import ComposedConfig
from fedssl.protocol.methods.distillation import distillation_of
from fedssl.protocol.runs import RunSpec
from fedssl.wording import plural
from fedssl_coordinator.core import plan_cache
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.identity import clients
from fedssl_coordinator.identity.clients import Registration

_CLIENTS_SHOWN = 5


def unfit(session: Session, spec: RunSpec, method_version: int, names: Sequence[str]) -> dict[str, str]:
    """Return the clients that cannot take part in a run, with the reason."""
    if not names:
        return {}
    found = {row.client_id: _reason(row, spec, method_version) for row in clients.registrations(session, names)}
    if spec.secure_aggregation is not None:
        found |= {name: found.get(name) or why for name, why in _unidentified(session, names).items()}
    return {name: why for name, why in found.items() if why is not None}


def require_fit(session: Session, project: str, spec: RunSpec) -> None:
    """Raise ProblemError if a new run names clients that cannot take part in it.

    A run that names none leaves them out. Clients that have not registered yet may turn out to be fit.
    """
    names = spec.cohort.clients
    if names is None:
        return
    others = clients.in_other_projects(session, project, names)
    found = {name: f"it belongs to the project {other}, and the run to {project}" for name, other in others.items()}
    found |= unfit(session, spec, spec.method.info.version, [name for name in names if name not in others])
    if not found:
        return
    who = f"{len(found)} of the run's {plural(len(names), 'client')} (cohort.clients)"
    raise ProblemError(
        "conflict",
        f"{who} cannot take part: {shortened(found)}",
        errors=[{"loc": ["spec", "cohort", "clients"], "msg": f"{name}: {why}"} for name, why in found.items()],
    )


def require_possible(spec: RunSpec) -> None:
    """Raise ProblemError if an aggregator has found that no run can have this spec.

    Only an aggregator has torch, so nothing is known here until an estimate was requested from it.
    """
    if (why := plan_cache.refusal(spec)) is not None:
        loc = ["spec", *_key_of(why)]
        detail = f"nothing was changed; correct this and send it again: {why}"
        raise ProblemError("invalid-request", detail, errors=[{"loc": loc, "msg": why}])


def record_left_out(session: Session, run: Run, round_number: int, left_out: Mapping[str, str]) -> None:
    """Record which clients a round was not offered to because they cannot take part."""
    if left_out:
        message = f"left out: {shortened(left_out)}"
        data = {"clients": dict(left_out)}
        record(session, "client.left_out", message, run_id=run.id, round_number=round_number, data=data)


def shortened(reasons: Mapping[str, str]) -> str:
    """Return the first few clients with their reasons as one line. Clients with the same reason share it.

    >>> shortened({"a": "no labels", "b": "declined", "c": "no labels"})
    'a, c: no labels; b: declined'
    >>> shortened({f"client-{number}": "declined" for number in range(7)})[-28:]
    'declined; and 2 more clients'
    """
    names: dict[str, list[str]] = {}
    for client, reason in list(reasons.items())[:_CLIENTS_SHOWN]:
        names.setdefault(reason, []).append(client)
    shown = "; ".join(f"{', '.join(clients)}: {reason}" for reason, clients in names.items())
    more = len(reasons) - _CLIENTS_SHOWN
    return shown + (f"; and {plural(more, 'more client')}" if more > 0 else "")


def _key_of(message: str) -> list[str]:
    """Return the key of the spec with which an error begins, or nothing.

    >>> _key_of("model.trainable names layer4.*, which matches no parameter"), _key_of("no such file")
    (['model', 'trainable'], [])
    """
    parts = message.partition(" ")[0].split(".")
    return parts if parts[0] in RunSpec.model_fields else []


def _reason(row: Registration, spec: RunSpec, method_version: int) -> str | None:
    return _method(row, spec.method, method_version) or _shape(row, spec) or _encoder(row, spec)


def _unidentified(session: Session, names: Sequence[str]) -> dict[str, str]:
    """Return the clients that others could not identify in a secure round, with the reason."""
    found, known = {}, clients.identities(session, names)
    counts = Counter(identity for identity, _ in known.values())
    for name, (identity, announced) in known.items():
        if identity is None:
            found[name] = "its worker has not announced an identity key, which secure aggregation needs: update it"
        elif counts[identity] > 1:
            found[name] = "another client has announced the same identity key: revoke the one whose key it is not"
        elif announced != identity:
            found[name] = f"its identity key has changed: fedssl client confirm-identity {name} {announced}"
    return found


def _method(row: Registration, method: MethodConfig, version: int) -> str | None:
    name = method.name
    own = (row.methods or {}).get(name)
    if not row.methods or own == version:  # a worker that declares no method at all may have any
        return None
    if own is None and isinstance(method, ComposedConfig) and "labels" in method.traits:
        return f"its worker lacks {name}, or the labels that it trains on: give the worker labels, or update it"
    has = f"lacks {name}" if own is None else f"has version {own} of {name}"
    return f"its worker {has}, and the run needs version {version}: update the worker"


def _shape(row: Registration, spec: RunSpec) -> str | None:
    if row.serves is not None:
        return row.serves.refusal(spec.data)
    if row.channels is None or row.image_size is None:
        return None
    return fixed_shape_refusal(row.channels, row.image_size, spec.data)


def _encoder(row: Registration, spec: RunSpec) -> str | None:
    config = distillation_of(spec.method)
    if config is None or row.encoder is None or config.client_encoders == "declared":
        return None
    given = config.encoder_of(row.client_id, spec.model)
    if given.is_same_network(row.encoder):
        return None
    return (
        f"the run gives it the encoder {given}, and its worker has declared {row.encoder}: set "
        'method.reducer.client_encoders to "declared", or start the worker with that encoder'
    )
