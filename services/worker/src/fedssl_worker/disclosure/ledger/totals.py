"""Counts what has left in all runs together, from the ledger's entries, and applies the policy's limits to it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fedssl.protocol.work import WorkItem
from fedssl_worker.disclosure.ledger.entries import ANSWERS, LedgerEntry
from fedssl_worker.disclosure.policy import NotPermitted, TotalLimits


@dataclass(slots=True)
class Totals:
    """The rounds and the bytes of all updates that have left, or may have: those with an entry `intent`.

    An update that was sent again after an interruption, or after a restart, counts once. Another update of the same
    round counts as another round: a coordinator could have one round trained again and again, from other weights or
    with another spec. The first entry of a segment has the totals before it, because earlier segments may be archived
    or deleted. An answer about an evaluation is not an update, and is counted separately: the same answer to the same
    question counts once. `knows_evaluations` is False if the totals are from a version that did not count them.
    """

    is_known: bool = False
    knows_evaluations: bool = False
    num_bytes: int = 0
    _evaluations_before: int = 0
    _answers: set[tuple[str, str]] = field(default_factory=set)
    _rounds_before: int = 0
    _rounds: set[tuple[str, int]] = field(default_factory=set)
    _updates: set[tuple[str, int, str]] = field(default_factory=set)
    _revealed: dict[tuple[str, int], tuple[list[str], list[str]]] = field(default_factory=dict)

    @property
    def num_rounds(self) -> int:
        """The number of rounds whose updates have left; a round counts once for each different update."""
        return self._rounds_before + len(self._updates)

    @property
    def num_evaluations(self) -> int:
        """The number of evaluations whose counts have left."""
        return self._evaluations_before + len(self._answers)

    def count(self, entry: LedgerEntry) -> None:
        """Count an entry. Entries must be counted in order, beginning with the first that still exists."""
        body = entry.body
        if entry.kind == "opened":
            self.is_known = self.knows_evaluations = True
        elif entry.kind == "rotated" and "rounds_total" in body:  # more than were counted, if segments are missing
            self.is_known = True
            self._rounds_before += max(0, int(body["rounds_total"]) - self.num_rounds)
            self.num_bytes = max(self.num_bytes, int(body["bytes_total"]))
            if "evaluations_total" in body:
                self.knows_evaluations = True
                self._evaluations_before += max(0, int(body["evaluations_total"]) - self.num_evaluations)
        elif entry.kind == "intent" and "run" in body and not _is_answer(body):
            at = (str(body["run"]), int(body["round"]))
            self._rounds.add(at)
            if (update := (*at, str(body.get("digest")))) not in self._updates:
                self._updates.add(update)
                self.num_bytes += int(body.get("bytes", 0))
        elif entry.kind == "intent" and _is_answer(body):
            earlier = f"{body['run']}/{body['round']}/{body.get('head_of', '')}"  # entries of earlier versions
            self._answers.add((str(body.get("question", earlier)), str(body["digest"])))
        elif entry.kind == "revealed":
            self._revealed[str(body["run"]), int(body["round"])] = body["own_masks"], body["mask_keys"]

    def has_other_update(self, item: WorkItem, digest: str) -> bool:
        """Return whether an update of this round other than the one with this digest has left, or may have."""
        at = (str(item.run_id), item.round_number)
        return at in self._rounds and (*at, digest) not in self._updates

    def has_other_shares(self, item: WorkItem, own_masks: list[str], mask_keys: list[str]) -> bool:
        """Return whether shares about other clients were revealed in this round, or may have been."""
        revealed = own_masks, mask_keys
        return self._revealed.get((str(item.run_id), item.round_number), revealed) != revealed

    def require_within(self, limits: TotalLimits, item: WorkItem, num_bytes: int, digest: str | None) -> None:
        """Raise NotPermitted if this update would exceed a limit. An update that was counted may be sent again.

        Args:
            num_bytes: the size of the update.
            digest: the update's digest, or None if it is not trained yet.
        """
        policy, at = f"the data owner's policy ({limits.policy[:8]})", (str(item.run_id), item.round_number)
        if not self.is_known:
            raise NotPermitted(
                f"{policy} limits what leaves in all runs together, and earlier files of the ledger are missing: "
                "restore them, because it cannot be counted without them"
            )
        is_counted = at in self._rounds if digest is None else (*at, digest) in self._updates
        if limits.max_rounds is not None and not is_counted and self.num_rounds >= limits.max_rounds:
            raise NotPermitted(
                f"{policy} permits updates of {limits.max_rounds} rounds in all runs together (max_rounds_total), and "
                f"those of {self.num_rounds} have left: raise the limit to continue"
            )
        if limits.max_bytes is not None and not is_counted and self.num_bytes + num_bytes > limits.max_bytes:
            raise NotPermitted(
                f"{policy} permits {limits.max_bytes} bytes in all runs together (max_bytes_total): {self.num_bytes} "
                f"have left, and this update has {num_bytes}: raise the limit to continue"
            )

    def require_evaluation(self, policy_digest: str, most: int, question: str, digest: str | None = None) -> None:
        """Raise NotPermitted if `most` other answers have left. An answer that was counted may be sent again.

        Args:
            policy_digest: of the policy with this limit.
            question: what was asked, as the ledger's entry has it.
            digest: the answer's digest, or None if it is not computed yet.
        """
        policy = f"the data owner's policy ({policy_digest[:8]})"
        if not self.knows_evaluations:
            raise NotPermitted(
                f"{policy} limits the evaluations of all runs together, and earlier files of the ledger are missing: "
                "restore them, because they cannot be counted without these"
            )
        is_counted = (
            any(question == each for each, _ in self._answers)
            if digest is None
            else (question, digest) in self._answers
        )
        if not is_counted and self.num_evaluations >= most:
            raise NotPermitted(
                f"{policy} permits {most} evaluations in all runs together (max_evaluations_total), and "
                f"{self.num_evaluations} have left: raise the limit to continue"
            )


def _is_answer(body: Mapping[str, Any]) -> bool:
    kinds = body.get("artifact")
    return bool(kinds) and ANSWERS.issuperset(kinds or ())
