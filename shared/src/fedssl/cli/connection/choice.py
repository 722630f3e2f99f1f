"""The order of the settings that decide which coordinator a command connects to."""

from contextvars import ContextVar
from pathlib import Path

LOCAL_FOLDER = Path(".fedssl")

chosen_connection: ContextVar[str | None] = ContextVar("chosen_connection", default=None)
"""The name that `--connection` gives, for the duration of a command."""

# \b keeps the line breaks
CONNECTION_HELP = """\b
The coordinator is the first of these that is given:
  --url, --connection, FEDSSL_URL, FEDSSL_CONNECTION,
  the local `fedssl up`, if its folder .fedssl is in the current directory,
  the connection chosen with `fedssl connection use`

\b
The token is the first of these that is given:
  --token-file, the token of --connection, FEDSSL_TOKEN,
  the file FEDSSL_TOKEN_FILE,
  the token of the chosen connection or of the local federation

Over https, fedssl trusts the certificate authorities of this machine, or only those in FEDSSL_CA_FILE if that is set;
FEDSSL_CLIENT_CERT and FEDSSL_CLIENT_KEY are for a coordinator that requires a client certificate. Over http, a token is
sent to another machine only if FEDSSL_INSECURE_HTTP=1."""

CONNECTION_HINT = "`fedssl --help` explains how a command finds the coordinator and your token."
