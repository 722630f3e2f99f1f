"""The ledger: an append-only, hash-chained and signed record, on the worker's disk, of what left this machine.

    ledger/key                              the owner's Ed25519 key, mode 0600, created at the first start
           000000000001.jsonl               a segment, named after its first entry; one entry per line
           000000001001.jsonl               the next segment, which continues the chain
           checkpoint-000000001000.json     signed at the rotation: earlier segments may be archived or deleted
           head                             number and hash of the newest entry, written after each entry

An entry is `{"body":{...},"hash":h,"prev":p,"sig":s}` with `h = SHA256("fedssl/ledger/1\\n" + p + canonical(body))` and
`s` an Ed25519 signature of h. Changing, removing or inserting an entry breaks the chain. `head` shows whether the
chain's end was cut off; if `head` was changed too, only a comparison with an anchor that the coordinator keeps does.
"""

from fedssl_worker.disclosure.ledger.chain import Point
from fedssl_worker.disclosure.ledger.entries import CROSS_EVALUATION, EVALUATION, SITE_HEAD, LedgerEntry, LedgerError
from fedssl_worker.disclosure.ledger.journal import Ledger

__all__ = ["CROSS_EVALUATION", "EVALUATION", "SITE_HEAD", "Ledger", "LedgerEntry", "LedgerError", "Point"]
