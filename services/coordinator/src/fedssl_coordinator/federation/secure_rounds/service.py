"""Moves a secure round through the phases of secure aggregation.

The phases are part of an open round: `keys`, `shares`, `vectors`, `confirmations`, `reveals`. Each has one message per
client. A message is checked and stored under the lock of the round's row in `secure_rounds`; the end of a phase takes
the same lock, so that the list of its senders is frozen: later messages are refused. The aggregator ends a phase once
every client that still can has answered, or its time is over, and the last phase once there are enough shares to remove
all masks. `fedssl.secure_aggregation.SecureServer`, restored from the rows, decides what is valid.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any
from uuid import UUID

from pydantic import TypeAdapter
from sqlalchemy.orm import Session

from fedssl.protocol.secure_work import (
    SECURE_PROTOCOL,
    SecureConfirmation,
    SecureKeys,
    SecureMember,
    SecureMessage,
    SecurePhase,
    SecureReveals,
    SecureShares,
    SecureStatus,
    SecureVector,
)
from fedssl.protocol.views import SecureRoundView
from fedssl.secure_aggregation import (
    Conflict,
    InvalidMessage,
    NoSum,
    PhaseClosed,
    RoundContext,
    SecureServer,
    wire,
)
from fedssl.secure_aggregation.server import Collected
from fedssl_coordinator.core import enqueue
from fedssl_coordinator.core.audit import record
from fedssl_coordinator.core.models import Assignment, Round, SecureRound
from fedssl_coordinator.core.models import SecureMember as MemberRow
from fedssl_coordinator.core.problems import AuditEvent, ProblemError
from fedssl_coordinator.federation.secure_rounds import repository
from fedssl_coordinator.federation.secure_rounds.repository import Messages, Present

_CONTEXT = TypeAdapter(RoundContext)
_PHASES: tuple[SecurePhase, ...] = ("keys", "shares", "vectors", "confirmations", "reveals")
_LISTED = _PHASES[:3]
"""The phases whose senders are a list: a client that sent nothing takes no part in the next phase."""


@dataclass(frozen=True, slots=True)
class Advanced:
    """The result of a check of a secure round. `is_over`: no message is awaited any more. `survivors`: whose vectors
    are to be summed; none if there is no sum, for the reason `why`. `left_out`: clients that the round continues
    without, and why."""

    left_out: Mapping[str, str]
    is_over: bool = False
    survivors: tuple[str, ...] = ()
    why: str = ""


def begin(session: Session, current: Round, context: RoundContext, seconds: float) -> None:
    """Begin the protocol of a round that was just opened. Each of the two first phases lasts at most `seconds`."""
    earlier_names = {"num_words64": context.num_words, "num_words32": 0}  # of earlier versions, during an upgrade
    facts = {"context": asdict(context) | earlier_names, "protocol": SECURE_PROTOCOL}
    clients = [member.client for member in context.cohort]
    repository.add(session, current, context.num_words, facts, clients, seconds)


def context_of(session: Session, run_id: UUID, number: int) -> RoundContext:
    """Return the context of a secure round."""
    return _context_of(repository.of_round(session, run_id, number))


def cohort(context: RoundContext) -> tuple[SecureMember, ...]:
    """Return the cohort of a secure round, with the identity keys."""
    return tuple(SecureMember(client=member.client, identity=member.identity) for member in context.cohort)


def status(session: Session, round_id: UUID, client_id: str, *, is_open: bool = True) -> SecureStatus:
    """Return the phase, and what the client needs in it. If the round is not open, no message is awaited any more."""
    row = repository.get(session, round_id)
    assert row is not None, "only of secure rounds"
    phase: SecurePhase = row.phase  # type: ignore[assignment]
    if not is_open or phase not in _PHASES or _is_foreign(row):
        has_no_sum = phase == "failed" or _is_foreign(row)
        return SecureStatus(phase="failed" if has_no_sum else "done", is_member=True, received=True)
    mine = repository.member(session, round_id, client_id)
    is_member = mine is not None and _takes_part(mine, phase)
    received = mine is not None and getattr(mine, phase) is not None
    needed: dict[str, Any] = {}
    if not is_member or received or phase == "keys":
        return SecureStatus(phase=phase, is_member=is_member, received=received)
    rows = repository.messages_for(session, round_id, client_id, with_shares=phase == "vectors")
    if phase == "shares":
        needed["roster"] = {each.client_id: each.keys for each in rows if each.keys is not None}
    elif phase == "vectors":
        needed["inbox"] = wire.inbox_to_wire(_restored(row, rows).inbox(client_id))
    elif phase == "confirmations":
        needed["survivors"] = _signatures(rows, "vectors")
    elif phase == "reveals":  # with the survivors, because a restarted client may not have confirmed them yet
        needed["survivors"] = _signatures(rows, "vectors")
        needed["confirmations"] = _signatures(rows, "confirmations")
    return SecureStatus(phase=phase, is_member=is_member, received=received, **needed)


def views(session: Session, round_ids: Sequence[UUID]) -> dict[UUID, SecureRoundView]:
    """Return who takes part in secure rounds and what was revealed, by round. Other rounds are left out."""
    return {row.round_id: _view(session, row) for row in repository.of_rounds(session, round_ids)}


def _view(session: Session, row: SecureRound) -> SecureRoundView:
    context, facts = _context_of(row), row.facts
    cohort = sorted(member.client for member in context.cohort)
    phase: SecurePhase = row.phase  # type: ignore[assignment]
    if phase in _PHASES:
        rows = repository.present(session, row.round_id)
        taking = [each.client_id for each in rows if _takes_part(each, phase)]
        awaited = [each.client_id for each in rows if _is_awaited(each, phase)]
        survivors = [each.client_id for each in rows if each.vectors]
        is_revealing = any(each.reveals for each in rows)
        own_masks = survivors if is_revealing else []
        mask_keys = [each.client_id for each in rows if each.shares and not each.vectors] if is_revealing else []
    else:
        taking, awaited = facts["survivors"], []
        own_masks, mask_keys = facts["own_masks"], facts["mask_keys"]
    return SecureRoundView(
        phase=phase,
        cohort=cohort,
        awaited=awaited,
        lost=sorted(set(cohort).difference(taking)),
        min_survivors=context.thresholds.min_survivors,
        threshold=context.thresholds.threshold,
        roster=facts.get("roster"),
        own_masks=own_masks,
        mask_keys=mask_keys,
    )


def _signatures(rows: Sequence[Messages], phase: str) -> dict[str, str]:
    found = {each.client_id: getattr(each, phase) for each in rows}
    return {client: message["signature"] for client, message in found.items() if message is not None}


def receive(session: Session, current: Round, assignment: Assignment, message: SecureMessage) -> None:
    """Store a client's message. The same message again changes nothing. Raises ProblemError.

    The caller has checked that the assignment is the client's, leased, and of an open secure round.
    """
    client_id, phase = assignment.client_id, message.phase
    row = repository.locked(session, current.id)
    own = repository.member(session, current.id, client_id)
    stored = None if own is None else getattr(own, phase)
    if stored is not None and stored == message.model_dump(mode="json"):
        return
    rows = repository.messages_for(session, current.id, client_id, with_shares=phase == "reveals")
    num_keys = sum(each.keys is not None for each in rows)
    try:
        if phase == "keys" and stored is None and num_keys == current.num_wanted:
            raise PhaseClosed(f"the round takes the first {num_keys} clients, and has them: claim new work")
        _add(_restored(row, rows), client_id, message)
    except (Conflict, PhaseClosed, InvalidMessage) as error:
        slug = {Conflict: "conflict", PhaseClosed: "round-closed", InvalidMessage: "invalid-request"}[type(error)]
        about = AuditEvent("secure_message.refused", str(error), current.run_id, current.number, client_id)
        raise ProblemError(slug, str(error), audit_event=about) from None
    repository.set_message(session, current.id, client_id, phase, message.model_dump(mode="json"))
    if _may_advance(session, row) or (phase == "keys" and num_keys + 1 == current.num_wanted):
        enqueue.advance(session, current.run_id)


def _may_advance(session: Session, row: SecureRound) -> bool:
    """Return whether the aggregator may have something to do after a message that was just stored."""
    rows = repository.present(session, row.round_id)
    missing = {each.client_id for each in rows if _is_awaited(each, row.phase)}
    if not missing.intersection(repository.can_answer(session, row.round_id)):
        return True
    return row.phase == "reveals" and _may_suffice(_context_of(row), rows, len(missing))


def _may_suffice(context: RoundContext, rows: Sequence[Present], num_missing: int) -> bool:
    """Return whether the aggregator should check if the revealed shares suffice.

    Each client holds shares of its neighbours and of itself, and each survivor's secret needs as many as the threshold.
    On a complete graph they suffice at once. Otherwise each check reads the whole cohort, so there is one whenever the
    number of missing clients has halved, and one at the end of the phase.
    """
    limits, num_survivors = context.thresholds, sum(each.vectors is not None for each in rows)
    num_neighbours = min(limits.degree, sum(each.keys is not None for each in rows) - 1)
    num_revealed = num_survivors - num_missing
    if num_revealed * (num_neighbours + 1) < limits.threshold * num_survivors:
        return False
    is_complete = num_neighbours >= num_survivors - 1
    return is_complete or num_missing & (num_missing - 1) == 0


def _is_awaited(member: MemberRow | Present, phase: str) -> bool:
    """Return whether a member takes part in a phase and has not sent its message."""
    return getattr(member, phase) is None and _takes_part(member, phase)


def _takes_part(member: MemberRow | Present, phase: str) -> bool:
    before = [earlier for earlier in _LISTED if _PHASES.index(earlier) < _PHASES.index(phase)]
    return all(getattr(member, earlier) is not None for earlier in before)


def _add(server: SecureServer, client: str, message: SecureMessage) -> None:
    match message:
        case SecureKeys():
            server.add_keys(wire.keys_from_wire(client, message))
        case SecureShares():
            server.add_shares(wire.shares_from_wire(client, message))
        case SecureVector():
            server.record_vector(client, bytes.fromhex(message.update), bytes.fromhex(message.signature))
        case SecureConfirmation():
            server.add_confirmation(wire.confirmation_from_wire(client, message))
        case SecureReveals():
            server.add_reveals(wire.reveals_from_wire(client, message))


def advance(session: Session, current: Round, seconds: float, *, is_overdue: bool) -> Advanced:
    """End each phase that is due. The caller holds the run's lock.

    Args:
        seconds: how long a phase waits.
        is_overdue: the round's own deadline has passed.
    """
    row = repository.locked(session, current.id)
    can_answer = repository.can_answer(session, current.id)
    left_out: dict[str, str] = {}
    while True:
        before = row.phase
        if _is_foreign(row):
            why = "another version of fedssl, with another version of secure aggregation, has begun the round"
            return Advanced(left_out, is_over=True, why=why)
        if before not in _PHASES:
            return Advanced(left_out, is_over=True, why="the protocol of the round has ended")
        arrived = repository.present(session, current.id)
        missing = {each.client_id for each in arrived if _is_awaited(each, before)}
        is_full = before == "keys" and len(arrived) - len(missing) == current.num_wanted
        is_early = bool(missing & can_answer) and not is_full and not is_overdue
        is_waiting = is_early and not repository.is_overdue(session, current.id)
        if is_waiting and before != "reveals":
            return Advanced(left_out)
        server = _restored(row, repository.messages(session, current.id))
        if server.is_complete:
            return Advanced(left_out, is_over=True, survivors=tuple(sorted(server.collected.vectors)))
        if is_waiting:
            return Advanced(left_out)
        try:
            phase = _freeze(server)
        except NoSum as error:
            if is_early and before in ("keys", "shares"):
                return Advanced(left_out)  # the round's deadline decides
            return Advanced(left_out, is_over=True, why=str(error))
        if before in _LISTED:
            left_out |= dict.fromkeys(missing, f"the round continues without this client, whose {before} are missing")
        _record_phase(session, current, phase, server, missing)
        _begin_phase(session, current, row, phase, seconds)
        is_overdue = is_overdue and phase in _LISTED


def extend(session: Session, current: Round, seconds: float) -> None:
    """Give the phase of a round its whole time again, because no client could claim its work for a while."""
    row = repository.locked(session, current.id)
    _begin_phase(session, current, row, row.phase, seconds)


def _begin_phase(session: Session, current: Round, row: SecureRound, phase: str, seconds: float) -> None:
    deadline = current.deadline if phase == "vectors" else float(seconds)
    repository.begin_phase(session, row, phase, deadline)


def _freeze(server: SecureServer) -> SecurePhase:
    """End the phase and return the next. Raises NoSum."""
    match server.phase:
        case "keys":
            server.freeze_keys()
        case "shares":
            server.end_shares()
        case "vectors":
            server.freeze_vectors()
        case "confirmations":
            server.freeze_confirmations()
        case _:
            raise NoSum(_why_incomplete(server))
    return server.phase


def _why_incomplete(server: SecureServer) -> str:
    try:
        server.finish()
    except NoSum as error:
        return str(error)
    raise AssertionError("it was incomplete")


def _record_phase(
    session: Session, current: Round, phase: SecurePhase, server: SecureServer, missing: Collection[str]
) -> None:
    collected = server.collected
    lists: Mapping[str, Collection[str]] = {
        "shares": collected.keys,
        "vectors": collected.shares,
        "confirmations": collected.vectors,
        "reveals": collected.confirmations,
    }
    present = lists[phase]
    absent = f"; without {', '.join(sorted(missing))}" if missing else ""
    record(
        session,
        "secure_round.phase",
        f"round {current.number}: {phase}, with {len(present)} clients{absent}",
        run_id=current.run_id,
        round_number=current.number,
        data={"phase": phase, "clients": sorted(present), "missing": sorted(missing)},
    )
    enqueue.wake_watchers(session)


def vectors(session: Session, round_id: UUID) -> dict[str, str]:
    """Return the digests of the masked vectors that have arrived, by client. If the client is lost later, its vector
    is in the sum nevertheless."""
    return repository.vectors(session, round_id)


def restored(session: Session, round_id: UUID) -> tuple[RoundContext, SecureServer]:
    """Return a round's context, and its server as it was after the last message, without the sealed shares."""
    row = repository.get(session, round_id)
    assert row is not None, "only of secure rounds"
    return _context_of(row), _restored(row, repository.messages(session, round_id, with_revealed=True))


