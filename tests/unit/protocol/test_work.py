"""The limits of the messages between a worker and the coordinator."""

from uuid import uuid4

from fedssl.protocol.ledger import LedgerAnchor
from fedssl.protocol.work import DELIVERY_CHARACTERS, Submit


def test_the_longest_submission_fits_into_the_header_of_a_delivery() -> None:
    submission = Submit(
        assignment_id=uuid4(),
        update="0" * 64,
        num_examples=10**12,
        metrics={f"{number:064d}": -1.2345678901234567e-300 for number in range(64)},
        anchor=LedgerAnchor(key="0" * 64, seq=2**53 - 1, head="0" * 64),
    )
    assert len(submission.model_dump_json()) < 7000 < DELIVERY_CHARACTERS
