"""The parent of one command, which leaves no descendant of it running when the command ends.

`fedssl_local.process` runs this file as a script. It needs the standard library only:

    subreaper.py CHANNEL HELD USER COMMAND...

CHANNEL is a file descriptor, one end of a socket pair. The subreaper writes the command's pid and a newline when it has
started it, and a full stop when no process of it is left; each byte that the launcher writes is a signal for the
command's process group. When the channel closes, because the launcher has ended or wants a quick end, everything below
the subreaper is killed. HELD is a comma-separated list of descriptors that stay open until then, with any lock on them.
USER is `uid:gid` or `-`.

It is a separate process because the alternatives are incomplete. A death signal (PR_SET_PDEATHSIG) reaches children
only, arrives when the *thread* that spawned the child ends, and does not exist outside Linux. A process group does not
include processes that called setsid, as Postgres's backends do. On Linux, every orphan below a subreaper becomes its
child, so it can find and kill all of them.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CANNOT_EXECUTE = 127
PARENT_CHECK_SECONDS = 1.0
KILL_SECONDS = 10.0
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def prctl(option: int, value: int) -> None:
    """Call Linux's prctl. On other systems, do nothing."""
    if sys.platform != "linux":
        return
    import ctypes

    zero = ctypes.c_ulong(0)
    ctypes.CDLL(None).prctl(option, ctypes.c_ulong(value), zero, zero, zero)


def become(command: Sequence[str], user: str, subreaper: int) -> None:
    """Turn this freshly forked process into the command; return only if that is impossible."""
    os.setpgid(0, 0)
    signal.set_wakeup_fd(-1)
    for signum in (*FORWARDED, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(signum, signal.SIG_DFL)
    if user != "-":
        uid, gid = map(int, user.split(":"))
        os.setgroups([])
        os.setgid(gid)
        os.setuid(uid)
    # After setuid, which clears it. It matters if the subreaper itself is killed.
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == subreaper:
        os.execvp(command[0], [*command])


def start(command: Sequence[str], user: str) -> int:
    """Fork and execute the command as `user` in a process group of its own; return its pid."""
    subreaper = os.getpid()
    pid = os.fork()
    if pid:
        # The parent does this as well as the child, so that the group exists before its id is used.
        with suppress(OSError):
            os.setpgid(pid, pid)
        return pid
    try:
        become(command, user, subreaper)
    except OSError as error:
        os.write(2, f"cannot execute {command[0]} as {user}: {error}\n".encode())
    finally:
        os._exit(CANNOT_EXECUTE)


def signal_group(pid: int, signum: int) -> None:
    """Send a signal to the command's process group, if it still exists."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


def reap(pid: int) -> int | None:
    """Collect every child that has ended; return the wait status of `pid` if it was among them."""
    found = None
    while True:
        try:
            ended, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if not ended:
            return found
        if ended == pid:
            found = status


def watch(pid: int, channel: int, wakeup: int, parent: int) -> int | None:
    """Wait for the command and forward signals to it; return its wait status, or None if everything must end now."""
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    poller.register(wakeup, select.POLLIN)
    while True:
        status = reap(pid)
        if status is not None:
            return status
        for descriptor, _ in poller.poll(PARENT_CHECK_SECONDS * 1000):
            if descriptor == wakeup:
                os.read(wakeup, 4096)
                continue
            try:
                orders = os.read(channel, 64)
            except ConnectionResetError:
                return None
            if not orders:
                return None
            for signum in orders:
                signal_group(pid, signum)
        # The channel stays open after the launcher's death if a process that it forked has a copy of its end.
        if os.getppid() != parent:
            return None


def children() -> list[int]:
    """Return the pids of this process's children, or none if there is no /proc."""
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc/self") else []:
        if not name.isdigit():
            continue
        try:
            with open(f"/proc/{name}/stat", "rb") as stat:
                fields = stat.read().rpartition(b")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.append(int(name))
    return found


def kill_everything(pid: int) -> None:
    """Kill the command's group and whatever else is below this process, and wait until none of it is left."""
    deadline = time.monotonic() + KILL_SECONDS
    while time.monotonic() < deadline:
        signal_group(pid, signal.SIGKILL)
        for child in children():
            with suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        reap(pid)
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        time.sleep(0.005)


def end_like(status: int | None) -> None:
    """End this process as the command ended: with its exit status or by its signal. None means that it was killed."""
    if status is None or os.WIFSIGNALED(status):
        import resource

        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        signum = os.WTERMSIG(status) if status is not None else signal.SIGKILL
        if signum != signal.SIGKILL:
            signal.signal(signum, signal.SIG_DFL)
        os.kill(os.getpid(), signum)
        return
    os._exit(os.waitstatus_to_exitcode(status) & 0xFF)


def main(arguments: Sequence[str]) -> None:
    """Run one command, as the top of this file describes."""
    channel, held, user, *command = arguments
    descriptors = [int(channel), *(int(text) for text in held.split(",") if text)]
    for descriptor in descriptors:
        os.set_inheritable(descriptor, False)
    parent = os.getppid()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    wakeup, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    pid = start(command, user)
    for signum in FORWARDED:
        signal.signal(signum, lambda received, _: signal_group(pid, received))
    try:
        os.write(descriptors[0], f"{pid}\n".encode())
        status = watch(pid, descriptors[0], wakeup, parent)
    except BrokenPipeError:
        status = None
    kill_everything(pid)
    with suppress(OSError):
        os.write(descriptors[0], b".")
    end_like(status)


if __name__ == "__main__":
    main(sys.argv[1:])
