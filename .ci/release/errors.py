"""The error of a release."""


class ReleaseError(Exception):
    """A release is refused or has failed. The message gives what is wrong and what to do."""
