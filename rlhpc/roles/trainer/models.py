"""The models that a rank trains: the policy and, with a critic, its values.

Input: RoleContext.  Output: backends, whose ranks are connected.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack

from rlhpc.config import Config
from rlhpc.contracts import TrainerBackend
from rlhpc.files import is_absent
from rlhpc.host_address import host_address
from rlhpc.patience import patiently
from rlhpc.roles.common.lifecycle import RoleContext
from rlhpc.roles.trainer.critic import Critic
from rlhpc.training.checkpoint.held_reference import REFERENCE_DIRECTORY
from rlhpc.training.factory import open_backend
from rlhpc.training.process_group import LOOPBACK, RankContext

log = logging.getLogger("rlhpc.trainer")


def own_host(config: Config) -> str:
    """Address under which other hosts reach this one; "" for a run within one machine."""
    return host_address() if config.transport.kind == "tcp" else ""


def open_models(context: RoleContext, stack: ExitStack) -> tuple[TrainerBackend, Critic | None]:
    """The policy's and the critic's, if there is one; `stack` closes them."""
    backend = open_policy(context)
    stack.callback(backend.close)
    critic = _open_critic(context)
    if critic is not None:
        stack.callback(critic.close)
    return backend, critic


def open_policy(context: RoleContext) -> TrainerBackend:
    """As the reference is to be: what is loaded is held before the policy of a checkpoint takes its place."""
    config = context.config
    if config.algorithm.reference_every and context.resume_step is not None:
        saved = context.layout.checkpoint(context.resume_step) / REFERENCE_DIRECTORY
        if not patiently(lambda: is_absent(saved), saved):
            config = config.model_copy(update={"model": config.model.model_copy(update={"path": saved})})
        else:
            log.info("the checkpoint has no reference: the model at model.path is used until it is renewed")
    return open_backend(config, _ranks(context))


def _open_critic(context: RoleContext) -> Critic | None:
    """On the ranks that the policy's backend has connected."""
    config = context.config
    if not config.has_critic:
        return None
    model = config.model.model_copy(update={"path": config.critic.path or config.model.path})
    own = config.model_copy(update={"model": model})
    return Critic(open_backend(own, _ranks(context), has_value_head=True), config)


def _ranks(context: RoleContext) -> RankContext:
    return RankContext(
        rank=context.replica,
        world_size=context.num_ranks,
        # Not a name that ends like an endpoint's, or a search for endpoints would find it.
        store_address=f"rendezvous://{context.layout.rendezvous}/trainer_{context.attempt}.meeting",
        host=own_host(context.config) or LOOPBACK,
        meet_timeout_s=context.meet_timeout_s,
    )
