"""What left this machine: an append-only, hash-chained and signed ledger on the worker's own disk.

    ledger/key                              the owner's Ed25519 key, mode 0600, made at the first start
           000000000001.jsonl               a segment, named by its first entry; one entry a line
           000000001001.jsonl               the next one; its chain continues the first's
           checkpoint-000000001000.json     signed at the rotation: earlier segments may be archived or deleted

An entry is `{"body":{...},"hash":h,"prev":p,"sig":s}` with `h = SHA256("fedssl/ledger/1\\n" + p + canonical(body))` and
`s` an Ed25519 signature of h. Whoever changes, removes or inserts an entry breaks the chain; that its end was cut off
is seen only by comparing it with an anchor that the coordinator keeps.
"""

from fedssl_worker.disclosure.ledger.chain import Point
from fedssl_worker.disclosure.ledger.entries import LedgerEntry, LedgerError
from fedssl_worker.disclosure.ledger.journal import Ledger

__all__ = ["Ledger", "LedgerEntry", "LedgerError", "Point"]
