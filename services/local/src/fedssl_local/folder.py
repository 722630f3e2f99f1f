"""The folder of a local federation: its paths, and the record of the images that each client was given."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, ValidationError

from fedssl.errors import LocalError, SpecError
from fedssl.files import write_private
from fedssl.local import FederationFolder
from fedssl.protocol.base import StrictModel
from fedssl.protocol.data import DataConfig, PartitionConfig, WindowConfig
from fedssl.protocol.model import EncoderConfig

if TYPE_CHECKING:
    from fedssl.data import ImageData

_SHAPE = ("channels", "image_size", "window")


class Record(StrictModel):
    """The origin and the shape of a folder's shards. It is written last, so a folder that has one is complete."""

    format: Literal[1] = 1
    partition: PartitionConfig | None = None  # null if each client has its own images, from `sources`
    sources: dict[str, str] = Field(default={}, exclude_if=lambda sources: not sources)
    channels: int
    image_size: int
    window: WindowConfig | None = Field(default=None, exclude_if=lambda window: window is None)
    num_images: dict[str, int]
    port: int | None = None
    encoders: dict[str, EncoderConfig] = {}  # the encoders of the clients whose workers declare one

    @property
    def clients(self) -> list[str]:
        """The names of the data owners, sorted."""
        return sorted(self.num_images)


class Folder(FederationFolder):
    """The paths of a federation's parts. Nothing is read or created until a method is called."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.postgres = root / "postgres"
        self.valkey = root / "valkey"
        self.store = root / "store"
        self.shards = root / "shards"

    def shard(self, client: str) -> Path:
        """Return the file of a client's own images."""
        return self.shards / f"{client}.npz"

    def worker_token(self, client: str) -> Path:
        """Return the file with the token of a client's worker."""
        return self.tokens / client

    def worker_state(self, client: str) -> Path:
        """Return the state folder of a client's worker."""
        return self.root / "workers" / client

    def log(self, name: str) -> Path:
        """Return the log file of one process."""
        return self.root / "logs" / f"{name}.log"

    def read(self) -> Record | None:
        """Return the record, or None if there is none yet. Raises LocalError if it cannot be read."""
        try:
            return Record.model_validate_json(self.record_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValidationError) as error:
            raise LocalError(
                f"{self.record_path} cannot be read, or was written by another version of fedssl "
                f"({type(error).__name__}): choose another folder, or remove {self.root}"
            ) from None

    def write(self, record: Record) -> None:
        """Write the record. If the process is killed, the old record or the new one remains."""
        write_private(self.record_path, record.model_dump_json(indent=2) + "\n")

    def require_usable(self) -> None:
        """Raise LocalError if the path is a file, or a folder that has contents but does not hold a federation."""
        if not self.root.exists():
            return
        if not self.root.is_dir():
            raise LocalError(f"{self.root} is a file: choose a folder")
        if any(self.root.iterdir()) and not (self.root / "supervisor.lock").exists():
            raise LocalError(f"{self.root} holds other things than a federation: choose a new or an empty folder")

    def partition_dataset(self, partition: PartitionConfig, data: DataConfig, data_root: Path | None) -> Record:
        """Partition a data set among the clients, one file per client, and write the record.

        Raises DataError, before anything is written, if a client would get no images: its worker could not start.
        """
        from fedssl.data.partitioning import partition_dataset, require_images

        by_client = partition_dataset(partition, data, data_root).by_client
        require_images(by_client, by_client)
        return self._keep(by_client, data, partition=partition)

    def copy_sources(self, sources: Mapping[str, str], data: DataConfig, data_root: Path | None) -> Record:
        """Convert each client's own images to one shape, one file per client, and write the record.

        Labels get the same numbers at all clients if all have named classes; otherwise they are left out. Raises
        DataError before anything is written.
        """
        from fedssl.data import load_conformed
        from fedssl.data.images import with_common_classes
        from fedssl.data.partitioning import refuse_cache

        refuse_cache(data)
        read = {
            client: load_conformed(source, "train", data, data_root, leave_out=True)
            for client, source in sources.items()
        }
        return self._keep(dict(zip(read, with_common_classes(read.values()), strict=True)), data, sources=dict(sources))

    def _keep(self, by_client: Mapping[str, "ImageData"], data: DataConfig, **origin: Any) -> Record:
        from fedssl.data import save_npz

        shutil.rmtree(self.shards, ignore_errors=True)  # left by an attempt that was interrupted
        self.shards.mkdir(mode=0o700)
        for client, images in by_client.items():
            save_npz(self.shard(client), images, window=data.window)
            self.shard(client).chmod(0o600)
        record = Record(
            **origin,
            channels=data.channels,
            image_size=data.image_size,
            window=data.window,
            num_images={client: len(images) for client, images in by_client.items()},
        )
        self.write(record)
        return record

    def require_same(self, record: Record, wanted: Mapping[str, Any]) -> None:
        """Raise SpecError if `wanted`, some values of a partition and its image shape, differs from the record."""
        dealt = {} if record.partition is None else record.partition.model_dump()
        dealt |= {"sources": record.sources} | {name: getattr(record, name) for name in _SHAPE}
        if record.partition is None and (other := sorted(wanted.keys() & PartitionConfig.model_fields.keys())):
            raise SpecError(
                f"{self.root} holds each client's own images ({', '.join(record.sources.values())}), which are not "
                f"partitioned: leave out {', '.join(other)} to continue with this one, or choose another folder with "
                "--directory"
            )
        different = [
            f"{name} is {dealt.get(name)}, not {value}" for name, value in wanted.items() if dealt.get(name) != value
        ]
        if different:
            raise SpecError(
                f"{self.root} was partitioned differently: {'; '.join(different)}. That cannot be changed: choose "
                f"another folder with --directory, omit these options to continue with this one, or remove {self.root}"
            )


def shape(data: DataConfig) -> dict[str, Any]:
    """Return the part of a run's data config to which the images were converted when they were partitioned."""
    return {name: getattr(data, name) for name in _SHAPE}
