"""The trainer's part of a checkpoint: one format for every backend and every layout over ranks.

Input: float32 master weights and Adam moments tensor by tensor under their HF names.  Output: safetensors shards and
the manifest trainer.json, written last.  To resume, sizes and checksums of all files are verified before any tensor is
returned; a reader of one kind of tensors reads and verifies only those.

    weights-00001.safetensors …   exp_avg-00001.safetensors …   exp_avg_sq-00001.safetensors …   trainer.json

and average-00001.safetensors … where there is a moving average of the weights.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlhpc.base.files import write_atomically
from rlhpc.base.native import crc32
from rlhpc.base.patience import patiently
from rlhpc.protocol.errors import CheckpointError, DamagedCheckpoint
from rlhpc.protocol.types import TensorSpec
from rlhpc.training.checkpoint_directory import FileRecord, check_file, of_each_file
from rlhpc.training.checkpoint_tensors import TensorSource, plan_shards, write_safetensors

# ------------------------------------------------------------------------------------------------------------ optimizer
#
# AdamW on float32 master weights that lie end to end in one buffer, matrices first.
#
# Input: gradients of any floating dtype as autograd makes them, which are summed in float32.  Output: stepped masters,
# written back into the model's parameters.  One buffer each for masters, gradients and the two moments: one all-reduce,
# one norm and two fused optimiser calls, however many tensors the model has.
# Weight decay acts on matrices only (two dimensions or more), not on norms and biases.

STATE_KINDS = ("weights", "exp_avg", "exp_avg_sq")  # what a checkpoint holds of every tensor
NORM_RUN = 4096


class FlatAdamW:
    """Decoupled weight decay (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2), as torch's fused AdamW.

    Float32 parameters become views of the master buffer; others stay copies of it in their own dtype.
    """

    def __init__(self, parameters: Mapping[str, nn.Parameter], *, betas: tuple[float, float], eps: float) -> None:
        self._parameters = dict(parameters)
        ordered = sorted(parameters, key=lambda name: parameters[name].ndim < 2)  # stable: matrices, then the rest
        self._num_decayed = sum(p.numel() for p in parameters.values() if p.ndim >= 2)
        device = next(iter(parameters.values())).device
        num_elements = sum(p.numel() for p in parameters.values())
        self.gradients = torch.zeros(num_elements, dtype=torch.float32, device=device)
        self._buffers = {kind: torch.zeros_like(self.gradients) for kind in STATE_KINDS}
        self._views = {kind: self._named_views(buffer, ordered) for kind, buffer in self._buffers.items()}
        self._optimizer = self._make_optimizer(betas, eps)
        self._adopt_parameters(ordered)

    def _named_views(self, buffer: Tensor, names: list[str]) -> dict[str, Tensor]:
        pieces = buffer.split_with_sizes([self._parameters[name].numel() for name in names])
        return {name: piece.view(self._parameters[name].shape) for name, piece in zip(names, pieces, strict=True)}

    def _make_optimizer(self, betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
        """Give torch's optimiser our moments at once, so that a checkpoint before the first step has them too."""
        cut = self._num_decayed
        optimizer = torch.optim.AdamW([{"params": []}, {"params": []}], lr=0.0, betas=betas, eps=eps, fused=True)
        for group, part in zip(optimizer.param_groups, (slice(0, cut), slice(cut, None)), strict=True):
            master = nn.Parameter(self._buffers["weights"][part])
            master.grad = self.gradients[part]
            group["params"] = [master]
            optimizer.state[master] = {
                "step": torch.zeros((), dtype=torch.float32, device=master.device),
                "exp_avg": self._buffers["exp_avg"][part],
                "exp_avg_sq": self._buffers["exp_avg_sq"][part],
            }
        return optimizer

    def _adopt_parameters(self, ordered: list[str]) -> None:
        gradient_views = self._named_views(self.gradients, ordered)
        for name, parameter in self._parameters.items():
            master = self._views["weights"][name]
            master.copy_(parameter.detach())
            if parameter.dtype == torch.float32:
                parameter.data = master
            parameter.register_post_accumulate_grad_hook(_SumInto(gradient_views[name]))  # type: ignore[no-untyped-call]

    @property
    def num_steps_applied(self) -> int:
        """Steps applied so far."""
        return int(self._step_counters[0].item())

    @num_steps_applied.setter
    def num_steps_applied(self, value: int) -> None:
        for counter in self._step_counters:
            counter.fill_(value)

    @property
    def _step_counters(self) -> list[Tensor]:
        return [state["step"] for state in self._optimizer.state.values()]

    def state(self, kind: str) -> dict[str, Tensor]:
        """Float32 views by HF name; write to them only inside load.  `kind`: one of STATE_KINDS."""
        return self._views[kind]

    def zero_gradients(self) -> None:
        """Zero the accumulated gradients."""
        self.gradients.zero_()

    def scale_gradients(self, factor: float) -> None:
        """Multiply the accumulated gradients, before gradient_norm()."""
        self.gradients.mul_(factor)

    def gradient_norm(self) -> float:
        """Global L2 norm of the accumulated gradients.

        The norm of norms of short runs: on CPU torch sums a long vector sequentially, and loses a millionth for every
        few tens of thousands of elements.
        """
        whole = len(self.gradients) // NORM_RUN * NORM_RUN
        runs = torch.linalg.vector_norm(self.gradients[:whole].view(-1, NORM_RUN), dim=1)
        rest = torch.linalg.vector_norm(self.gradients[whole:])
        return float(torch.linalg.vector_norm(torch.cat([runs, rest[None]])))

    def clip(self, gradient_norm: float, max_norm: float) -> None:
        """Scale the gradients to the norm max_norm if theirs, `gradient_norm`, is larger."""
        if gradient_norm > max_norm:
            self.gradients.mul_(max_norm / gradient_norm)

    @torch.no_grad()
    def step(self, *, learning_rate: float, weight_decay: float) -> None:
        """Apply the accumulated gradients."""
        decayed, plain = self._optimizer.param_groups
        decayed.update(lr=learning_rate, weight_decay=weight_decay)
        plain.update(lr=learning_rate, weight_decay=0.0)
        self._optimizer.step()
        self.publish()

    @torch.no_grad()
    def publish(self) -> None:
        """Copy the masters into parameters that are not views of them."""
        copies = {name: p for name, p in self._parameters.items() if p.dtype != torch.float32}
        if copies:
            torch._foreach_copy_(list(copies.values()), [self._views["weights"][name] for name in copies])


