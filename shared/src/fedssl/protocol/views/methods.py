"""Methods, as the API shows them."""

from typing import Any

from fedssl.protocol.views.base import View


class MethodView(View):
    """A method: its source, what leaves a client, and its parameters as a JSON schema."""

    name: str
    title: str
    version: int
    paper: str
    equations: str
    leaves_the_client: str
    stays_on_the_client: str
    description: str
    config_schema: dict[str, Any]
