"""The exit codes of the command, and what each means."""

OK, FAILED, USAGE, UNREACHABLE, NOT_ALLOWED, CONFLICT, STOPPED, PAUSED, TIMED_OUT = range(9)
INTERRUPTED = 130

EXIT_CODES = {
    OK: "success",
    FAILED: "a run, an evaluation or a process of `up` failed; a check found a problem; or a bug",
    USAGE: "wrong usage: an option, a spec or a data set that cannot be used",
    UNREACHABLE: "the coordinator does not answer",
    NOT_ALLOWED: "the token is missing, invalid, or not allowed to do this",
    CONFLICT: "not found, or not possible in the current state",
    STOPPED: "an operator stopped the run (`run wait`, `run watch`, `submit --watch`)",
    PAUSED: "the run is paused and does not resume by itself (`run wait`)",
    TIMED_OUT: "the run had not ended when --timeout expired (`run wait`)",
    INTERRUPTED: "interrupted",
}