class _SumInto:
    """Moves each gradient into the float32 buffer as soon as autograd has it: at most one lives beside the buffer."""

    def __init__(self, total: Tensor) -> None:
        self._total = total

    def __call__(self, parameter: Tensor) -> None:
        if parameter.grad is not None:
            self._total.add_(parameter.grad)
            parameter.grad = None


# -------------------------------------------------------------------------------------------------------- trainer state

Found = TypeVar("Found")
STATE_FILE = "trainer.json"
MEGATRON_STATE_FILE = "megatron.json"  # its equivalent in rlhpc.training.megatron.checkpoint's format
FORMAT_VERSION = 1
SHARD_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class TrainerCheckpoint:
    """A checkpoint whose manifest has been read, but not its tensors."""

    directory: Path
    num_steps_applied: int
    rng: dict[str, str]  # rng.read_rng of rank 0
    specs: tuple[TensorSpec, ...]  # all float32
    shards: dict[str, tuple[str, tuple[str, ...]]]  # file name → (kind, tensor names)
    records: dict[str, FileRecord]  # by file name
    adapter: Mapping[str, Any] | None = None  # settings and base of LoRA adapters, see models/adapter.py

    @property
    def kinds(self) -> frozenset[str]:
        """Kinds of tensors in this checkpoint: STATE_KINDS, and perhaps AVERAGE."""
        return frozenset(kind for kind, _ in self.shards.values())

    def tensors(self, *kinds: str) -> Iterator[tuple[str, str, Tensor]]:
        """Stream (kind, HF name, float32 tensor on CPU), of these kinds or of STATE_KINDS.

        Raises CheckpointError if a verified file cannot be read any more.
        """
        for kind in kinds or STATE_KINDS:
            with self.source(kind) as source:
                for name in source.names:
                    yield kind, name, source.read(name)

    def verified_tensors(self, kind: str) -> Iterator[Tensor]:
        """Stream the tensors of one kind in the order of specs, float32 on CPU, each file verified before its first.

        Read from disk once: between the two reads a file stays in the page cache.
        Raises DamagedCheckpoint naming the file, CheckpointError if it cannot be read.
        """
        for file_name, (kind_there, names) in self.shards.items():
            if kind_there == kind:
                path = self.directory / file_name
                check_file(path, self.records[file_name], verify_content=True)
                with TensorSource.of_files(dict.fromkeys(names, path), error=CheckpointError) as source:
                    for name in names:
                        yield source.read(name)

    def source(self, kind: str) -> TensorSource:
        """The tensors of one kind by HF name, float32, for partial reads; it raises CheckpointError."""
        files = {
            name: self.directory / file_name
            for file_name, (kind_there, names) in self.shards.items()
            if kind_there == kind
            for name in names
        }
        return TensorSource.of_files(files, error=CheckpointError)


