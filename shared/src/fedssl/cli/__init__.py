"""The `fedssl` command.

`main` has a table of all commands, so `fedssl --help` imports none of them. A module that defines commands imports at
its head only what parsing and `--help` need: typer, pydantic and `fedssl.protocol`. Modules that need httpx, rich,
numpy or torch are imported by the command when it runs.
"""
