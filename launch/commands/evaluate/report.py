"""The figures of an evaluation: a table for people, and summary.json.

Input: settings and samples.  Output: text and a document.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from launch.common.counted import counted
from launch.common.text_table import aligned
from rlhpc.evaluation.samples_file import EvaluatedSample
from rlhpc.evaluation.settings import EvaluationSettings
from rlhpc.evaluation.statistics import Estimate, JudgedSample, estimates
from rlhpc.types import FinishReason, Verdict


@dataclass(frozen=True, slots=True)
class Report:
    """What came of an evaluation."""

    title: str
    temperature: float
    samples_per_prompt: int
    num_prompts: int
    figures: dict[str, Estimate]
    mean_tokens: float  # of a completion
    truncated_share: float  # of completions
    num_not_judged: int  # samples with a verifier error

    def as_json(self) -> dict[str, Any]:
        """summary.json."""
        return asdict(self)

    def as_text(self) -> str:
        """A line for each figure, with its interval of 95 %."""
        how = "the most likely tokens" if self.temperature == 0 else f"temperature {self.temperature:g}"
        lines = [
            f"{self.title}: {counted(self.num_prompts, 'prompt')} × {counted(self.samples_per_prompt, 'sample')}, {how}"
        ]
        rows = [
            (f"  {name}", f"{each.value:.3f}", f"[{each.low:.3f}, {each.high:.3f}]", self._of_prompts(each))
            for name, each in self.figures.items()
        ]
        lines += aligned(rows)
        lines.append(f"  {self.mean_tokens:.0f} tokens on average, {100 * self.truncated_share:.1f} % cut off")
        if self.num_not_judged:
            lines.append(f"  left out: {counted(self.num_not_judged, 'sample')} that no verifier could judge")
        return "\n".join(lines)

    def _of_prompts(self, estimate: Estimate) -> str:
        return "" if estimate.num_prompts == self.num_prompts else f"of {estimate.num_prompts} prompts"


def wanted_samples(settings: EvaluationSettings, samples: Iterable[EvaluatedSample]) -> list[EvaluatedSample]:
    """Those that the settings ask for, each once; an earlier command may have asked for more.

    Without their texts, which are most of them and in no figure.
    """
    found = {
        (each.prompt, each.sample): replace(each, completion="", detail="", parts={})
        for each in samples
        if each.prompt < settings.num_prompts and each.sample < settings.samples_per_prompt
    }
    return [*found.values()]


def report_of(settings: EvaluationSettings, samples: Iterable[EvaluatedSample]) -> Report | None:
    """None: some of the samples that the settings ask for are missing."""
    found = wanted_samples(settings, samples)
    if len(found) < settings.num_samples:
        return None
    judged: defaultdict[int, list[JudgedSample]] = defaultdict(list)
    for each in found:
        if each.verdict != Verdict.VERIFIER_ERROR.value:
            is_correct = each.verdict == Verdict.CORRECT.value
            judged[each.prompt].append(JudgedSample(is_correct, each.answer, each.reward))
    return Report(
        title=settings.title,
        temperature=settings.temperature,
        samples_per_prompt=settings.samples_per_prompt,
        num_prompts=settings.num_prompts,
        figures=estimates([judged[prompt] for prompt in range(settings.num_prompts)], settings.samples_per_prompt),
        mean_tokens=float(np.mean([each.num_tokens for each in found])),
        truncated_share=float(np.mean([each.finish_reason == FinishReason.LENGTH.value for each in found])),
        num_not_judged=len(found) - sum(map(len, judged.values())),
    )
