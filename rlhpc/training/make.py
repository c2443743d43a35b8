"""Which backend a run file asks for."""

from __future__ import annotations

from rlhpc.config import Config
from rlhpc.contracts import TrainerBackend
from rlhpc.training.reference import ReferenceBackend


def open_backend(config: Config, *, rank: int, world_size: int, store_address: str) -> TrainerBackend:
    """Load the model into config.trainer.backend on this rank; the ranks meet at store_address.

    store_address: "file:///path" (of a file that does not exist yet) or "tcp://host:port"; unused by one rank.
    Raises ConfigError for a model that the backend cannot train.
    """
    backends: dict[str, type[ReferenceBackend]] = {"reference": ReferenceBackend}
    return backends[config.trainer.backend].open(config, rank=rank, world_size=world_size, store_address=store_address)
