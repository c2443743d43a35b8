"""Train with TRL what bench/versus_trl.py and bench/sft.py train with rlhpc; run by the Python that has TRL.

    python trl_side.py SETTINGS.json

Prints a JSON line for each optimiser step: seconds by the clock and of CPU since the process began, and the reward, or
the tokens so far; of preferences one line, with what it finds over pairs.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import sys
import time
from pathlib import Path
from typing import Any

BEGAN_S = time.monotonic()
MARK = re.compile(r"####|;|=")  # as rlhpc/rewards/math_answer.py


def is_right(completion: str, answer: str) -> float:
    """Whether what follows the last mark is the answer."""
    return float(MARK.split(completion)[-1].strip() == answer)


def is_even(completion: str, answer: str) -> float:
    """A reward that says nothing of the length."""
    return float(len(completion) % 2 == 0)


REWARDS = {"integer_arithmetic": is_right, "bench.trl_side:is_even": is_even}


def sft(settings: dict[str, Any]) -> None:
    """SFTTrainer on prompts and completions, packed."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import SFTConfig, SFTTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(settings["threads"])
    is_apart = settings["strategy"] == "bfd"

    class Report(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
        def on_step_end(self, arguments: object, state: Any, control: object, **_: object) -> None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            line = {
                "step": state.global_step,
                "at_s": time.monotonic() - BEGAN_S,
                "tokens": state.num_input_tokens_seen,
            }
            print(json.dumps({**line, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)

    records = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    trainer = SFTTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        train_dataset=Dataset.from_list(records),
        callbacks=[Report()],
        args=SFTConfig(
            output_dir=settings["scratch"],
            max_steps=settings["steps"],
            per_device_train_batch_size=1 if is_apart else settings["rows"],
            gradient_accumulation_steps=settings["rows"] if is_apart else 1,
            max_length=settings["row"],
            packing=True,
            packing_strategy=settings["strategy"],
            learning_rate=settings["learning_rate"],
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            gradient_checkpointing=False,
            include_num_input_tokens_seen=True,
            use_cpu=True,
            bf16=False,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()


def dpo(settings: dict[str, Any]) -> None:
    """Print DPOTrainer's loss, accuracy and margin over pairs that are not learnt."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from trl import DPOConfig, DPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(settings["threads"])
    pairs = Dataset.from_list([json.loads(line) for line in Path(settings["data"]).read_text().splitlines()])
    model, reference = (
        AutoModelForCausalLM.from_pretrained(settings[name], dtype=torch.float32) for name in ("model", "reference")
    )
    trainer = DPOTrainer(
        model=model,
        ref_model=reference,
        processing_class=AutoTokenizer.from_pretrained(settings["reference"]),
        train_dataset=pairs,
        eval_dataset=pairs,
        args=DPOConfig(
            output_dir=settings["scratch"],
            beta=settings["beta"],
            per_device_eval_batch_size=settings["batch"],
            max_length=None,
            use_cpu=True,
            bf16=False,
            report_to=[],
            disable_tqdm=True,
        ),
    )
    found = trainer.evaluate()
    names = ("eval_loss", "eval_rewards/accuracies", "eval_rewards/margins")
    print(json.dumps({"dpo": [found[name] for name in names]}), flush=True)


def main() -> None:
    settings: dict[str, Any] = json.loads(Path(sys.argv[1]).read_text())
    if settings.get("trainer") == "dpo":
        dpo(settings)
        return
    if settings.get("trainer") == "sft":
        sft(settings)
        return
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    logging.disable(logging.WARNING)
    torch.set_num_threads(settings["threads"])
    reward = REWARDS[settings["task"]]
    means: list[float] = []

    def judge(completions: list[str], answer: list[str], **_: object) -> list[float]:
        given = [reward(text, right) for text, right in zip(completions, answer, strict=True)]
        means.append(sum(given) / len(given))
        return given

    class Report(TrainerCallback):  # type: ignore[misc]  # transformers is not typed here
        def on_step_end(self, arguments: object, state: Any, control: object, **_: object) -> None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            line = {"step": state.global_step, "at_s": time.monotonic() - BEGAN_S, "reward": means[-1]}
            print(json.dumps({**line, "cpu_s": used.ru_utime + used.ru_stime}), flush=True)

    records = [json.loads(line) for line in Path(settings["data"]).read_text().splitlines()]
    size = settings["groups"] * settings["group_size"]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(settings["model"], dtype=torch.float32),
        processing_class=AutoTokenizer.from_pretrained(settings["model"]),
        reward_funcs=judge,
        train_dataset=Dataset.from_list(records),
        callbacks=[Report()],
        args=GRPOConfig(
            output_dir=settings["scratch"],
            max_steps=settings["steps"],
            per_device_train_batch_size=size,
            num_generations=settings["group_size"],
            max_completion_length=settings["max_completion_tokens"],
            learning_rate=settings["learning_rate"],
            warmup_steps=settings["warmup_steps"],
            lr_scheduler_type="constant_with_warmup",
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            epsilon=0.2,
            loss_type="dapo",
            temperature=1.0,
            gradient_checkpointing=False,
            use_cpu=True,
            bf16=False,
            seed=settings["seed"],
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.train()


if __name__ == "__main__":
    main()
