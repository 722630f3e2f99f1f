"""Runs a server as an unprivileged user if this process is root, because Postgres refuses to run as root.

The data folder and the binaries may be in places that this user cannot reach, such as below /root, and the permissions
of folders that are not ours must not be changed for them. The data folder is passed on as an open descriptor: the path
`/proc/self/fd/N` leads into it without access to the folders above. Binaries are different, because Postgres resolves
its own path: they are copied once to a folder that belongs to root and that all users may read.
"""

import hashlib
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedssl_local.errors import UnprivilegedError

# Possible folders for the copies: all users may enter them, and files in them may be executed.
COPY_FOLDERS = (Path("/var/tmp"), Path("/tmp"), Path("/dev/shm"))
UNPRIVILEGED_NAMES = ("nobody", "daemon")


@dataclass(frozen=True, slots=True)
class User:
    """The user and the group that a server is to run as."""

    uid: int
    gid: int


def unprivileged_user(data_directory: Path | None) -> User | None:
    """Return the user to run a server as, or None if this process is not root.

    It is the owner of the server's data if there are any, otherwise `nobody` or, if there is no such user, `daemon`.

    Raises:
        UnprivilegedError: the data belong to root, or this process cannot become an unprivileged user.
    """
    if os.geteuid() != 0:
        return None
    if data_directory is not None and data_directory.exists():
        owner = data_directory.stat()
        if owner.st_uid == 0:
            raise UnprivilegedError(
                f"{data_directory} belongs to root, whom the server refuses to serve: give it to an unprivileged user "
                f"(chown -R {UNPRIVILEGED_NAMES[0]}), or run this as the user whose folder it was"
            )
        return _checked(User(owner.st_uid, owner.st_gid))
    for name in UNPRIVILEGED_NAMES:
        try:
            entry = pwd.getpwnam(name)
        except KeyError:
            continue
        return _checked(User(entry.pw_uid, entry.pw_gid))
    raise UnprivilegedError(f"there is no user {' or '.join(UNPRIVILEGED_NAMES)} here: run this as an ordinary user")


@contextmanager
def entrance(directory: Path, user: User | None) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield a path by which `user` can enter `directory`, and the descriptors that its process must inherit for it."""
    if user is None or sys.platform != "linux":
        yield str(directory), ()
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
    finally:
        os.close(descriptor)


def runnable_root(root: Path, members: Sequence[str], program: str, user: User | None) -> Path:
    """Return a folder whose `program` the user can execute: `root`, or a copy of its `members` (files or folders).

    Raises:
        UnprivilegedError: not even a copy can be executed. The message lists what was tried.
    """
    if user is None:
        return root
    problem = _problem([str(root / program), "--version"], user)
    if problem is None:
        return root
    tried = [f"{root}: {problem}"]
    for folder in COPY_FOLDERS:
        try:
            copy = _copy(root, members, folder)
            problem = _problem([str(copy / program), "--version"], user)
        except OSError as error:
            problem = str(error)
        if problem is None:
            return copy
        tried.append(f"{folder}: {problem}")
    raise UnprivilegedError(
        f"user {user.uid} cannot execute {program}, neither in place nor copied ({'; '.join(tried)}): "
        "run this as an ordinary user"
    )


def _checked(user: User) -> User:
    """Return the user, or raise UnprivilegedError if this process cannot become it.

    Root cannot if it lacks its capabilities, or if it is the only user of a user namespace.
    """
    problem = _problem(["/bin/sh", "-c", ":"], user)
    if problem is not None:
        raise UnprivilegedError(
            f"root cannot become user {user.uid} here ({problem}): run this as an ordinary user, "
            "or give the container the capabilities SETUID, SETGID and CHOWN"
        )
    return user


def _problem(command: Sequence[str], user: User) -> str | None:
    """Execute the command as `user`, and return why that is impossible, or None if it succeeds."""
    try:
        done = subprocess.run(
            command,
            user=user.uid,
            group=user.gid,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            timeout=30,
            check=False,
        )
    except OSError as error:
        # The path is left out: it is the working directory's if the change of user failed.
        return error.strerror
    except subprocess.SubprocessError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def _listing(root: Path, members: Sequence[str]) -> list[tuple[str, int]]:
    """Return every file's relative path and size in bytes. Members that do not exist are left out."""
    files = [
        path
        for member in members
        for path in (sorted((root / member).rglob("*")) if (root / member).is_dir() else [root / member])
        if path.is_file()
    ]
    return [(str(path.relative_to(root)), path.stat().st_size) for path in files]


def _copy(root: Path, members: Sequence[str], folder: Path) -> Path:
    """Return a complete copy in `folder`, and make it if there is none yet.

    Raises PermissionError unless an existing copy is root's, and only root may write to it.
    """
    listing = _listing(root, members)
    name = f"fedssl-servers-{hashlib.sha256(repr((str(root), listing)).encode()).hexdigest()[:16]}"
    copy = folder / name
    if copy.exists() or copy.is_symlink():
        status = copy.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            raise PermissionError(f"{copy} exists and is not root's own folder: remove it")
        if _listing(copy, members) == listing:
            return copy
        # A program that removes old temporary files has removed some of it.
        shutil.rmtree(copy)
    fresh = Path(tempfile.mkdtemp(prefix="fedssl-servers-", dir=folder))
    try:
        for relative, _ in listing:
            target = fresh / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(root / relative, target)
            target.chmod(0o755 if (root / relative).stat().st_mode & 0o100 else 0o644)
        for path in (fresh, *(path for path in fresh.rglob("*") if path.is_dir())):
            path.chmod(0o755)
        fresh.rename(copy)
    except OSError:
        shutil.rmtree(fresh, ignore_errors=True)
        if _listing(copy, members) != listing:
            raise
    return copy