def write_checkpoint(
    directory: Path,
    specs: Sequence[TensorSpec],
    tensors_of: Callable[[str], Iterator[Tensor]],
    *,
    num_steps_applied: int,
    rng: dict[str, str],
    kinds: Sequence[str] = STATE_KINDS,
    shard_bytes: int = SHARD_BYTES,
    adapter: Mapping[str, Any] | None = None,
) -> dict[str, int]:
    """Write a checkpoint into `directory`, which is made; return {file name: bytes}.

    specs: names and shapes in the order in which tensors_of(kind) yields float32 tensors, for each of kinds.
    adapter: record of LoRA adapters, if the tensors are such.
    Every file appears complete or not at all, the manifest last.  Raises CheckpointError; files may remain.
    """
    masters = [TensorSpec(spec.name, "float32", spec.shape) for spec in specs]
    files: dict[str, dict[str, Any]] = {}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / STATE_FILE).unlink(missing_ok=True)  # from here on an older state in this place is invalid
        for kind in kinds:
            tensors = tensors_of(kind)
            for number, shard in enumerate(plan_shards(masters, shard_bytes), start=1):
                name = f"{kind}-{number:05d}.safetensors"
                record = write_safetensors(directory / name, shard, tensors)
                files[name] = {**asdict(record), "kind": kind, "tensors": [spec.name for spec in shard]}
        manifest = {
            "format_version": FORMAT_VERSION,
            "num_steps_applied": num_steps_applied,
            "fingerprint": fingerprint(specs),
            "tensors": [[spec.name, list(spec.shape)] for spec in masters],
            "files": files,
            "rng": rng,
        } | ({} if adapter is None else {"adapter": adapter})
        content = manifest_content(manifest)
        write_atomically(directory / STATE_FILE, content)
    except OSError as error:
        raise CheckpointError(f"{directory}: cannot be written: {error}") from error
    return {name: entry["num_bytes"] for name, entry in files.items()} | {STATE_FILE: len(content)}


def read_checkpoint(
    directory: Path,
    specs: Sequence[TensorSpec] | None,
    *,
    share: tuple[int, int] = (0, 1),
    adapter: Mapping[str, Any] | None = None,
) -> TrainerCheckpoint:
    """Verify a checkpoint and return it.

    specs: of the model to load, in any dtype and order; None: any model.  share (k, n): this is reader k, from 0, of n:
    it verifies the checksums of every nth file from file k on, and the sizes of all files.  adapter: the record that a
    checkpoint of that model's adapters would have.
    Raises CheckpointError naming the file and the reason.
    """
    checkpoint = open_checkpoint(directory)
    if specs is not None:
        _refuse_other_adapter(directory / STATE_FILE, checkpoint.adapter, adapter)
        _refuse_other_model(directory / STATE_FILE, checkpoint.specs, specs)
    records, (first, step) = checkpoint.records, share
    ours = set(sorted(records)[first::step])

    def check(name: str) -> None:
        check_file(directory / name, records[name], verify_content=name in ours)

    of_each_file(check, records, sum(records[name].num_bytes for name in ours))
    return checkpoint


def open_checkpoint(directory: Path) -> TrainerCheckpoint:
    """Return a checkpoint by its manifest; reads and verifies only the manifest.  Raises CheckpointError."""
    _refuse_other_format(directory)
    manifest = read_manifest(directory / STATE_FILE)
    specs = tuple(TensorSpec(name, "float32", tuple(shape)) for name, shape in manifest["tensors"])
    files = manifest["files"]
    shards = {name: (entry["kind"], tuple(entry["tensors"])) for name, entry in files.items()}
    records = {name: FileRecord(entry["num_bytes"], entry["crc32"]) for name, entry in files.items()}
    steps, rng, adapter = manifest["num_steps_applied"], manifest["rng"], manifest.get("adapter")
    return TrainerCheckpoint(directory, steps, rng, specs, shards, records, adapter)


