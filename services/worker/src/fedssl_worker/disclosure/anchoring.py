"""Anchors on their way to the coordinator: carried by requests that are made anyway, one at a time."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, receipt_message
from fedssl_worker.disclosure.ledger import Ledger, LedgerError
from fedssl_worker.disclosure.ledger.keys import is_signed_by

log = structlog.get_logger()


@dataclass(slots=True)
class Exchange:
    """One request's part: the anchor that it carries, if any, and the receipt that its answer brought."""

    anchor: LedgerAnchor | None
    receipt: AnchorReceipt | None = None


class Anchoring:
    """Shared by the thread that works and the one that holds the lease.

    At most one request carries an anchor at a time, and one that was not answered is carried again before a newer one:
    otherwise two requests that overtake each other would look to the coordinator like a ledger that went back.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight = threading.Lock()
        self._unanswered: LedgerAnchor | None = None
        self._answered_seq = 0

    @contextmanager
    def exchange(self, *, always: bool = False) -> Iterator[Exchange]:
        """Take part in a request; with `always` (at registration) also where nothing is new."""
        if not self._in_flight.acquire(blocking=False):
            yield Exchange(None)
            return
        try:
            if self._unanswered is None and (always or self._is_due()):
                self._unanswered = self._ledger.anchor
            exchange = Exchange(self._unanswered)
            yield exchange
            if exchange.anchor is not None:
                self._unanswered = None
                self._answered_seq = exchange.anchor.seq
                self._on_answer(exchange.anchor, exchange.receipt)
        finally:
            self._in_flight.release()

    def _is_due(self) -> bool:
        """Whether there are entries that no receipt covers, and that were not contradicted just before."""
        return not self._ledger.is_anchored and self._ledger.anchor.seq > self._answered_seq

    def _on_answer(self, anchor: LedgerAnchor, receipt: AnchorReceipt | None) -> None:
        """The coordinator has answered."""
        if receipt is None:
            log.warning(
                "the coordinator gave no receipt for the ledger: it may know a later or another entry of it. "
                "Was this state folder restored from a copy?",
                entry=anchor.seq,
            )
        elif not _is_for(receipt, anchor):
            log.warning("the coordinator's receipt for the ledger is not genuine", entry=anchor.seq)
        elif not self._ledger.is_anchored:
            self._store_receipt(receipt)

    def _store_receipt(self, receipt: AnchorReceipt) -> None:
        try:
            self._ledger.append(
                "receipt",
                client=receipt.client_id,
                anchored_seq=receipt.seq,
                head=receipt.head,
                at=receipt.at,
                coordinator=receipt.coordinator,
                signature=receipt.signature,
            )
        except LedgerError as error:  # what leaves next finds the same, and stays
            log.error("receipt not kept", reason=str(error))


def _is_for(receipt: AnchorReceipt, anchor: LedgerAnchor) -> bool:
    if (receipt.seq, receipt.head) != (anchor.seq, anchor.head):
        return False
    return is_signed_by(receipt.coordinator, receipt.signature, receipt_message(receipt.client_id, anchor, receipt.at))
