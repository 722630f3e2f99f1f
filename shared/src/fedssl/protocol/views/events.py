"""The audit log and the metrics of a run, as the API shows them."""

from datetime import datetime
from typing import Any
from uuid import UUID

from fedssl.protocol.base import ClientId
from fedssl.protocol.views.base import View


class EventView(View):
    """One line of the audit log."""

    id: int
    at: datetime
    kind: str
    run_id: UUID | None
    round_number: int | None
    client_id: ClientId | None
    message: str
    data: dict[str, Any] = {}


class MetricView(View):
    """One metric. `client_id` is null if it belongs to the whole round."""

    round_number: int
    client_id: ClientId | None
    name: str
    value: float