def close(session: Session, current: Round, *, has_sum: bool) -> None:
    """Delete all messages of a round that ends, and record whose secrets were revealed. Nothing if it has ended."""
    row = repository.get(session, current.id)
    if row is None or row.phase not in _PHASES:
        return
    row = repository.locked(session, current.id)
    server = _restored(row, repository.messages(session, current.id))
    collected, revealed = server.collected, set(server.num_revealed())
    facts = {
        **row.facts,
        "roster": None if server.roster_digest is None else server.roster_digest.hex(),
        "sharers": sorted(collected.shares),
        "survivors": sorted(collected.vectors),
        "own_masks": sorted(revealed.intersection(collected.vectors)),
        "mask_keys": sorted(revealed.difference(collected.vectors)),
    }
    phase: SecurePhase = "done" if has_sum else "failed"
    ended_in = row.phase
    enqueue.collect(session)  # the masked vectors
    repository.end(session, row, phase, facts)
    lost = f", mask keys of {', '.join(facts['mask_keys'])}" if facts["mask_keys"] else ""
    message = f"round {current.number}: {phase} after {ended_in}; own masks of {len(facts['own_masks'])} clients{lost}"
    data = {name: facts[name] for name in ("roster", "sharers", "survivors", "own_masks", "mask_keys")}
    record(session, "secure_round.ended", message, run_id=current.run_id, round_number=current.number, data=data)


