"""Run directories with texts in them: a byte-level tokenizer beside them, and groups that a test makes up."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhpc.base.run_directory import RunLayout
from rlhpc.buffer.batches import DropReason, ResolvedGroup
from rlhpc.buffer.segments import SegmentWriter
from rlhpc.config.file import write_resolved
from rlhpc.protocol.types import FinishReason, Prompt, Rollout, RolloutGroup, ScoredRollout, Verdict
from tests.unit.buffer.rollout_samples import ManualClock
from tests.unit.launch.site_kit import config_of

EOS = "<eos>"


def make_tokenizer(model_dir: Path) -> Tokenizer:
    """Bytes are tokens, as in the tokenizers of most models, and one token ends."""
    model_dir.mkdir()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    tokenizer.save(str(model_dir / "tokenizer.json"))
    (model_dir / "tokenizer_config.json").write_text(json.dumps({"eos_token": EOS}))
    return tokenizer


class TextRun:
    """A run whose groups say what a test wants."""

    def __init__(self, root: Path, *overrides: str) -> None:
        root.mkdir()
        self.model = root / "model"
        self.tokenizer = make_tokenizer(self.model)
        self.layout = RunLayout(root / "run")
        for directory in (self.layout.root, self.layout.rollouts):
            directory.mkdir()
        words = (f"run.directory={self.layout.root}", f"model.path={self.model}", "admission.group_size=2")
        self.config = config_of(*words, "admission.groups_per_step=2", "trainer.warmup_steps=0", *overrides)
        write_resolved(self.config, self.layout, "")
        self._num_groups = self._num_segments = 0

    def tokens(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer.encode(text).ids, np.int32)

    def group(
        self, prompt: str, completions: Sequence[tuple[str, float]], *, step: int = -1, task: str = "adding"
    ) -> ResolvedGroup:
        """Of completions with their rewards; a negative reward is a failed verifier.  step −1: dropped."""
        number, self._num_groups = self._num_groups, self._num_groups + 1
        asked = Prompt(number, task, self.tokens(prompt), "#### 7")
        members = [self._scored(number, index, asked, *each) for index, each in enumerate(completions)]
        group = RolloutGroup(number, asked, max(0, step - 1), tuple(members))
        if step < 0:
            return ResolvedGroup(group, drop_reason=DropReason.NO_SPREAD)
        return ResolvedGroup(group, step, trained_version=step, applied=True)

    def _scored(self, group_id: int, index: int, prompt: Prompt, text: str, reward: float) -> ScoredRollout:
        token_ids = self.tokens(text + EOS)
        verdict = Verdict.VERIFIER_ERROR if reward < 0 else Verdict.CORRECT if reward > 0.5 else Verdict.WRONG
        rollout = Rollout(
            group_id,
            index,
            prompt,
            token_ids,
            -np.linspace(0, 2, len(token_ids), dtype=np.float32),
            np.sort(np.arange(len(token_ids), dtype=np.int32) % 3),
            np.ones(len(token_ids), np.bool_),
            FinishReason.STOP,
        )
        return ScoredRollout(rollout, reward, verdict, {"answer": reward}, f"extracted {index}")

    def seal(self, groups: Iterable[ResolvedGroup]) -> None:
        """Into one segment more."""
        writer = SegmentWriter(
            self.layout.rollouts,
            self._num_segments,
            run_name="seen",
            run_attempt=0,
            max_groups=1_000_000,
            max_s=60.0,
            clock=ManualClock(),
        )
        for resolved in groups:
            writer.add(resolved)
        writer.seal_all()
        self._num_segments = writer.next_index
