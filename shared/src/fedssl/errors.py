"""Every error that fedssl raises on purpose. A class's docstring describes what happened; the message, what to do.

FedSSLError
├── SpecError            a run spec that cannot be read or makes no sense
│   └── LibraryMissing   a library that the spec needs is not installed here, or in another version
├── DataError            images that cannot be found or read
├── ArtifactError        an artifact that differs from what was declared
│   ├── PlanMismatch     names, shapes or dtypes differ from the plan
│   ├── DigestMismatch   the bytes do not have the announced digest
│   ├── NotFinite        NaN or infinity in a tensor
│   ├── ArtifactTooLarge more bytes than the plan allows
│   ├── OffsetMismatch   bytes that do not follow the last byte that has arrived
│   ├── ArtifactNotFound nothing is stored under a digest
│   └── ArtifactDamaged  the bytes that are stored under a digest do not have that digest
├── StoreUnavailable     the object store did not do what was requested
├── ExportError          an encoder or numbers cannot be written in the requested form
├── LocalError           a folder, or a process of a federation on one machine, cannot be used
│   └── FolderInUseError another process uses the folder
├── ResultsError         a folder holds results or a checkpoint of another run, or damaged ones
├── Cancelled            the work was cancelled from outside
├── Paused               a simulation stopped because its spec's watch asked for it
├── DeviceError          the device to compute on is missing, or has too little memory
└── MethodError          a method cannot do what was asked of it
    └── CheckpointMismatch  the checkpoint is of another training
"""

from pathlib import Path


class FedSSLError(Exception):
    """Something went wrong that a person can correct."""


class SpecError(FedSSLError):
    """The run spec cannot be read or makes no sense."""


class LibraryMissing(SpecError):
    """A library that the spec needs is not installed on this machine, or in another version."""


class DataError(FedSSLError):
    """The images cannot be found or read."""


class ArtifactError(FedSSLError):
    """An artifact differs from what was declared."""


class PlanMismatch(ArtifactError):
    """Names, shapes or dtypes differ from the plan."""


class DigestMismatch(ArtifactError):
    """The bytes do not have the announced digest."""


class NotFinite(ArtifactError):
    """A tensor holds NaN or infinity."""


class ArtifactTooLarge(ArtifactError):
    """The artifact has more bytes than its plan allows."""


class OffsetMismatch(ArtifactError):
    """These bytes do not follow the last byte that has arrived."""


class ArtifactNotFound(ArtifactError):
    """Nothing is stored under this digest."""


class ArtifactDamaged(ArtifactError):
    """The bytes that are stored under this digest do not have it."""


class StoreUnavailable(FedSSLError, OSError):
    """The object store did not do what was requested. The same request may succeed later."""


class ExportError(FedSSLError):
    """An encoder, or a run's numbers, cannot be written in the requested form."""


class LocalError(FedSSLError):
    """A folder, or a process of a federation on one machine, cannot be used."""


class FolderInUseError(LocalError):
    """Another process uses the folder. `pid` is 0 if that process is not known."""

    def __init__(self, folder: Path, pid: int) -> None:
        holder = f"process {pid}" if pid else "another process"
        stop = f"stop it with Ctrl-C or `kill {pid}`" if pid else "stop it first"
        super().__init__(f"{folder} is in use by {holder}: {stop}, or choose another folder")
        self.folder = folder
        self.pid = pid


class ResultsError(FedSSLError):
    """A folder holds results or a checkpoint of another run, or damaged ones."""


class Cancelled(FedSSLError):
    """The work was cancelled from outside."""


class Paused(FedSSLError):
    """A simulation stopped because its spec's watch asked for it: a client's numbers crossed a threshold."""


class DeviceError(FedSSLError):
    """The device to compute on is missing, or has too little memory."""


class MethodError(FedSSLError):
    """The method cannot do what was asked of it."""


class CheckpointMismatch(MethodError):
    """The checkpoint is of another training, or of another version of this one: start from scratch without it."""
