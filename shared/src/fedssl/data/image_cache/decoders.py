"""Processes that decode image files, and the protocol for talking to them.

A process gets one JSON document that describes the images, then a JSON list of names per task. For each name it
answers with a line of JSON and the pixels' bytes.
"""

import fcntl
import json
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from fedssl.cores import num_usable_cores
from fedssl.data.decode_file import release
from fedssl.data.image_cache.entries import Entry, decode_entry
from fedssl.data.image_files import ImageFiles
from fedssl.data.reading import Reading
from fedssl.data.trees import FolderTree, split_name
from fedssl.data.windowing import prepared_type
from fedssl.errors import DataError
from fedssl.protocol.data import WindowConfig

Found = tuple[Entry, NDArray[np.generic] | None]

_NAMES_PER_TASK = 16
_FEWEST_PER_PROCESS = 64  # starting a process takes about as long as decoding these
_MOST_PROCESSES = 16
_PIPE_BYTES = 1 << 20  # enough for a few images, so that a process decodes while its last answer is read


def num_decoders(names: Sequence[str]) -> int:
    """Return how many processes decode these files on this machine: one for `.npz`, whose array each would hold."""
    if any(split_name(name)[0].lower().endswith(".npz") for name in names):
        return 1
    return max(1, min(_MOST_PROCESSES, num_usable_cores(), len(names) // _FEWEST_PER_PROCESS))


def decode_entries(
    files: ImageFiles, names: Sequence[str], channels: int, size: int, processes: int
) -> Generator[Found]:
    """Yield the files' entries and pixels in the order of `names`, whatever the number of processes is.

    Raises DataError if one of the processes ends early, because it was killed.
    """
    if processes == 1:
        try:
            for name in names:
                yield decode_entry(files, name, channels, size)
        finally:
            release()
        return
    idle: queue.Queue[_Decoder] = queue.Queue()

    def decode(task: Sequence[str]) -> list[Found]:
        decoder = idle.get()
        try:
            return decoder.decode(task)
        finally:
            idle.put(decoder)

    with ExitStack() as stack, ThreadPoolExecutor(processes) as pool:
        for _ in range(processes):
            idle.put(stack.enter_context(_decoder(files, channels, size)))
        pending: deque[Future[list[Found]]] = deque()
        try:
            for start in range(0, len(names), _NAMES_PER_TASK):
                pending.append(pool.submit(decode, names[start : start + _NAMES_PER_TASK]))
                if len(pending) > 2 * processes:
                    yield from pending.popleft().result()
            while pending:
                yield from pending.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class _Decoder:
    """One process that decodes."""

    def __init__(self, process: "subprocess.Popen[bytes]", files: ImageFiles, channels: int, size: int) -> None:
        assert process.stdin is not None, "opened as a pipe"
        assert process.stdout is not None, "opened as a pipe"
        self._stdin, self._stdout = process.stdin, process.stdout
        self._channels, self._dtype = channels, prepared_type(files.reading.window)
        window = files.reading.window
        setup = {
            "folder": str(files.tree.path),
            "window": None if window is None else window.model_dump(mode="json"),
            "channels": channels,
            "size": size,
        }
        self._send(setup)

    def decode(self, names: Sequence[str]) -> list[Found]:
        """Decode some files. Raises DataError if the process has ended."""
        self._send(list(names))
        return [self._receive() for _ in names]

    def _send(self, message: Any) -> None:
        try:
            self._stdin.write(json.dumps(message).encode() + b"\n")
            self._stdin.flush()
        except OSError as error:
            raise _ended() from error

    def _receive(self) -> Found:
        line = self._stdout.readline()
        if not line.endswith(b"\n"):
            raise _ended()
        entry = Entry(**json.loads(line))
        if entry.why is not None:
            return entry, None
        shape = (self._channels, entry.height, entry.width)
        wanted = int(np.prod(shape)) * self._dtype.itemsize
        content = self._stdout.read(wanted)
        if len(content) != wanted:
            raise _ended()
        return entry, np.frombuffer(content, self._dtype).reshape(shape)


@contextmanager
def _decoder(files: ImageFiles, channels: int, size: int) -> Iterator[_Decoder]:
    process = subprocess.Popen(
        [sys.executable, "-m", "fedssl.data.image_cache"],
        stdin=subprocess.PIPE,  # it ends when this process does
        stdout=subprocess.PIPE,
        process_group=0,  # Ctrl-C is for this process, which ends the others
    )
    assert process.stdout is not None, "opened as a pipe"
    with suppress(OSError):  # the system bounds the pipes of a user; a smaller one works too
        fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, _PIPE_BYTES)
    try:
        yield _Decoder(process, files, channels, size)
    finally:
        process.kill()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                _close(pipe)
        process.wait()


def _close(pipe: IO[bytes]) -> None:
    with suppress(BrokenPipeError):  # what was not written was for a process that has ended
        pipe.close()


def _ended() -> DataError:
    return DataError(
        "a process that decodes images has ended early, probably because memory ran out: what is decoded stays in the "
        "cache, so try again, with smaller images or more memory"
    )


def serve(tasks: IO[bytes], answers: IO[bytes]) -> None:
    """Decode the requested files until there are no more tasks. This is the work of a process."""
    first = tasks.readline()
    if not first:
        return
    setup = json.loads(first)
    window = None if setup["window"] is None else WindowConfig.model_validate(setup["window"])
    files = ImageFiles("", FolderTree(Path(setup["folder"])), (), reading=Reading(window))
    for line in tasks:
        for name in json.loads(line):
            entry, pixels = decode_entry(files, name, setup["channels"], setup["size"])
            answers.write(entry.to_json().encode() + b"\n")
            if pixels is not None:
                answers.write(pixels.data)
        answers.flush()
