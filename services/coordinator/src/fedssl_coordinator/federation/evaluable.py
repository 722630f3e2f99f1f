"""Which weights of a run can be evaluated, by the coordinator or at the sites."""

from sqlalchemy.orm import Session

from fedssl_coordinator.core.models import Run
from fedssl_coordinator.core.problems import ProblemError
from fedssl_coordinator.core.settings import settings
from fedssl_coordinator.storage.artifacts import repository as artifacts

_ENCODER = "encoder."


def require_closed(run: Run, asked: int | None) -> int:
    """Return the round that a request is about: the one that it names, or the newest.

    Raises ProblemError if it is not closed yet, or if the run has no encoder to evaluate.
    """
    number = run.rounds_closed if asked is None else asked
    if run.broadcast is None or number > run.rounds_closed:
        detail = f"round {number} of run {run.id} is not closed yet: wait for it, or take an earlier one"
        raise ProblemError("conflict", detail)
    if (why := why_impossible(run)) is not None:
        raise ProblemError("conflict", why)
    return number


def require_kept(session: Session, model: str, number: int) -> None:
    """Raise ProblemError if a round's weights were removed. Otherwise they stay until the transaction ends."""
    if artifacts.hold(session, model):
        return
    detail = (
        f"the weights of round {number} were removed: it was closed more than FEDSSL_KEEP_BROADCASTS_SECONDS "
        f"({settings().keep_broadcasts_seconds:g}) ago; name a newer round, or name none to evaluate the newest"
    )
    raise ProblemError("conflict", detail)


def why_impossible(run: Run) -> str | None:
    """Return why encoders of this run cannot be evaluated, or None if they can."""
    assert run.plan is not None, "a prepared run has a plan"
    if not run.plan["update"]:
        return (
            f"{run.method} sends nothing to the coordinator, so its encoder stays as it was before training: evaluate "
            "the clients' own encoders at the clients"
        )
    received = [*run.plan["broadcast"], *run.plan.get("frozen", ())]
    if not any(tensor["name"].startswith(_ENCODER) for tensor in received):
        return f"the broadcasts of {run.method} hold no encoder: there is nothing to evaluate"
    return None
