"""The state of torch's random number generators, as text that fits a JSON file."""

from __future__ import annotations

import base64

import numpy as np
import torch


def read_rng(device: torch.device) -> dict[str, str]:
    """Return the generators' states by device type, base64."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {name: base64.b64encode(state.numpy().tobytes()).decode() for name, state in states.items()}


def write_rng(states: dict[str, str], device: torch.device) -> None:
    """Restore the states of read_rng; states of a device type that is missing here are skipped."""
    for name, text in states.items():
        state = torch.from_numpy(np.frombuffer(base64.b64decode(text), dtype=np.uint8).copy())
        if name == "cpu":
            torch.set_rng_state(state)
        elif name == device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
