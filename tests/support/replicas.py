"""A federation of several APIs, aggregators and beats over one Postgres, one Valkey and one store."""

import sys
from pathlib import Path
from typing import Self
from uuid import UUID

import torch

from fedssl.artifacts.tensors import Tensors, load_tensors
from fedssl.data import ImageData
from fedssl.protocol.states import Outcome, RunState
from fedssl.protocol.views import RunView
from support.processes import Federation, free_port


class Replicas(Federation):
    """A federation with `api`, `api-2`, ..., each on its own port. The workers are assigned to them in turn."""

    def __init__(
        self,
        database_url: str,
        redis_url: str,
        folder: Path,
        clients: dict[str, ImageData],
        *,
        num: dict[str, int],
        api_options: tuple[str, ...] = (),
        **settings: str,
    ) -> None:
        """Create the federation. `num`: the number of `api`, `aggregator` and `beat`, by default one. `settings`:
        the coordinator's."""
        folder.mkdir(parents=True, exist_ok=True)
        super().__init__(database_url, redis_url, folder, clients, **settings)
        self._api_options = api_options
        self._more = [f"{name}-{n}" for name, count in num.items() for n in range(2, count + 1)]
        self._ports = {"api": self._port, **{name: free_port() for name in self._more if name.startswith("api")}}

    def __enter__(self) -> Self:
        super().__enter__()
        try:
            for name in self._more:
                self.start(name)
        except BaseException:
            self.__exit__(*sys.exc_info())
            raise
        return self

    @property
    def urls(self) -> list[str]:
        """The address of each API."""
        return [f"http://127.0.0.1:{port}" for port in self._ports.values()]

    @property
    def pids(self) -> dict[str, int]:
        """The id of each process that was started and has not ended, by name."""
        return {name: process.pid for name, process in self._processes.items()}

    def token(self, client: str) -> str:
        """Return the token of a client's worker."""
        return self._tokens[client]

    def assert_ends_with(self, run_id: UUID, expected: Tensors, seconds: float = 120) -> RunView:
        """Wait for the run's end, and assert that it completed with exactly these weights."""

        def look() -> RunView | None:
            run = self.client.run(run_id)
            return run if run.state == RunState.FINISHED else None

        run = self.wait_for(look, "the run's end", seconds)
        assert run.outcome == Outcome.COMPLETED, run.reason
        path = self.folder / "model.safetensors"
        self.client.download_model(run_id, path)
        model = load_tensors(path)
        assert model.keys() == expected.keys()
        assert [name for name in expected if not torch.equal(model[name], expected[name])] == []
        return run

    def _service(self, name: str) -> list[str]:
        if name not in self._ports:
            return super()._service("beat" if name.startswith("beat") else name)
        command = super()._service("api")
        return [*command[:-1], str(self._ports[name]), *self._api_options]

    def _worker(self, name: str) -> list[str]:
        own = self.urls[list(self.clients).index(name) % len(self._ports)]
        return [own if part == self.url else part for part in super()._worker(name)]
