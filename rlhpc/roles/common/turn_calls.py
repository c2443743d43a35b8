"""Environment steps as calls: send a turn of a dialogue to its environment in a worker pool, get its observation.

Generators call over the network, evaluations call a pool of their own, with the same messages.
"""

from __future__ import annotations

from rlhpc.config_data import DataConfig
from rlhpc.data.records import reference_of
from rlhpc.messages import TurnReply, TurnRequest
from rlhpc.rewards.frames import Dialogue
from rlhpc.rewards.pool import RewardPool
from rlhpc.roles.common.dialogue import Taken
from rlhpc.types import RolloutRequest, Verdict


def turn_request(request: RolloutRequest, dataset: DataConfig, taken: Taken) -> TurnRequest:
    """What an environment is asked after the turns so far; request_id 0: the RPC client numbers calls."""
    prompt = request.prompt
    return TurnRequest(
        request_id=0,
        dialogue=f"{request.request_id}:{prompt.prompt_id}",
        environment=dataset.environment,
        record=prompt.reference,
        turns=taken.turns,
        task=prompt.task,
        answer=taken.answer,
        reference=reference_of(prompt.reference, dataset.reference_field),
        is_last=taken.is_last,
    )


async def answered(pool: RewardPool, request: TurnRequest) -> TurnReply:
    """What the environment says; a failure is a verdict, verifier_error."""
    turn = await pool.answer(
        Dialogue(
            key=request.dialogue,
            environment=request.environment,
            record=request.record,
            turns=list(request.turns),
            task=request.task,
            answer=request.answer,
            reference=request.reference,
            is_last=request.is_last,
        )
    )
    verdict = Verdict.CORRECT if turn.is_correct else Verdict.WRONG
    return TurnReply(
        request_id=request.request_id,
        messages=turn.messages,
        reward=turn.reward,
        verdict=(Verdict.VERIFIER_ERROR if turn.error else verdict).value,
        reward_parts=turn.parts,
        detail=turn.error or turn.detail,
        is_done=turn.is_done,
        is_over=turn.is_over,
        failure=turn.failure,
    )
