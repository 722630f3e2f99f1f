"""A federation that executes a script of requests, and the comparable part of its answers, rows and events."""

import json
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, LiteralString
from uuid import UUID

import httpx

from fedssl.artifacts.tensors import serialised
from fedssl.protocol.methods import METHOD_CONFIGS
from fedssl.protocol.work import DELIVERY_HEADER, WorkItem
from support.coordinator import Coordinator
from support.federation import tensors_for, tiny_spec
from support.tables import Tables
from support.uploads import digest

Request = tuple[str, str, Any]
"""The request or other event, the client that sends it or is concerned, and details."""

STILL = {"lease_seconds": 86_400, "deadline_seconds": 86_400}
UNKNOWN = "00000000-0000-4000-8000-000000000000"
ROWS: dict[str, LiteralString] = {
    "clients": "SELECT to_jsonb(t) FROM clients t ORDER BY id",
    "runs": "SELECT to_jsonb(t) - 'spec' - 'plan' FROM runs t",
    "rounds": "SELECT to_jsonb(t) FROM rounds t ORDER BY number",
    "assignments": "SELECT to_jsonb(t) FROM assignments t ORDER BY round_number, client_id, attempt",
    "uploads": "SELECT to_jsonb(u) FROM uploads u JOIN assignments a ON a.id = assignment_id "
    "ORDER BY round_number, client_id, attempt, digest",
    "artifacts": "SELECT to_jsonb(t) FROM artifacts t ORDER BY digest",
    "metrics": "SELECT to_jsonb(t) - 'id' FROM metrics t ORDER BY round_number, client_id NULLS FIRST, name",
}
EVENTS: LiteralString = "SELECT to_jsonb(t) - 'id' FROM events t ORDER BY id"
UNIT_SECONDS = 600  # of the comparison: leases and deadlines are a day, so the length of a test does not matter


