"""Running a server as an unprivileged user when we are root, because Postgres refuses to run as root.

Two things may lie where that user cannot go, such as below /root, and neither may cost a permission on a folder that is
not ours. The data folder is handed over as an open descriptor: `/proc/self/fd/N` leads into it without a step through
the folders above. Binaries are different, since Postgres resolves its own path: they are copied once to a folder that
belongs to root and that all may read.
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

# A folder for the copies: all may enter it, and a file in it may be executed.
COPY_FOLDERS = (Path("/var/tmp"), Path("/tmp"), Path("/dev/shm"))
UNPRIVILEGED_NAMES = ("nobody", "daemon")


@dataclass(frozen=True, slots=True)
class User:
    """Whom a server is to run as."""

    uid: int
    gid: int


def unprivileged_user(data_directory: Path | None) -> User | None:
    """Whom to run a server as: the owner of its data if there are any, else `nobody`. None, if we are not root.

    Raises:
        UnprivilegedError: the data belong to root, or we cannot become any unprivileged user.
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
    """A path by which `user` can enter `directory`, and the descriptors that its process must inherit for it."""
    if user is None or sys.platform != "linux":
        yield str(directory), ()
        return
    descriptor = os.open(directory, os.O_PATH | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{descriptor}", (descriptor,)
    finally:
        os.close(descriptor)


def runnable_root(root: Path, members: Sequence[str], program: str, user: User | None) -> Path:
    """A folder whose `program` the user can execute: `root`, or a copy of its `members` (files or folders below it).

    Raises:
        UnprivilegedError: not even a copy can be executed; the message says what was tried.
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
    """The user, if we can become it; root without its capabilities, or alone in a user namespace, cannot."""
    problem = _problem(["/bin/sh", "-c", ":"], user)
    if problem is not None:
        raise UnprivilegedError(
            f"root cannot become user {user.uid} here ({problem}): run this as an ordinary user, "
            "or give the container the capabilities SETUID, SETGID and CHOWN"
        )
    return user


def _problem(command: Sequence[str], user: User) -> str | None:
    """Why `user` cannot execute the command, found out by doing it."""
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
        # Without the path, which is the working directory's if the change of user failed.
        return error.strerror
    except subprocess.SubprocessError as error:
        return str(error)
    return None if done.returncode == 0 else done.stderr.decode(errors="replace").strip()


def _listing(root: Path, members: Sequence[str]) -> list[tuple[str, int]]:
    """Every file's relative path and size in bytes; members that do not exist are left out."""
    files = [
        path
        for member in members
        for path in (sorted((root / member).rglob("*")) if (root / member).is_dir() else [root / member])
        if path.is_file()
    ]
    return [(str(path.relative_to(root)), path.stat().st_size) for path in files]


def _copy(root: Path, members: Sequence[str], folder: Path) -> Path:
    """A complete copy in `folder`, made before or now. Only root can have written it: nobody else's is accepted."""
    listing = _listing(root, members)
    name = f"fedssl-servers-{hashlib.sha256(repr((str(root), listing)).encode()).hexdigest()[:16]}"
    copy = folder / name
    if copy.exists() or copy.is_symlink():
        status = copy.lstat()
        if not stat.S_ISDIR(status.st_mode) or status.st_uid != 0 or status.st_mode & 0o022:
            raise PermissionError(f"{copy} exists and is not root's own folder: remove it")
        if _listing(copy, members) == listing:
            return copy
        # Something that clears old temporary files went through it.
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
