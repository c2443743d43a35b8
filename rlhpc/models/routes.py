"""Routes: the experts that an engine's mixtures chose for each token, packed for wire and trainer.

Input: expert ids [tokens, layers, k] as an engine tells them.  Output: Routes, and the reverse.  Needs no torch.
Routing replay (R3, arXiv:2510.11370) gives them to the trainer's routers.  A token's experts are a set, since their
outputs are summed: kept ascending, as differences, which are small numbers that Huffman's code shortens.

    ids of a layer and token   9 3 70 12  →  3 9 12 70  →  3 5 2 57       each difference less 1, from the second on

All differences of layer 0, token after token, then those of layer 1, …; one byte each, two with more than 256 experts
(all low bytes, then all high bytes); deflated.  Of 128 experts, 8 a token, it takes 5.3 bytes a layer and token; the
logarithm of the number of sets is 5.05, the ids themselves are 8 (python -m bench.routing_replay).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from zlib_ng import zlib_ng

from rlhpc.base.hf_config import TEXT
from rlhpc.models.shape import num_experts
from rlhpc.models.weights import object_in
from rlhpc.protocol.errors import ConfigError
from rlhpc.protocol.types import Routes

Experts = NDArray[Any]  # uint8 or uint16 [tokens, layers, k]; of the reader int16

UNKNOWN = -1  # in place of an expert: the trainer's router chooses for this token
MOST_EXPERTS = 1 << 14  # ids are int16 in places
LEVEL = 1  # higher ones search for repeats, of which there are none
_NOT_DEFLATED: Any = zlib_ng.error  # whose type the stub states wrongly


@dataclass(frozen=True, slots=True)
class MixtureForm:
    """The mixtures of experts of a model."""

    layers: tuple[int, ...]  # of the model, those that are mixtures, ascending; the others are dense
    num_experts: int  # of each
    top_k: int  # experts of a token

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> MixtureForm | None:
        """Read config.json; None: a dense model.  Raises ConfigError for more experts than routes can name."""
        inner = model.get(TEXT)
        text: Mapping[str, Any] = inner if isinstance(inner, Mapping) else model
        experts = num_experts(text) or int(text.get("moe_num_experts") or 0)
        top_k = int(text.get("num_experts_per_tok") or text.get("experts_per_token") or 0)
        layers = tuple(layer for layer in range(int(text.get("num_hidden_layers") or 0)) if _is_mixture(text, layer))
        if not (experts and top_k and layers):
            return None
        if experts > MOST_EXPERTS:
            raise ConfigError(f"model config.json: {experts} experts; routes name at most {MOST_EXPERTS}")
        return cls(layers, experts, top_k)

    @classmethod
    def of_replayed(cls, path: Path) -> MixtureForm:
        """Read the config.json of a checkpoint.  Raises ConfigError for a dense model, OSError."""
        if (form := cls.of(object_in(path / "config.json"))) is None:
            raise ConfigError(
                f"algorithm.routing_replay=true: model.path={path} has no mixtures of experts; legal: false"
            )
        return form

    @property
    def bytes_per_token(self) -> int:
        """Size of a token's ids before they are packed."""
        return len(self.layers) * self.top_k * _width(self.num_experts)

    def pack(self, experts: Experts) -> Routes:
        """Pack the ids [tokens, layers, k] of the first tokens of prompt and completion.

        Raises ValueError if they are of another form, or not k different experts for every token.
        """
        num_tokens = len(experts)
        if experts.shape != (num_tokens, len(self.layers), self.top_k):
            raise ValueError(
                f"experts of shape {experts.shape}; this model has {(len(self.layers), self.top_k)} a token"
            )
        ids = np.sort(experts.astype(np.int16).transpose(1, 0, 2), axis=2)
        gaps = ids.copy()
        gaps[:, :, 1:] -= ids[:, :, :-1] + 1
        if gaps.size and (gaps.min() < 0 or ids.max() >= self.num_experts):
            raise ValueError(f"not {self.top_k} different experts of {self.num_experts} for every token")
        planes = gaps.reshape(-1).astype(f"<u{_width(self.num_experts)}").view(np.uint8)
        planes = np.ascontiguousarray(planes.reshape(-1, _width(self.num_experts)).T)
        deflater = zlib_ng.compressobj(LEVEL, zlib_ng.DEFLATED, 15, 9, zlib_ng.Z_HUFFMAN_ONLY)
        packed = deflater.compress(planes.tobytes()) + deflater.flush()
        return Routes(num_tokens, len(self.layers), self.top_k, np.frombuffer(packed, np.uint8))

    def unpack(self, routes: Routes) -> Experts:
        """Return the ids, int16 [tokens, layers, k], ascending.  Raises ValueError if they are not of this form."""
        if (routes.num_layers, routes.top_k) != (len(self.layers), self.top_k) or routes.num_tokens < 0:
            told = f"{routes.num_layers} layers of {routes.top_k} experts"
            raise ValueError(f"{told}; this model has {len(self.layers)} of {self.top_k}")
        count, width = routes.num_tokens * routes.num_layers * routes.top_k, _width(self.num_experts)
        planes = np.frombuffer(_inflated(routes.packed, count * width), np.uint8).reshape(width, count)
        flat = np.ascontiguousarray(planes.T).reshape(-1).view(f"<u{width}").astype(np.int16)
        ids = flat.reshape(routes.num_layers, routes.num_tokens, self.top_k)
        for place in range(1, self.top_k):  # k short passes: a cumsum over the last axis takes ten times as long
            ids[:, :, place] += ids[:, :, place - 1] + 1
        if ids.size and (ids.max() >= self.num_experts or ids.min() < 0):
            raise ValueError(f"expert {ids.max()} of {self.num_experts}")
        return np.ascontiguousarray(ids.transpose(1, 0, 2))

    def of_layers(self, told: Experts) -> Experts:
        """Return what was told of the mixtures alone; told: [tokens, layers, k], of all layers or of these."""
        return told if told.shape[1] == len(self.layers) else told[:, list(self.layers)]


