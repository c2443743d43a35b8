"""A text environment of Gymnasium: "sample_games:Echo-v0"."""

import gymnasium


class Echo(gymnasium.Env[str, str]):
    """Says how long each action was, and pays for it; ends after some turns."""

    observation_space = action_space = gymnasium.spaces.Text(1000)

    def __init__(self, most: int = 3) -> None:
        self.most = most

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.num_turns = 0
        return f"begin with {self.np_random.integers(1000)}, {options}", {}

    def step(self, action):
        self.num_turns += 1
        is_over = self.num_turns >= self.most
        said = f"{len(action)} characters 🙂 <|im_end|> and {self.np_random.integers(1000)}"
        return said, 0.25, is_over, False, {"is_success": "won" in action}


class Counted(Echo):
    """Has no text for an action, and says when it is closed."""

    action_space = gymnasium.spaces.Discrete(2)
    num_closed = 0

    def close(self):
        Counted.num_closed += 1


gymnasium.register("Counted-v0", Counted)
gymnasium.register("Echo-v0", Echo)
