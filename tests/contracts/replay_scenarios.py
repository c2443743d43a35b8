"""What each rank does in the tests of routing replay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from rlhpc.training.route_replay import without_routes
from tests.contracts.trainer_cluster import Rank
from tests.contracts.trainer_scenarios import Rows, train, weights_of


def obey_routes(rank: Rank, *, model: Path, rows: Rows, **settings: Any) -> dict[str, Any]:
    """Log-probabilities with routes, without, and of a reference, that is the same model; then a step."""
    backend = rank.open(model, routing_replay=True, **settings)
    mine = rank.share(rows, backend.dp_rank, backend.dp_size)
    backend.hold_reference("host")

    def logprobs(of_rows: Rows, **options: Any) -> list[Tensor]:
        return [row.cpu() for row in backend.logprobs(of_rows, **options)]

    seen: dict[str, Any] = {"dp_rank": backend.dp_rank, "given": logprobs(mine)}
    seen["own"] = logprobs(without_routes(mine))
    seen["of the reference"] = logprobs(mine, of_reference=True)
    seen["given again"] = logprobs(mine)
    seen["step"] = train(rank, backend, rows)
    seen["weights"] = weights_of(backend)
    backend.close()
    return seen
