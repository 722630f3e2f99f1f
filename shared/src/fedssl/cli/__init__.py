"""The `fedssl` command.

Importing the command tree imports neither pydantic nor httpx nor torch, so that `--help` answers at once: every command
imports what it needs when it runs.
"""
