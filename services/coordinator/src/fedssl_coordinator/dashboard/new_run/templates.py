"""Ready-made settings from which a new run can start."""

from collections import Counter
from typing import Any

from sqlalchemy.orm import Session

from fedssl.experiments import papers
from fedssl_coordinator.core.models import Client, EvaluationDataset
from fedssl_coordinator.dashboard.run import member_queries
from fedssl_coordinator.storage.datasets import repository as datasets

TEMPLATES = {
    "quick": ("Quick look", "three rounds of a small network, to see whether everything works"),
    "ssd": ("Paper: SSD", "Table 1 of Fang et al. 2025: ResNet-18, 100 rounds of 5 epochs"),
}
"""Name and description of each template."""

_SHOWN = 200


def spec_of(session: Session, name: str) -> dict[str, Any]:
    """Return the settings of a template, for the images and the labelled data sets that there are."""
    if name == "ssd":
        spec = papers.cell("ssd-1", "SSD", "cifar10-k10").spec.model_dump(mode="json")
        return {key: value for key, value in spec.items() if key not in ("partition", "evaluation")}
    channels, image_size = _usual_shape(registered(session))
    judged = datasets.by_name(session, EvaluationDataset, _SHOWN, None)
    fitting = [each.name for each in judged if (each.channels, each.image_size) == (channels, image_size)]
    quick: dict[str, Any] = {
        "name": "quick look",
        "num_rounds": 3,
        "method": {"name": "fedalignuniform"},
        "model": {"encoder": {"name": "convnet", "widths": [16, 32, 64]}},
        "data": {"channels": channels, "image_size": image_size},
        "training": {"batch_size": 64},
    }
    if fitting:
        quick["evaluation"] = {"dataset": fitting[0], "every": 1, "max_train": 2000, "embedding_map": "pca"}
    return quick


def registered(session: Session) -> list[member_queries.Known]:
    """Return the first clients by name that have registered and are not revoked."""
    found = member_queries.clients(session, limit=_SHOWN)
    return [row for row in found if row.client.registered_at is not None and row.client.revoked_at is None]


def _usual_shape(rows: list[member_queries.Known]) -> tuple[int, int]:
    shapes = Counter(_shape(row.client) for row in rows)
    return shapes.most_common(1)[0][0] if shapes else (3, 32)


def _shape(client: Client) -> tuple[int, int]:
    return client.channels or 3, client.image_size or 32