class ScriptedFederation:
    """Two clients and one run, in a coordinator that has nothing else."""

    def __init__(self, coordinator: Coordinator, tables: Tables) -> None:
        self._coordinator = coordinator
        self._tables = tables
        coordinator.empty(tables)
        self._tokens = {name: coordinator.client.create_token("worker", name) for name in "ab"}
        self._https = {name: coordinator.http(token.secret) for name, token in self._tokens.items()}
        self._items: dict[str, WorkItem] = {}
        for name, http in self._https.items():
            methods = {method: config.info.version for method, config in METHOD_CONFIGS.items()}
            about = {"worker_version": "1", "methods": methods, "device": "cpu", "num_images": 1000}
            shape = {"channels": 1, "image_size": 8, "serves": {}}
            assert http.post("/v1/work/register", json=about | shape).is_success, name
        cohort = {"clients": ["a", "b"], "min_clients": 2, "max_attempts": 3, **STILL}
        self.run_id: UUID = coordinator.client.create_run(tiny_spec(cohort=cohort)).id
        coordinator.advance(self.run_id)

    def close(self) -> None:
        for http in self._https.values():
            http.close()

    def send(self, request: Request) -> list[Any]:
        """Return the comparable part of the answer to a request: its status and its content."""
        what, name, how = request
        answer = getattr(self, f"_{what}")(name, how)
        if not isinstance(answer, httpx.Response):
            return [what, answer]
        if what == "claim" and answer.status_code == 200:
            self._items[name] = WorkItem.model_validate(answer.json())
        is_json = answer.headers.get("content-type", "").endswith("json")
        return [what, answer.status_code, answer.json() if is_json else digest(answer.content)]

    def _claim(self, name: str, _: object) -> httpx.Response:
        return self._https[name].post("/v1/work/claim", json={"wait_seconds": 0})

    def _heartbeat(self, name: str, how: dict[str, Any]) -> httpx.Response:
        about = {key: value for key, value in how.items() if key != "of"}
        return self._https[name].post(
            "/v1/work/heartbeat", json={"assignment_id": self._assignment(name, how), **about}
        )

    def _deliver(self, name: str, how: dict[str, Any]) -> httpx.Response:
        content, about = self._submission(name, how)
        headers = {DELIVERY_HEADER: json.dumps(about)}
        return self._https[name].post("/v1/work/deliver", content=content, headers=headers)

    def _upload(self, name: str, how: dict[str, Any]) -> httpx.Response:
        content, about = self._submission(name, how)
        params = {"assignment": about["assignment_id"]}
        return self._https[name].put(f"/v1/artifacts/{about['update']}", params=params, content=content)

    def _submit(self, name: str, how: dict[str, Any]) -> httpx.Response:
        return self._https[name].post("/v1/work/submit", json=self._submission(name, how)[1])

    def _fetch(self, name: str, what: str) -> httpx.Response:
        item = self._items.get(name)
        wanted = item.broadcast if item and what == "broadcast" else digest(self._content(name, 1.0))
        return self._https[name].get(f"/v1/artifacts/{wanted}")

    def _decline(self, name: str, how: dict[str, Any]) -> httpx.Response:
        about = {"assignment_id": self._assignment(name, how), "reason": "no room"}
        return self._https[name].post("/v1/work/decline", json=about)

    def _advance(self, *_: object) -> None:
        self._tables.execute("UPDATE assignments SET offered_at = now() WHERE state = 'offered'")
        self._coordinator.advance(self.run_id)

    def _lapse(self, name: str, how: object) -> None:
        self._let_lapse(name, how)
        self._coordinator.advance(self.run_id)

    def _let_lapse(self, name: str, _: object) -> None:
        self._tables.execute(
            "UPDATE assignments SET lease_expires_at = now() WHERE client_id = %s AND state = 'leased'", name
        )

    def _pass_deadline(self, *how: Any) -> None:
        self._let_deadline_pass(*how)
        self._coordinator.advance(self.run_id)

    def _let_deadline_pass(self, *_: object) -> None:
        self._tables.execute("UPDATE rounds SET deadline = now() WHERE state = 'open'")

    def _pause(self, *_: object) -> httpx.Response:
        return self._steer("pause")

    def _resume(self, *_: object) -> httpx.Response:
        return self._steer("resume")

    def _stop(self, *_: object) -> httpx.Response:
        return self._steer("stop")

    def _steer(self, verb: str) -> httpx.Response:
        with self._coordinator.http() as http:
            return http.post(f"/v1/runs/{self.run_id}/{verb}")

    def _revoke(self, name: str, _: object) -> None:
        self._coordinator.client.revoke_token(self._tokens[name].id)

    def _exclude(self, name: str, _: object) -> None:
        self._coordinator.client.revoke_client(name)

    def _assignment(self, name: str, how: dict[str, Any]) -> str:
        item = self._items.get(how.get("of", name))
        return UNKNOWN if item is None else str(item.assignment_id)

    def _content(self, name: str, value: float) -> bytes:
        item = self._items.get(name)
        return b"" if item is None else serialised(tensors_for(item.plan.update, value))

    def _submission(self, name: str, how: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        content = self._content(name, how["value"])
        about = {"assignment_id": self._assignment(name, how), "update": how.get("announced", digest(content))}
        numbers = {"num_examples": how.get("num_examples", 10), "metrics": how.get("metrics", {"loss": 1.0})}
        return content, about | numbers

    def age(self) -> None:
        """Make the time that the next request writes as the present differ from the earlier ones."""
        self._tables.execute("UPDATE clients SET last_seen_at = now() - interval '1 day'")
        self._tables.execute("UPDATE artifacts SET touched_at = now() - interval '1 day'")

    def rows(self) -> dict[str, list[Any]]:
        return {name: [row for (row,) in self._tables.query(statement)] for name, statement in ROWS.items()}

    def events(self) -> list[Any]:
        return [event for (event,) in self._tables.query(EVENTS)]


def comparable(value: object) -> Any:
    """Return a JSON value with its UUIDs numbered in the order of their appearance, and its times relative to now."""
    numbers: dict[str, int] = {}
    now = datetime.now(UTC)

    def number(match: re.Match[str]) -> str:
        return f"id {numbers.setdefault(match[0], len(numbers))}"

    def relative(match: re.Match[str]) -> str:
        seconds = (datetime.fromisoformat(match[1]) - now).total_seconds()
        return f'"{round(seconds / UNIT_SECONDS)} units from now"'

    text = json.dumps(value, sort_keys=True)
    text = re.sub(r'"(\d{4}-\d\d-\d\dT[0-9:.]+(?:Z|[+-]\d\d:\d\d))"', relative, text)
    return json.loads(re.sub(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", number, text))


def differences(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """Yield where two JSON values differ, for the message of a failed assertion."""
    if isinstance(before, dict) and isinstance(after, dict) and before.keys() == after.keys():
        for key in before:
            yield from differences(before[key], after[key], f"{path}.{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{path}[{number}]")
    elif before != after:
        yield f"{path}: {before!r} != {after!r}"
