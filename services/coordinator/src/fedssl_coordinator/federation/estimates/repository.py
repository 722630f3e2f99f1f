"""Reads how fast clients have worked in earlier runs."""

from typing import NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session

from fedssl.protocol.runs import RunSpec
from fedssl.protocol.states import AssignmentState
from fedssl_coordinator.core.models import Assignment, Client, Run

_RUNS = 20


class Speed(NamedTuple):
    """The median time that a client needed per image and local epoch, transfers included, over `updates` updates."""

    client_id: str
    seconds_per_image: float
    updates: int


def speeds(session: Session, spec: RunSpec) -> list[Speed]:
    """Return the speeds of clients in the newest runs with the same method, encoder and image size."""
    same = {
        Run.method: spec.method.name,
        Run.spec["model"]["encoder"]: spec.model.encoder.model_dump(mode="json"),
        Run.spec["data"]["image_size"].as_integer(): spec.data.image_size,
        Run.spec["training"]["precision"].as_string(): spec.training.precision,
    }
    alike = select(Run.id).where(*(column == value for column, value in same.items()), Run.rounds_closed > 0)
    newest = alike.order_by(Run.created_at.desc()).limit(_RUNS)
    local_epochs = func.greatest(Run.spec["training"]["local_epochs"].as_integer(), 1)
    epochs = local_epochs * func.coalesce(Run.spec["training"]["epoch_fraction"].as_float(), 1.0)
    took = func.extract("epoch", Assignment.closed_at - Assignment.leased_at)
    statement = (
        select(
            Assignment.client_id,
            func.percentile_cont(0.5).within_group(took / (Client.num_images * epochs)),
            func.count(),
        )
        .join(Run, Run.id == Assignment.run_id)
        .join(Client, Client.id == Assignment.client_id)
        .where(Assignment.run_id.in_(newest), Assignment.state == AssignmentState.ACCEPTED, Client.num_images > 0)
        .group_by(Assignment.client_id)
    )
    return [Speed(*row) for row in session.execute(statement)]


def num_images(session: Session, names: list[str]) -> dict[str, int]:
    """Return the number of images of each of these clients."""
    rows = session.execute(select(Client.id, Client.num_images).where(Client.id.in_(names)))
    return {name: count or 0 for name, count in rows}
