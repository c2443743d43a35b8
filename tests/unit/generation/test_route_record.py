"""The record of routes beside a vLLM worker's KV cache, with a stand-in for vLLM's model runner."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from rlhpc.generation.route_record import RouteRecord

BLOCK, BLOCKS, LAYERS, TOP_K = 4, 8, 2, 2


class Router:
    def __init__(self) -> None:
        self.tell: Any = None

    def set_capture_fn(self, tell: Any) -> None:
        self.tell = tell


class FullAttentionSpec:
    block_size = BLOCK
    sliding_window = None


class Runner:
    """Requests with blocks of a cache; a step's experts are drawn from `step` and the token's place."""

    def __init__(self) -> None:
        self.routers = [Router() for _ in range(LAYERS)]
        modules = [SimpleNamespace(router=each, layer_id=place) for place, each in enumerate(self.routers)]
        self.model = SimpleNamespace(modules=lambda: reversed(modules))  # the record puts them in order
        self.kv_cache_config = SimpleNamespace(
            kv_cache_groups=[SimpleNamespace(kv_cache_spec=FullAttentionSpec())], num_blocks=BLOCKS
        )
        self.vllm_config = SimpleNamespace(scheduler_config=SimpleNamespace(max_num_seqs=1))
        self.requests: dict[str, Any] = {}
        self.slots = torch.zeros(64, dtype=torch.int64)
        table = SimpleNamespace(slot_mapping=SimpleNamespace(gpu=self.slots))
        self.input_batch = SimpleNamespace(block_table=SimpleNamespace(block_tables=[table]))
        self.step = 0
        self.true: dict[str, dict[int, Any]] = {}  # request → place → ids, as they were computed last

    def get_model(self) -> Any:
        return self.model

    def execute_model(self, output: Any) -> str:
        for request_id in output.finished_req_ids:
            self.requests.pop(request_id, None)
        places = []
        for request_id, number in output.num_scheduled_tokens.items():
            request = self.requests[request_id]
            first = request.num_computed_tokens
            places += [(request_id, place) for place in range(first, first + number)]
        for index, (request_id, place) in enumerate(places):
            block = self.requests[request_id].block_ids[0][place // BLOCK]
            self.slots[index] = block * BLOCK + place % BLOCK
        self.step += 1
        ids = [[[(self.step + place + layer) % 8, 8 + place % 3] for _, place in places] for layer in range(LAYERS)]
        for layer, router in enumerate(self.routers):
            router.tell(torch.tensor([*ids[layer], [0, 1]], dtype=torch.int32))  # padded behind
        for index, (request_id, place) in enumerate(places):
            self.true.setdefault(request_id, {})[place] = [ids[layer][index] for layer in range(LAYERS)]
        return "done"

    def computed(self, request_id: str, number: int) -> np.ndarray:
        return np.array([self.true[request_id][place] for place in range(number)])


def make() -> tuple[Runner, RouteRecord]:
    runner = Runner()
    return runner, RouteRecord(runner)


def run(runner: Runner, tokens: dict[str, int], **changes: Any) -> None:
    given = {"finished_req_ids": set(), "preempted_req_ids": None, "scheduled_new_reqs": []} | changes
    output = SimpleNamespace(num_scheduled_tokens=tokens, total_num_scheduled_tokens=sum(tokens.values()), **given)
    assert runner.execute_model(output) == "done"
    for request_id, number in tokens.items():
        runner.requests[request_id].num_computed_tokens += number


def admit(runner: Runner, request_id: str, blocks: list[int], computed: int = 0) -> list[Any]:
    runner.requests[request_id] = SimpleNamespace(block_ids=(blocks,), num_computed_tokens=computed)
    return [SimpleNamespace(req_id=request_id)]


def test_experts_of_a_request_are_known_as_soon_as_its_last_step_is_over():
    runner, record = make()
    run(runner, {"a-1f": 6}, scheduled_new_reqs=admit(runner, "a-1f", [3, 5]))  # vLLM has added a suffix
    run(runner, {"a-1f": 1})
    np.testing.assert_array_equal(record.take("a", 7), runner.computed("a-1f", 7))
    assert record.take("a", 7) is None


def test_experts_wait_for_whoever_asks_after_their_places_were_used_again():
    runner, record = make()
    run(runner, {"a": 6}, scheduled_new_reqs=admit(runner, "a", [3, 5]))
    expected = runner.computed("a", 6)
    new = admit(runner, "b", [5, 3])
    run(runner, {"b": 8}, finished_req_ids={"a"}, scheduled_new_reqs=new)
    np.testing.assert_array_equal(record.take("a", 6), expected)
    np.testing.assert_array_equal(record.take("b", 5), runner.computed("b", 5))


def test_a_cached_prompt_has_the_experts_of_the_request_that_computed_it():
    runner, record = make()
    run(runner, {"a": 6}, scheduled_new_reqs=admit(runner, "a", [3, 5]))
    run(runner, {"b": 2}, scheduled_new_reqs=admit(runner, "b", [3, 6], computed=4))
    found = record.take("b", 6)
    np.testing.assert_array_equal(found[:4], runner.computed("a", 4))
    assert [runner.true["b"][place] for place in (4, 5)] == found[4:].tolist()


def test_a_request_that_was_preempted_keeps_the_experts_with_which_its_tokens_were_sampled():
    """Twice, and the second time before it had computed again what it had."""
    runner, record = make()
    run(runner, {"a": 6}, scheduled_new_reqs=admit(runner, "a", [3, 5]))
    sampled = runner.computed("a", 6)
    run(runner, {"b": 4}, preempted_req_ids={"a"}, scheduled_new_reqs=admit(runner, "b", [3]))
    admit(runner, "a", [1, 2])  # resumed elsewhere in the cache
    run(runner, {"a": 3})
    runner.requests["a"].num_computed_tokens = 0
    run(runner, {"a": 8}, preempted_req_ids={"a"})
    found = record.take("a", 8)
    np.testing.assert_array_equal(found[:6], sampled)
    assert [runner.true["a"][place] for place in (6, 7)] == found[6:].tolist()
    assert found[:6].tolist() != runner.computed("a", 6).tolist()


def test_a_request_that_begins_anew_under_its_name_has_nothing_of_the_one_before():
    runner, record = make()
    run(runner, {"a": 6}, scheduled_new_reqs=admit(runner, "a", [3, 5]))
    run(runner, {"c": 1}, finished_req_ids={"a"}, scheduled_new_reqs=admit(runner, "c", [7]))
    run(runner, {"a": 5}, scheduled_new_reqs=admit(runner, "a", [1, 2]))
    np.testing.assert_array_equal(record.take("a", 5), runner.computed("a", 5))
    assert record.take("a", 5) is None


def test_what_nobody_takes_is_forgotten_and_what_was_not_recorded_is_not_guessed():
    runner, record = make()
    for number in range(4):
        name = f"{number}"
        finished = {f"{number - 1}"} if number else set()
        new = admit(runner, name, [number])
        run(runner, {name: 2}, finished_req_ids=finished, scheduled_new_reqs=new)
    assert record.take("0", 2) is None
    assert record.take("2", 2) is not None
    run(runner, {"d": 2}, scheduled_new_reqs=admit(runner, "d", [6, 7], computed=2))
    assert record.take("d", 4) is None  # nobody has told of its first two tokens
    assert record.take("unknown", 1) is None


def test_models_and_caches_that_cannot_be_recorded_are_named():
    runner = Runner()
    runner.model = SimpleNamespace(modules=lambda: [SimpleNamespace(router=object(), layer_id=3)])
    with pytest.raises(ValueError, match="router of layer 3, object, does not tell"):
        RouteRecord(runner)
    runner.model = SimpleNamespace(modules=list)
    with pytest.raises(ValueError, match="no router"):
        RouteRecord(runner)
    runner = Runner()
    runner.kv_cache_config.kv_cache_groups = [SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=4))]
    with pytest.raises(ValueError, match="no layer keeps the keys of a whole sequence"):
        RouteRecord(runner)
