"""An environment of the library verifiers: "sample_verifiers"."""

import verifiers as vf
from datasets import Dataset


class Echo(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        last = messages[-1]["content"] if isinstance(messages[-1], dict) else messages[-1].content
        if "break" in last:
            raise vf.Error("the board fell off the table")
        return [{"role": "user", "content": f"{len(last)} characters 🙂 <|im_end|> and {state['answer']}"}]


def half_of_turns(completion, answer) -> float:
    return 0.5 * sum(message["role"] == "assistant" for message in completion)


def load_environment(max_turns: int = 3):
    rows = Dataset.from_list([{"question": f"What is {n}?", "answer": str(n)} for n in range(3)])
    return Echo(dataset=rows, max_turns=max_turns, rubric=vf.Rubric(funcs=[half_of_turns]))
