"""Every exception that leaves a module of rlhpc.

    RlhpcError
    ├── ConfigError            the run file, a flag or the data contradicts itself or the model   (user)
    │   └── DataError          a dataset is missing, empty or malformed; names file and line      (user)
    ├── RunDirectoryError      the run directory exists, is incomplete or belongs to another run  (user)
    ├── OwnershipLost          another attempt has taken over the run directory; this process exits (world)
    ├── ProtocolError          a message does not decode, or its sender may not send it           (bug or stranger)
    ├── ChannelError
    │   ├── ChannelFull        the other side did not accept the message in time; nothing sent    (world)
    │   ├── ChannelTimeout     no message arrived in time; none was consumed                      (world)
    │   ├── ChannelClosed      this end was closed                                                (bug)
    │   └── PeerUnreachable    the named peer is not connected; nothing was sent                  (world)
    ├── EngineError            the generation engine is dead; its rollouts in flight are lost     (world)
    ├── WeightsError
    │   ├── TornWeights        not all buckets arrived, or a checksum differs; none of it is served (world)
    │   └── GroupFailed        a membership epoch could not be formed or lost a member            (world)
    ├── PackingError           a sample does not fit the token budget                             (user)
    ├── LedgerError            an operation violates the life cycle of a group or lease           (bug)
    ├── SegmentError           a rollout segment is damaged or has an unknown schema              (world)
    ├── JournalError           a journal of rollouts cannot be written, or is not one             (world)
    ├── CheckpointError        a checkpoint is incomplete, damaged or of another model            (world)
    │   └── DamagedCheckpoint  a file of it is missing or is not what was written                (world)
    ├── TrainingError          too many consecutive optimiser steps were skipped                (user or bug)
    ├── GuardStop              metrics stayed outside their limits, and guard.action is "stop"  (user)
    ├── StarvedError           no batch can be filled: groups have no variance, or no verdict  (user)
    ├── SandboxError           programs cannot be run, or not as isolated as sandbox.require asks  (user or world)
    └── RoleFailed             a process of the run ended when it should not have                 (world)

(user): the message says which key or place to change.  (world): recovered where possible.  (bug): stops the run.
"""

from __future__ import annotations

# ---------------------------------------------------------------------------------------------------------- exit status
#
# Exit statuses of roles, and of the programs that start and supervise them.  Python 3.9 and the standard library.


EXIT_CONFIG = 2  # settings, arguments or the run directory are wrong: another try would not help
EXIT_FAULT = 3  # a failure that may not happen on another try
EXIT_FENCED = 4  # a later attempt or supervisor owns the run
EXIT_ALONE = 5  # the other roles it needs did not connect
EXIT_BUG = 70  # internal error
EXIT_INTERRUPTED = 130  # Ctrl-C, as shells report it


# --------------------------------------------------------------------------------------------------------------- errors


class RlhpcError(Exception):
    """Base of every error of this package."""


class ConfigError(RlhpcError):
    """A setting is illegal; the message names the key, the value and what is legal."""


class DataError(ConfigError):
    """A dataset is missing, empty or malformed; the message names the file and the line."""


class RunDirectoryError(RlhpcError):
    """The run directory exists, is incomplete, or belongs to another configuration."""


class OwnershipLost(RlhpcError):
    """Another attempt has taken over the run directory: this process must not write to it any more."""


class ProtocolError(RlhpcError):
    """A message could not be decoded, or its sender may not send it."""

    def __init__(self, peer: str, field: str, why: str) -> None:
        """Name the peer that sent it, the part of the message at fault, and why."""
        super().__init__(f"message from {peer or 'unknown peer'}: {field}: {why}")
        self.peer, self.field, self.why = peer, field, why

    def __reduce__(self) -> tuple[type, tuple[str, str, str]]:
        """Rebuild from the three parts, not from the joined text."""
        return type(self), (self.peer, self.field, self.why)


class ChannelError(RlhpcError):
    """A channel operation failed."""


class ChannelFull(ChannelError):
    """The other side did not accept the message before the timeout; it was not sent."""


class ChannelTimeout(ChannelError):
    """No message arrived before the timeout; none was consumed."""


class ChannelClosed(ChannelError):
    """This end of the channel has been closed."""


class PeerUnreachable(ChannelError):
    """The named peer is not connected; the message was not sent."""


class EngineError(RlhpcError):
    """The generation engine is dead; every request in flight is lost."""


class WeightsError(RlhpcError):
    """Weights could not be transferred."""


class TornWeights(WeightsError):
    """Some buckets are missing or damaged: no token is sampled with this version."""


class GroupFailed(WeightsError):
    """A membership epoch could not be formed, or lost a member; dissolve it and form another."""


class PackingError(RlhpcError):
    """A sample is longer than the token budget of a micro-batch."""


class LedgerError(RlhpcError):
    """An operation violates the life cycle of a group or a lease."""


class SegmentError(RlhpcError):
    """A rollout segment is damaged, unsealed or of an unknown schema."""


class JournalError(RlhpcError):
    """A journal of rollouts cannot be written, has an unknown schema, or is not a journal."""


class CheckpointError(RlhpcError):
    """A checkpoint is incomplete, damaged, or does not belong to this model."""


class DamagedCheckpoint(CheckpointError):
    """A file of a checkpoint is missing or is not what was written; the message names it."""


class TrainingError(RlhpcError):
    """Training cannot continue: too many consecutive steps were non-finite, or refused."""


class GuardStop(RlhpcError):
    """The guard has ended the run: metrics of its steps were outside their limits for too long."""


class StarvedError(RlhpcError):
    """No batch can be filled: all groups have rewards of zero variance, or none.  Another try would not help."""


class RoleFailed(RlhpcError):
    """A process of the run ended when it should not have."""


class SandboxError(RlhpcError):
    """A program could not be run, through no fault of the program."""
