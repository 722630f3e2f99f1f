"""`fedssl artifact`: files in the coordinator's store, by digest."""

from pathlib import Path
from typing import Annotated

import typer

from fedssl.cli.arguments import TokenFileOption, UrlOption
from fedssl.cli.connection.choice import CONNECTION_HINT
from fedssl.cli.connection.connect import connect
from fedssl.cli.errors import UsageError
from fedssl.cli.output import Format, FormatOption, show_result

app = typer.Typer(
    help="Fetch a file of a run by its digest: a broadcast, an update or a server state.",
    epilog=CONNECTION_HINT,
    no_args_is_help=True,
)


@app.command()
def get(
    digest: Annotated[str, typer.Argument(metavar="DIGEST", help="The file's sha256: 64 hexadecimal digits.")],
    *,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The file to write.  [default: ./DIGEST.safetensors]")
    ] = None,
    url: UrlOption = None,
    token_file: TokenFileOption = None,
    output: FormatOption = Format.TABLE,
) -> None:
    """Fetch an artifact and check it against its digest. The file appears only when it is complete.

    `fedssl run show RUN --format json` lists a run's digests: `model`, `server_state`, and `update` of each assignment.
    """
    if len(digest) != 64 or set(digest) - set("0123456789abcdef"):
        raise UsageError(
            f"{digest!r} is not a digest of 64 lower-case hexadecimal digits: "
            "`fedssl run show RUN --format json` lists a run's digests"
        )
    path = out or Path(f"{digest}.safetensors")
    with connect(url, token_file, patience_seconds=30) as client:
        client.download_artifact(digest, path)
    num_bytes = path.stat().st_size
    document = {"sha256": digest, "file": str(path), "num_bytes": num_bytes}
    show_result(document, f"{path}: {num_bytes:,} bytes", output)
