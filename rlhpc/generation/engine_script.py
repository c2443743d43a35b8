"""The settings of a scripted engine (behaviour and speed), and where a run has them."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from rlhpc.config import Config


@dataclass(frozen=True, slots=True, kw_only=True)
class Script:
    """Settings of a scripted engine.  A token takes token_s + sample_s · n seconds while n rollouts are decoded."""

    seed: int = 0
    vocab_size: int = 100
    stop_token_id: int = 2
    stop_probability: float = 0.05
    token_s: float = 0.0  # both 0: as fast as the event loop turns
    sample_s: float = 0.0
    max_num_seqs: int = 256
    static_batches: bool = False  # none joins a batch after its first token; the next begins when all have ended
    drains: bool = False  # before new weights are loaded, running rollouts finish, and no others begin
    die_after_tokens: int | None = None  # the engine dies after generating this many
    tally: str = ""  # a file that gets a line "group sample position pid" for every token drawn; "": none

    @classmethod
    def of(cls, config: Config, *, seed: int) -> Script:
        """The script of a run, with its model's vocabulary; only the model's config.json is read, if present.

        Its table "scripted_engine" may have the other fields.
        """
        script = cls(seed=seed, max_num_seqs=config.generation.max_num_seqs)
        path = config.model.path / "config.json"
        if not path.exists():
            return script
        model = json.loads(path.read_text())
        eos = model.get("eos_token_id", script.stop_token_id)
        return replace(
            script,
            vocab_size=int(model.get("vocab_size", script.vocab_size)),
            stop_token_id=int(eos[0] if isinstance(eos, list) else eos),
            **model.get("scripted_engine", {}),
        )
