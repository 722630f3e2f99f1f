"""Errors that only the command raises.

FedSSLError
├── UsageError               the command cannot be carried out as it was given
│   └── NoToken              nothing names a token for the coordinator
├── NoSuchRun                no run, or more than one, has an id with this prefix
├── NoSuchJob                the run has no job that the command could act on
├── RunNotCompleted          the run ended without completing
│   ├── RunStopped           an operator stopped the run
│   ├── RunPaused            the run is paused until it is resumed
│   └── WaitedTooLong        the run did not end within the given time
├── ChecksFailed             `fedssl doctor` found a problem
└── EvaluationNotCompleted   the evaluation ended without completing
"""

from fedssl.errors import FedSSLError


class UsageError(FedSSLError):
    """The command cannot be carried out as it was given."""


class NoToken(UsageError):
    """Nothing names a token for the coordinator."""


class NoSuchRun(FedSSLError):
    """No run, or more than one, has an id with this prefix."""


class NoSuchJob(FedSSLError):
    """The run has no job that the command could act on."""


class RunNotCompleted(FedSSLError):
    """The run ended without completing."""


class RunStopped(RunNotCompleted):
    """An operator stopped the run."""


class RunPaused(RunNotCompleted):
    """The run is paused until it is resumed."""


class WaitedTooLong(RunNotCompleted):
    """The run did not end within the given time."""


class ChecksFailed(FedSSLError):
    """`fedssl doctor` found a problem."""


class EvaluationNotCompleted(FedSSLError):
    """The evaluation ended without completing."""
