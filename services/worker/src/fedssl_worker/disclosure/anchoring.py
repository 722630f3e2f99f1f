"""Sends anchors of the ledger to the coordinator, within requests that the worker makes anyway."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import structlog

from fedssl.protocol.ledger import AnchorReceipt, LedgerAnchor, receipt_message
from fedssl_worker.disclosure.ledger import Ledger, LedgerError
from fedssl_worker.disclosure.ledger.keys import is_signed_by

log = structlog.get_logger()

_LONGEST_WAIT_SECONDS = 10.0


@dataclass(slots=True)
class Exchange:
    """The anchor that one request carries, if any, and the receipt in its response."""

    anchor: LedgerAnchor | None
    receipt: AnchorReceipt | None = None


class Anchoring:
    """Adds anchors to requests. The thread that works and the thread that renews the lease share it.

    At most one request carries an anchor at a time, and an anchor without a response is sent again before a newer
    one. Otherwise one request could overtake another, which the coordinator would record as a ledger that went back.
    """

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._in_flight = threading.Lock()
        self._unanswered: LedgerAnchor | None = None
        self._answered_seq = 0

    @contextmanager
    def exchange(self, *, always: bool = False) -> Iterator[Exchange]:
        """Add an anchor to a request if one is due.

        `always`, for registrations and updates, adds one even if nothing is new, and waits for a request in flight.
        """
        if not self._in_flight.acquire(timeout=_LONGEST_WAIT_SECONDS if always else 0):
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
        """Return whether there are entries that no receipt covers and that no request with a response carried."""
        return not self._ledger.is_anchored and self._ledger.anchor.seq > self._answered_seq

    def _on_answer(self, anchor: LedgerAnchor, receipt: AnchorReceipt | None) -> None:
        if receipt is None:
            log.warning(
                "ledger.receipt_missing",
                entry=anchor.seq,
                reason="the coordinator may hold a later anchor of this ledger, or another one of this entry",
                todo="check whether this state folder was restored from a copy",
            )
        elif not _is_for(receipt, anchor):
            log.warning("ledger.receipt_invalid", entry=anchor.seq)
        elif receipt.sent is not None or not self._ledger.is_anchored:
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
                **({} if receipt.sent is None else receipt.sent.model_dump(mode="json")),
            )
        except LedgerError as error:  # the next update fails in the same way, so it does not leave
            log.error("ledger.receipt_not_stored", reason=str(error))


def _is_for(receipt: AnchorReceipt, anchor: LedgerAnchor) -> bool:
    if (receipt.seq, receipt.head) != (anchor.seq, anchor.head):
        return False
    message = receipt_message(receipt.client_id, anchor, receipt.at, receipt.sent)
    return is_signed_by(receipt.coordinator, receipt.signature, message)
