from __future__ import annotations

import json
from pathlib import Path

from rlhpc.generation.vllm_requests import end_of_sequence_ids


def test_all_end_of_sequence_tokens_that_the_checkpoint_names_count(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 7]}))
    assert end_of_sequence_ids(tmp_path) == {2, 7}


def test_a_checkpoint_may_name_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": None}))
    assert end_of_sequence_ids(tmp_path) == frozenset()