def _is_foreign(row: SecureRound) -> bool:
    """Return whether the round was begun with another version of the protocol, whose messages cannot be read."""
    return bool(row.facts.get("protocol", 1) != SECURE_PROTOCOL)


def _context_of(row: SecureRound) -> RoundContext:
    facts = row.facts["context"]
    # Versions until 27 November 2026 stored only `num_words64`, and some of that day only `num_words`.
    return _CONTEXT.validate_python({"num_words": facts.get("num_words64"), **facts})


def _restored(row: SecureRound, rows: Sequence[Messages]) -> SecureServer:
    """Return the server of a round from its stored messages. That of another version has failed."""
    if _is_foreign(row):
        return SecureServer.restored(_context_of(row), "failed", Collected())

    def of(phase: str) -> Mapping[str, Any]:
        return {each.client_id: getattr(each, phase) for each in rows if getattr(each, phase) is not None}

    vectors = {client: SecureVector.model_validate(message) for client, message in of("vectors").items()}
    collected = Collected(
        keys={c: wire.keys_from_wire(c, SecureKeys.model_validate(m)) for c, m in of("keys").items()},
        shares={c: wire.shares_from_wire(c, SecureShares.model_validate(m)) for c, m in of("shares").items()},
        vectors={client: bytes.fromhex(vector.update) for client, vector in vectors.items()},
        signatures={client: bytes.fromhex(vector.signature) for client, vector in vectors.items()},
        confirmations={
            c: wire.confirmation_from_wire(c, SecureConfirmation.model_validate(m))
            for c, m in of("confirmations").items()
        },
        reveals={c: wire.reveals_from_wire(c, SecureReveals.model_validate(m)) for c, m in of("reveals").items()},
    )
    return SecureServer.restored(_context_of(row), row.phase, collected)  # type: ignore[arg-type]
