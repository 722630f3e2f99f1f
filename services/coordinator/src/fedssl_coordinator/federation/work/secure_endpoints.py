"""`/v1/work/secure`: only for workers."""

from fastapi import APIRouter

from fedssl.protocol.secure_work import SecureQuery, SecureStatus, SecureSubmission
from fedssl_coordinator.core.db import DB
from fedssl_coordinator.core.openapi import problems
from fedssl_coordinator.federation.work import secure_messages
from fedssl_coordinator.identity.authentication import WorkerId

router = APIRouter(prefix="/v1/work/secure", tags=["work"])


@router.post("/send", responses=problems(404, 409, 410))
def send_secure_message(request: SecureSubmission, client_id: WorkerId, session: DB) -> SecureStatus:
    """Send one message of secure aggregation. The same message again changes nothing, and another one is refused."""
    return secure_messages.send(session, client_id, request)


@router.post("/status", responses=problems(404, 409))
def secure_status(request: SecureQuery, client_id: WorkerId, session: DB) -> SecureStatus:
    """Show the phase of a secure round, and what the client needs to send its next message. It does not wait."""
    return secure_messages.status(session, client_id, request.assignment_id)
