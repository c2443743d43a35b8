"""Which backend a run file asks for."""

from __future__ import annotations

import warnings
from importlib import import_module

from rlhpc.config import Config
from rlhpc.contracts import TrainerBackend
from rlhpc.training.process_group import LOOPBACK, MEET_TIMEOUT_S

# Module and class; imported when asked for, because a run with one backend need not have the others installed.
_BACKENDS = {
    "reference": ("rlhpc.training.reference", "ReferenceBackend"),
    "megatron": ("rlhpc.training.megatron.backend", "MegatronBackend"),
    "deepspeed": ("rlhpc.training.deepspeed.backend", "DeepSpeedBackend"),
}


def open_backend(
    config: Config,
    *,
    rank: int,
    world_size: int,
    store_address: str,
    host: str = LOOPBACK,
    meet_timeout_s: float = MEET_TIMEOUT_S,
) -> TrainerBackend:
    """Load the model into config.trainer.backend on this rank; the ranks' rendezvous is store_address.

    store_address: "rendezvous:///path" of a file that rank 0 will write; "file:///path" of one that does not exist yet;
    or "tcp://host:port".  host: IPv4 address under which the other ranks reach this one.  meet_timeout_s: how long to
    wait for them.  All three are unused by one rank; training/process_group.py says more.
    Raises ConfigError for a model that the backend cannot train, ChannelTimeout for ranks that do not appear.
    """
    # Backends warn of missing packages at every start, and torch of future renames at every collective.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    module, name = _BACKENDS[config.trainer.backend]
    backend: TrainerBackend = getattr(import_module(module), name).open(
        config,
        rank=rank,
        world_size=world_size,
        store_address=store_address,
        host=host,
        meet_timeout_s=meet_timeout_s,
    )
    return backend
