"""`fedssl artifact`: files of the coordinator's store by their digests."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.connection.target import CONNECTION_HELP, TokenFileOption, UrlOption, connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, note, show_json

app = typer.Typer(
    help="Fetch what a run refers to by digest: broadcasts, updates, server states.",
    epilog=CONNECTION_HELP,
    no_args_is_help=True,
)


@app.command()
def get(
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="The sha256 of the file, 64 characters.")],
    *,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Where to.  [default: ./DIGEST.safetensors]")] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Fetch an artifact, checked against its digest. The file appears whole or not at all.

    `fedssl run show --format json` names a run's: `model`, `server_state`, and each assignment's `update`.
    """
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise UsageError(f"{digest!r} is no digest, which has 64 characters: `fedssl run show RUN --format json`")
    path = out or Path(f"{digest}.safetensors")
    with connect(url, token_file, patience_seconds=30) as client:
        client.download_artifact(digest, path)
    if output is Format.JSON:
        show_json({"sha256": digest, "file": str(path), "num_bytes": path.stat().st_size})
    else:
        note(f"{path}: {path.stat().st_size:,} bytes")