def fault_of(routes: Routes, num_tokens: int) -> str:
    """Describe a contradiction of routes to a sequence of num_tokens, or within them; "": none.  Needs no model."""
    sizes = routes.num_tokens, routes.num_layers, routes.top_k
    if min(sizes) < 0 or routes.num_tokens > num_tokens:
        return f"routes of {routes.num_tokens} tokens, {routes.num_layers} layers and {routes.top_k} experts"
    count = routes.num_tokens * routes.num_layers * routes.top_k
    faults = list[str]()
    for width in (1, 2):
        try:
            _inflated(routes.packed, count * width)
        except ValueError as error:
            faults.append(str(error))
    return f"routes that do not unpack: {faults[0]}" if len(faults) == 2 else ""


# transformers 4 and 5 and the families have different names for the same number.


def _is_mixture(model: Mapping[str, Any], layer: int) -> bool:
    kinds = model.get("mlp_layer_types")
    if isinstance(kinds, list) and layer < len(kinds):
        return bool(kinds[layer] == "sparse")
    if layer in (model.get("mlp_only_layers") or ()) or layer < int(model.get("first_k_dense_replace") or 0):
        return False
    if (frequency := model.get("moe_layer_freq")) and isinstance(frequency, int) and layer % frequency:
        return False
    return (layer + 1) % int(model.get("decoder_sparse_step") or 1) == 0


def _width(num_experts: int) -> int:
    return 1 if num_experts <= 1 << 8 else 2


def _inflated(packed: NDArray[np.uint8], num_bytes: int) -> bytes:
    inflater = zlib_ng.decompressobj()
    try:
        plain = inflater.decompress(np.ascontiguousarray(packed).data, num_bytes + 1)
    except _NOT_DEFLATED as error:
        raise ValueError(f"not deflated: {error}") from error
    if len(plain) != num_bytes or not inflater.eof or inflater.unused_data:
        raise ValueError(f"not the {num_bytes} bytes of its tokens")
    return plain
