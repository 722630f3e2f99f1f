"""Dry runs: the numbers of a run that are known before it starts. Nothing is trained or submitted."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedssl.artifacts.header import file_bytes, frozen_bytes, num_bytes
from fedssl.cli.output import Format, duration, note, show_json, show_pairs, show_table, size
from fedssl.packages import is_installed
from fedssl.protocol.runs import RunSpec
from fedssl.protocol.views import ClientView

if TYPE_CHECKING:
    from fedssl.client import Client
    from fedssl.protocol.plan import ArtifactPlan
    from fedssl.protocol.views import EstimateView

DryRunOption = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Start nothing. Show what would happen: rounds, clients that would take part, bytes per client and round.",
    ),
]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes per client and round: of the artifact that it receives and of the one that it sends. `once`: of the frozen
    tensors, which it receives before its first round."""

    down: int
    up: int
    once: int = 0


@dataclass(frozen=True, slots=True)
class Participant:
    """A client of a run. `reason`: why it would not take part, or empty."""

    name: str
    num_images: int | None = None
    reason: str = ""


def traffic_of(spec: RunSpec) -> Traffic | None:
    """Return the bytes of a run's artifacts, or None if torch, which builds the networks, is not installed here."""
    plan = plan_of(spec)
    if plan is None:
        return None
    return Traffic(file_bytes(plan.broadcast), _masked_bytes(spec) or file_bytes(plan.update), frozen_bytes(plan))


def _masked_bytes(spec: RunSpec) -> int | None:
    """Return the size of a masked vector, or None without secure aggregation."""
    if spec.secure_aggregation is None:
        return None
    from fedssl.engine.secure_sums import num_vector_bytes
    from fedssl.methods import METHODS
    from fedssl.methods.api import Context

    return num_vector_bytes(METHODS[spec.method.name], Context(spec=spec, round_number=1))


def plan_of(spec: RunSpec) -> "ArtifactPlan | None":
    """Return what the run's method would exchange, or None without torch. Raises SpecError if the run cannot start."""
    if not is_installed("torch"):
        return None
    from fedssl.engine.aggregation import starting_plan
    from fedssl.methods import METHODS

    return starting_plan(METHODS[spec.method.name].bind(spec))


def frozen_bytes_of(spec: RunSpec) -> int | None:
    """Return the bytes of the encoder's frozen tensors, which each client receives once; None without torch."""
    plan = plan_of(spec)
    return None if plan is None else sum(num_bytes(tensor.dtype, tensor.shape) for tensor in plan.frozen)


def estimate_of(client: "Client", spec: RunSpec, project: str | None) -> "EstimateView | None":
    """Return the coordinator's estimate, or None if the coordinator is too old to make one.

    Raises NotFound if there is no such project, and InvalidRequest if no run can have the spec.
    """
    from fedssl.client import NotFound

    try:
        return client.estimate(spec, project)
    except NotFound:
        if project is not None:  # which does not exist
            raise
        return None


def participants_of(
    client: "Client", spec: RunSpec, project: str | None, estimate: "EstimateView | None"
) -> list[Participant]:
    """Return the coordinator's clients that the spec selects, each with the reason if it would not take part.

    The estimate has the reasons that the coordinator knows. It may not have the plan yet, against which policies are
    checked.
    """
    plan, wanted = plan_of(spec), spec.cohort.clients
    known = {view.id: view for view in client.clients() if project in (None, view.project)}
    names = sorted(known) if wanted is None else sorted(wanted)
    left_out = {} if estimate is None else estimate.left_out
    return [
        Participant(name, reason=left_out[name])
        if name in left_out
        else _participant(name, known.get(name), spec, plan)
        for name in names
    ]


def with_times(document: dict[str, Any], estimate: "EstimateView | None") -> dict[str, Any]:
    """Return the document with the times that the coordinator estimates from earlier runs; null if there were none."""
    if estimate is None:
        return document
    return {
        **document,
        "seconds_per_round": estimate.seconds_per_round,
        "seconds_in_total": estimate.seconds_in_total,
    }


