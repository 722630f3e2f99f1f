"""Sends a notification by e-mail, as plain text."""

import smtplib
from email.message import EmailMessage
from email.utils import format_datetime
from uuid import UUID

from fedssl.protocol.notifications import Notification
from fedssl_coordinator.core.settings import Settings
from fedssl_coordinator.notifications.webhooks import NotDelivered

_SECONDS = 10.0
_PORTS = {"starttls": 587, "tls": 465, "none": 25}


def send(address: str, delivery_id: UUID, notification: Notification, settings: Settings) -> None:
    """Pass a notification to the SMTP server. Raises NotDelivered if the server does not accept it."""
    if settings.smtp_host is None or settings.smtp_from is None:
        raise NotDelivered("there is no SMTP server: set FEDSSL_SMTP_HOST and FEDSSL_SMTP_FROM")
    message = _message(settings.smtp_from, address, delivery_id, notification)
    try:
        with _connect(settings.smtp_host, settings) as server:
            if settings.smtp_user is not None:
                server.login(settings.smtp_user, settings.smtp_secret())
            server.send_message(message, settings.smtp_from, [address])
    except (smtplib.SMTPException, OSError, ValueError) as error:
        raise NotDelivered(f"{type(error).__name__}: {error}") from None


def _connect(host: str, settings: Settings) -> smtplib.SMTP:
    port = settings.smtp_port or _PORTS[settings.smtp_security]
    if settings.smtp_security == "tls":
        return smtplib.SMTP_SSL(host, port, timeout=_SECONDS, context=settings.outgoing_tls())
    server = smtplib.SMTP(host, port, timeout=_SECONDS)
    if settings.smtp_security == "starttls":
        try:
            server.starttls(context=settings.outgoing_tls())
        except BaseException:
            server.close()
            raise
    return server


def _message(sender: str, address: str, delivery_id: UUID, notification: Notification) -> EmailMessage:
    """Return the message. Its Message-ID is that of the delivery, so that repeats can be recognised."""
    data = notification.data
    about = data.run_name or data.client or ""
    message = EmailMessage()
    message["From"] = sender
    message["To"] = address
    message["Subject"] = _one_line(f"[fedssl] {notification.type}{': ' if about else ''}{about}")
    message["Date"] = format_datetime(notification.timestamp)
    message["Message-ID"] = f"<{delivery_id}@fedssl>"
    message["Auto-Submitted"] = "auto-generated"
    facts = {
        "Run": None if data.run is None else f"{data.run_name or ''} ({data.run})",
        "Round": data.round,
        "Client": data.client,
        "Outcome": data.outcome,
        "Event": data.kind,
        "Time": f"{notification.timestamp:%Y-%m-%d %H:%M:%S} UTC",
    }
    lines = [f"{name}: {_one_line(str(value))}" for name, value in facts.items() if value is not None]
    message.set_content("\n".join([_one_line(data.message), "", *lines, ""]))
    return message


def _one_line(text: str) -> str:
    """Replace characters that must not be in a header, or in a line of the text."""
    return "".join(char if char.isprintable() else " " for char in text)
