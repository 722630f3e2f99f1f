"""`fedssl run dimensions`: which client owns which dimensions of the embedding (SSD)."""

from collections.abc import Sequence

from fedssl.cli.arguments import RunArgument, TokenFileOption, UrlOption
from fedssl.cli.connection.connect import connect, find_run
from fedssl.cli.output import Format, FormatOption, note, show_json, show_table


def show_dimensions(
    run: RunArgument, url: UrlOption = None, token_file: TokenFileOption = None, output: FormatOption = Format.TABLE
) -> None:
    """Show which client owns which dimensions of the embedding, for methods that divide it (SSD).

    A client keeps its dimensions for the whole run. No other client ever gets them, not even after it is revoked.
    """
    with connect(url, token_file) as client:
        owned = list(client.dimension_assignments(find_run(client, run)))
    if output is Format.JSON:
        show_json(owned)
    elif owned:
        rows = [(view.client_id, len(view.dimensions), ranges(view.dimensions)) for view in owned]
        show_table(["client", "#dimensions", "which"], rows)
    else:
        note("the run assigns no dimensions: its method does not divide them, or its first round is not open yet")


def ranges(numbers: Sequence[int]) -> str:
    """Format sorted numbers as ranges.

    >>> ranges([0, 1, 2, 5, 8, 9])
    '0-2, 5, 8-9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)
