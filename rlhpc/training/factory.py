"""Create the trainer backend that the run file names."""

from __future__ import annotations

import warnings
from importlib import import_module

from rlhpc.base.native import loading_libraries
from rlhpc.config.rules import Config
from rlhpc.protocol.contracts import TrainerBackend
from rlhpc.training.backends import compute_deterministically
from rlhpc.training.ranks import RankContext

# Module and class; imported when asked for, because a run with one backend need not have the others installed.
_BACKENDS = {
    "reference": ("rlhpc.training.reference", "ReferenceBackend"),
    "megatron": ("rlhpc.training.megatron.backend", "MegatronBackend"),
    "deepspeed": ("rlhpc.training.deepspeed.backend", "DeepSpeedBackend"),
}


def open_backend(config: Config, context: RankContext, *, has_value_head: bool = False) -> TrainerBackend:
    """Load the model into config.trainer.backend on this rank.

    has_value_head: a critic, which has a value for every token in the place of its log-probability.

    Raises ConfigError for a model that the backend cannot train, ChannelTimeout for ranks that do not appear.
    """
    # Backends warn of missing packages at every start, and torch of future renames at every collective.
    warnings.filterwarnings("ignore", category=UserWarning, module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if config.run.deterministic:
        compute_deterministically()
    module, name = _BACKENDS[config.trainer.backend]
    with loading_libraries():
        backend_type = getattr(import_module(module), name)
    backend: TrainerBackend = backend_type.open(config, context, has_value_head=has_value_head)
    return backend
