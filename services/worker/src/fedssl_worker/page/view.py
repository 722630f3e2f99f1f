"""The contents of the owner's page, decided here and only laid out by its template."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2

from fedssl.artifacts.header import num_bytes
from fedssl.artifacts.permission import refusal
from fedssl.cli.output import size
from fedssl.protocol.plan import TensorSpec
from fedssl.protocol.work import WorkItem
from fedssl_worker.current_work import read_current_work
from fedssl_worker.disclosure.policy import NO_POLICY, Policy, PolicyError, read_policy
from fedssl_worker.page.ledger_index import OUTCOMES, LedgerIndex

_HERE = Path(__file__).parent
PAGE_ROWS = 100


@dataclass(frozen=True, slots=True)
class PolicyShown:
    """The policy's file, or why it cannot be used. `note` compares it with the ledger."""

    policy: Policy | None
    digest: str
    error: str
    note: str


@dataclass(frozen=True, slots=True)
class WorkShown:
    """The update that the current work would send, and whether the policy's file permits it."""

    item: WorkItem
    kinds: list[tuple[str, int, int]]
    num_bytes: int
    total_bytes: int
    refused: str | None


class View:
    """The page of one worker's state folder."""

    def __init__(self, state: Path, policy: Path | None, index: LedgerIndex) -> None:
        self._state = state
        self._policy = policy
        self._index = index

    def render(self, *, outcome: str, run: str, page: int) -> str:
        """Return the page. `page` counts from 1; one that does not exist shows the last."""
        overview = self._index.overview()
        policy = self._shown_policy(overview.policy)
        rows, count = self._index.rows(outcome, run, (page - 1) * PAGE_ROWS, PAGE_ROWS)
        num_pages = max(1, -(-count // PAGE_ROWS))
        if page > num_pages:
            page = num_pages
            rows, count = self._index.rows(outcome, run, (page - 1) * PAGE_ROWS, PAGE_ROWS)
        work = self._shown_work(policy)
        context: dict[str, Any] = {
            "state": self._state,
            "ledger": overview,
            "rows": rows,
            "count": count,
            "page": page,
            "num_pages": num_pages,
            "outcome": outcome,
            "outcomes": OUTCOMES,
            "run": run,
            "policy": policy,
            "work": work,
            "work_run": self._index.run(str(work.item.run_id)) if work else None,
        }
        return _templates().get_template("page.html").render(**context)

    def _shown_policy(self, recorded: str | None) -> PolicyShown:
        if self._policy is None:
            if recorded in (None, NO_POLICY):
                note = "No policy is in force: whatever a run's method declares may leave."
            else:
                note = f"The policy {str(recorded)[:8]} is in force. Start this page with --policy FILE to show it."
            return PolicyShown(None, "", "", note)
        try:
            policy, digest = read_policy(self._policy)
        except PolicyError as error:
            return PolicyShown(None, "", str(error), "")
        note = ""
        if recorded is not None and recorded != digest:
            note = "The ledger's newest entry is of another policy: the worker has not used this one yet."
        return PolicyShown(policy, digest, "", note)

    def _shown_work(self, shown: PolicyShown) -> WorkShown | None:
        item = read_current_work(self._state)
        if item is None:
            return None
        update = item.plan.update
        size_of_one = sum(map(_num_bytes, update))
        refused = None
        if shown.policy is not None:
            notice = shown.policy.notice(shown.digest)
            refused = refusal(notice, item.spec, item.plan, item.round_number)
        kinds = sorted({str(tensor.kind) for tensor in update})
        return WorkShown(
            item=item,
            kinds=[(kind, *_measured([each for each in update if each.kind == kind])) for kind in kinds],
            num_bytes=size_of_one,
            total_bytes=size_of_one * item.spec.num_rounds,
            refused=refused,
        )


def _measured(tensors: list[TensorSpec]) -> tuple[int, int]:
    return len(tensors), sum(map(_num_bytes, tensors))


def _num_bytes(tensor: TensorSpec) -> int:
    return num_bytes(tensor.dtype, tensor.shape)


def style() -> bytes:
    """Return the style sheet."""
    return (_HERE / "page.css").read_bytes()


@lru_cache
def _templates() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE), autoescape=True, undefined=jinja2.StrictUndefined,
        trim_blocks=True, lstrip_blocks=True,
    )  # fmt: skip
    environment.filters["size"] = size
    return environment
