"""Health, as the API shows it."""

from typing import Literal

from fedssl.protocol.views.base import View


class Health(View):
    """`ok`, or the services that do not answer."""

    status: Literal["ok", "unavailable"]
    checks: dict[str, str] = {}