def document_of(spec: RunSpec, participants: list[Participant]) -> dict[str, Any]:
    """Return everything as one JSON document. What is not known is null."""
    traffic, cohort = traffic_of(spec), spec.cohort
    taking = [each for each in participants if not each.reason]
    asked = cohort.num_asked(len(taking)) if taking else 0
    rounds = range(spec.num_rounds + 1)
    config = spec.central_evaluation
    due = 0 if config is None else sum(config.is_due(n, spec.num_rounds) for n in rounds)
    return {
        "dry_run": True,
        "name": spec.name,
        "method": spec.method.name,
        "rounds": spec.num_rounds,
        "clients": [each.name for each in taking],
        "images": {each.name: each.num_images for each in taking},
        "left_out": {each.name: each.reason for each in participants if each.reason},
        "clients_missing": max(0, cohort.min_clients - len(taking)),
        "clients_per_round": asked,
        "bytes_down_per_client_and_round": None if traffic is None else traffic.down,
        "bytes_up_per_client_and_round": None if traffic is None else traffic.up,
        "bytes_in_total": None if traffic is None else _total(spec, traffic, asked, len(taking)),
        "evaluations": due,
        **(_frozen(spec) if spec.model.freezes else {}),
    }


def show_dry_run(document: Mapping[str, Any], output: Format) -> None:
    """Show what would happen."""
    if output is Format.JSON:
        show_json(dict(document))
        return
    missing = document["clients_missing"]
    pairs = {
        "run": f"{document['name']}: {document['method']}",
        "rounds": document["rounds"],
        "clients": f"{len(document['clients'])} would take part, {document['clients_per_round']} in each round",
        "each client receives": _per_round(document["bytes_down_per_client_and_round"]),
        "each client sends": _per_round(document["bytes_up_per_client_and_round"]),
        "in total": _size(document["bytes_in_total"]),
        **({"trained": _trained(document)} if "trainable" in document else {}),
        **_time(document),
        "evaluations": document["evaluations"],
    }
    show_pairs(pairs)
    rows = [(name, document["images"][name], "takes part") for name in document["clients"]]
    rows += [(name, None, reason) for name, reason in document["left_out"].items()]
    if rows:
        show_table(["client", "#images", ""], rows)
    if missing:
        note(f"the first round would wait for {missing} more client{'s' * (missing > 1)} (cohort.min_clients)")
    note("dry run: nothing was started")


def _participant(name: str, view: ClientView | None, spec: RunSpec, plan: "ArtifactPlan | None") -> Participant:
    from fedssl.artifacts.permission import refusal

    if view is None or view.registered_at is None:
        return Participant(name, reason="has not registered")
    if view.revoked_at is not None:
        return Participant(name, reason="its access was revoked")
    if view.policy is not None and plan is not None and (why := refusal(view.policy, spec, plan)) is not None:
        return Participant(name, reason=f"its data owner's policy: {why}")
    return Participant(name, view.num_images)


def _total(spec: RunSpec, traffic: Traffic, asked: int, num_clients: int) -> int:
    """Return an upper bound of the bytes of the whole run. Each client receives the frozen tensors once."""
    num_assignments = spec.num_rounds * asked
    return num_assignments * (traffic.down + traffic.up) + min(num_clients, num_assignments) * traffic.once


def _per_round(num_bytes: int | None) -> str:
    return _size(num_bytes) if num_bytes is None else f"{size(num_bytes)} per round"


def _frozen(spec: RunSpec) -> dict[str, Any]:
    lora = spec.model.lora
    adapted = {} if lora is None else {"lora": {"rank": lora.rank, "layers": list(lora.layers)}}
    return {"trainable": list(spec.model.trainable or ()), **adapted, "frozen_bytes": frozen_bytes_of(spec)}


def _trained(document: Mapping[str, Any]) -> str:
    frozen, parts = _size(document["frozen_bytes"]), list(document["trainable"])
    if (lora := document.get("lora")) is not None:
        parts.append(f"adapters of rank {lora['rank']} of {', '.join(lora['layers'])}")
    return f"of the encoder {', '.join(parts)}; the frozen rest, {frozen}, is received once and never sent"


def _time(document: Mapping[str, Any]) -> dict[str, str]:
    if "seconds_in_total" not in document:  # a simulation has no earlier runs to estimate from
        return {}
    if document["seconds_in_total"] is None:
        return {"time": "unknown: no client has trained such a model there yet"}
    per_round = duration(document["seconds_per_round"])
    return {"time": f"about {duration(document['seconds_in_total'])}, {per_round} per round"}


def _size(num_bytes: int | None) -> str:
    return "unknown: that needs torch (pip install 'fedssl[train]')" if num_bytes is None else size(num_bytes)
