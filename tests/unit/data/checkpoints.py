"""Datasets and the tokenizer part of HF checkpoints: of one token a character, and as Qwen and Llama 3 have them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ("<pad>", "<bos>", "<eos>", "<unk>", "<turn>", "</turn>")
CHATML = (
    "{{ bos_token }}{% for message in messages %}\n"
    "    {% generation %}\n"
    "<turn>{{ message['role'] }}: {{ message['content'] | trim }}</turn>\n"
    "    {% endgeneration %}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}<turn>assistant: {% endif %}"
)


def make_tokenizer_files(directory: Path, *, adds_bos: bool = False, **config: Any) -> Path:
    """A tokenizer of one token per character, as transformers would save it."""
    directory.mkdir(parents=True, exist_ok=True)
    characters = ["\n", *(chr(code) for code in range(32, 127))]
    vocabulary = {token: index for index, token in enumerate([*SPECIAL_TOKENS, *characters])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    if adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 1)])
    tokenizer.save(str(directory / "tokenizer.json"))
    settings = {"bos_token": "<bos>", "eos_token": {"content": "<eos>"}, **config}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    return directory


def write_jsonl(path: Path, records: Sequence[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def sums(count: int) -> list[dict[str, Any]]:
    """Records in the manner of GSM8K."""
    return [{"question": f"{i}+{i}=?", "answer": f"{i} and {i}.\n#### {2 * i}"} for i in range(count)]


# ---------------------------------------------------------- Tokenizers and chat templates as Qwen and Llama 3 have them

QWEN_TOKENS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool_call>", "</tool_call>", "<think>", "</think>",
)  # fmt: skip
LLAMA_TOKENS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|eot_id|>",
    "<|python_tag|>",
)  # fmt: skip

# Qwen2.5-Instruct, without the branch for structured tool calls.
QWEN25 = """
{%- if tools %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.\\n\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nFor each call, return <tool_call>\\n{\\"name\\": …}\\n</tool_call><|im_end|>\\n' }}
{%- elif messages[0]['role'] != 'system' %}
    {{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system', 'assistant') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen3: thoughts of turns before the last question are dropped, and the last turn gets an empty one.
QWEN3 = """
{%- set ns = namespace(last=messages|length - 1, open=true) %}
{%- for message in messages[::-1] %}
    {%- set index = messages|length - 1 - loop.index0 %}
    {%- if ns.open and message.role == 'user' %}{%- set ns.open = false %}{%- set ns.last = index %}{%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if loop.index0 > ns.last and loop.last %}
            {{- '<|im_start|>assistant\\n<think>\\n\\n</think>\\n\\n' + message.content.lstrip('\\n') }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + message.content.split('</think>')[-1].lstrip('\\n') }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""

# Qwen3-Coder and Qwen3.5: calls in tags, each argument a text; a turn begins with a thought.
QWEN35 = """
{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '\\n</tools>\\n\\nName the function and each argument in tags of their own.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role in ('user', 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>assistant\\n<think>\\n' + message.reasoning_content | default('') + '\\n</think>\\n\\n' }}
        {{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function is defined %}{%- set call = call.function %}{%- endif %}
            {%- if not loop.first %}{{- '\\n' }}{%- elif message.content | trim %}{{- '\\n\\n' }}{%- endif %}
            {{- '<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for key, value in call.arguments | items %}
                {%- set is_nested = value is mapping or (value is sequence and value is not string) %}
                {{- '<parameter=' + key + '>\\n' }}
                {{- value | tojson if is_nested else value | string }}{{- '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n<think>\\n' }}{%- endif %}
"""

# Llama-3.1-Instruct: headers, the beginning of the text spelt out, tools in the first user message.
LLAMA3 = """
{{- bos_token }}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nCutting Knowledge Date: December 2023\\n\\n<|eot_id|>' }}
{%- for message in messages %}
    {%- if loop.first and tools %}
        {{- '<|start_header_id|>user<|end_header_id|>\\n\\nGiven these functions, please respond with JSON.\\n' }}
        {%- for t in tools %}{{- t | tojson(indent=4) }}{{- '\\n\\n' }}{%- endfor %}
        {{- message['content'] | trim + '<|eot_id|>' }}
    {%- elif message.role == 'tool' or message.role == 'ipython' %}
        {{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' }}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- '<|eot_id|>' }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

TEMPLATES = {"qwen2.5": QWEN25, "qwen3": QWEN3, "qwen3.5": QWEN35, "llama3": LLAMA3}
_TEXT = [
    "The quick brown fox jumps over the lazy dog. What is 12 times 34? system user assistant tool ipython",
    '{"name": "search", "arguments": {"query": "a few words"}} <tool_response>\nnothing was found\n</tool_response>',
]


def make_chat_model(directory: Path, family: str, template: str | None = None) -> Path:
    """The tokenizer files of a checkpoint of this family."""
    directory.mkdir(parents=True, exist_ok=True)
    special = LLAMA_TOKENS if family == "llama3" else QWEN_TOKENS
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TEXT, trainer)
    tokenizer.save(str(directory / "tokenizer.json"))
    eos = "<|eot_id|>" if family == "llama3" else "<|im_end|>"
    settings = {"eos_token": eos, "chat_template": TEMPLATES[family] if template is None else template}
    if family == "llama3":
        settings["bos_token"] = "<|begin_of_text|>"
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    others = ("<|eom_id|>", "<|end_of_text|>") if family == "llama3" else ("<|endoftext|>",)
    ids = [tokenizer.token_to_id(token) for token in (eos, *others)]
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    return directory