def on_all_ranks(read: Callable[[], Found]) -> Found:
    """Return read()'s result; raise CheckpointError on every rank if it raises one on any.  A collective.

    A rank that raised alone would leave the others waiting for it in their next collective.  All raise the message of
    the first that failed, so that rank 0's log has it.
    """
    error: CheckpointError | None = None
    try:
        found = patiently(read, "a checkpoint")
    except CheckpointError as failure:
        error = failure
    if dist.is_initialized():
        told: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(told, "" if error is None else str(error))
        if problems := list(filter(None, told)):
            raise CheckpointError(problems[0]) from error
    if error is not None:
        raise error
    return found


def fingerprint(specs: Sequence[TensorSpec]) -> str:
    """Name a model by its tensors' names and shapes, whatever their dtype and order."""
    lines = sorted(f"{spec.name} {'x'.join(map(str, spec.shape))}" for spec in specs)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def manifest_content(manifest: dict[str, Any]) -> bytes:
    """Content of a manifest file: JSON with its own checksum."""
    return json.dumps({"crc32": _checksum(manifest), "manifest": manifest}, indent=1).encode()


def read_manifest(path: Path) -> dict[str, Any]:
    """Undo manifest_content.  Raises CheckpointError, DamagedCheckpoint if it is damaged."""
    try:
        outer = json.loads(path.read_bytes())
        manifest, checksum = outer["manifest"], outer["crc32"]
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f"{path}: is missing") from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
    except (ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpoint(f"{path}: is not a trainer manifest: {error!r}") from error
    if checksum != _checksum(manifest):
        raise DamagedCheckpoint(f"{path}: its content is not what was written (checksum differs)")
    if manifest["format_version"] != FORMAT_VERSION:
        raise CheckpointError(f"{path}: format version {manifest['format_version']}, known here: {FORMAT_VERSION}")
    assert isinstance(manifest, dict)
    return manifest


def _checksum(manifest: Any) -> int:
    return crc32(json.dumps(manifest, sort_keys=True, separators=(",", ":")).encode())


def _refuse_other_format(directory: Path) -> None:
    try:
        is_other = (directory / MEGATRON_STATE_FILE).exists() and not (directory / STATE_FILE).exists()
    except OSError as error:  # on one rank only, for which the others would wait: see on_all_ranks
        raise CheckpointError(f"{directory}: cannot be read: {error}") from error
    if is_other:
        raise CheckpointError(
            f"{directory}: was written with checkpoint.trainer_format='megatron', which only "
            "trainer.backend='megatron' reads; for one that every backend and rlhpc export read, continue the run with "
            "checkpoint.trainer_format='hf' until its next checkpoint"
        )


def _refuse_other_adapter(path: Path, there: Mapping[str, Any] | None, here: Mapping[str, Any] | None) -> None:
    """Raise CheckpointError naming the key of [lora], or the base, that differs."""
    if there is None and here is not None:
        raise CheckpointError(f"lora.rank={here['rank']}: {path} holds whole weights; legal: lora.rank=0, as before")
    if there is not None and here is None:
        rank = there["rank"]
        raise CheckpointError(f"lora.rank=0: {path} holds adapters of rank {rank}; legal: lora.rank={rank}, as before")
    if there is None or here is None:
        return
    for key, value in here.items():
        if key != "base" and value != there.get(key, value):
            was = json.dumps(there[key])
            raise CheckpointError(f"lora.{key}={json.dumps(value)}: {path} was written with {was}; legal: {was}")
    if "" not in (here["base"], there["base"]) and here["base"] != there["base"]:
        raise CheckpointError(
            f"model.path: its weights have the digest {here['base']}, and the adapters of {path} belong to weights of "
            f"the digest {there['base']}; legal: the model that the run began with"
        )


def _refuse_other_model(path: Path, found: Sequence[TensorSpec], wanted: Sequence[TensorSpec]) -> None:
    if fingerprint(found) == fingerprint(wanted):
        return
    there, here = ({spec.name: spec.shape for spec in specs} for specs in (found, wanted))
    name = min(name for name in there.keys() | here.keys() if there.get(name) != here.get(name))
    raise CheckpointError(
        f"{path}: belongs to another model: {name} is {there.get(name, 'absent')} there and "
        f"{here.get(name, 'absent')} in the model"
    )
