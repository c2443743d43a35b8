"""`rlhpc check`: find errors in a run file before a start."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

from launch.checks.bias import biases, doubtful, unusual
from launch.checks.memory_verdict import memory_report
from launch.checks.model_files import other_tokens, refuse_made_up_tensors
from launch.checks.own_code import try_own_code, untried_code
from launch.checks.preflight import (
    Findings,
    demonstration_lines,
    first_prompt,
    has_stage_before,
    preflight,
    prompt_warnings,
    refuse_heads_of_gpus,
    route_lines,
    stage_of,
    stop_tokens,
)
from launch.checks.services import unreachable
from launch.checks.teachers import teacher_warnings
from launch.commands.arguments import refuse_missing
from launch.common.text import counted
from launch.doctor.gpus import gpus_here
from launch.doctor.site import filesystem_type, software_not_here
from launch.evaluate.evaluation import preview_evaluations
from launch.plan.gpu_map import GpuMap, VisibleGpus, map_gpus
from launch.plan.processes import describe_plan
from launch.plan.site_file import load_site
from rlhpc.base.host_address import refuse_foreign_network
from rlhpc.base.own_tools import name_of, schemas_of_servers
from rlhpc.base.ownership import holds_something
from rlhpc.base.run_directory import RunLayout
from rlhpc.config.file import load_config
from rlhpc.config.rules import Config
from rlhpc.data.prompts import dialogue_template
from rlhpc.protocol.errors import ConfigError

_OF_THE_KERNEL = ("proc", "sysfs", "cgroup", "cgroup2", "devpts", "debugfs", "tracefs", "securityfs", "bpf", "mqueue")
_LONGEST_NAME = 255  # bytes, of one name in a path


def check(options: argparse.Namespace) -> int:
    """Check a run file, or the files of a run.  Raises ConfigError for what is illegal."""
    if options.run_file.is_dir():
        from launch.verify.audit import check_run_directory  # loads zmq

        return check_run_directory(options)
    if not options.run_file.exists() and options.run_file.suffix != ".toml":
        refuse_missing(options.run_file, "file or directory")
    return _check_run_file(options)


def _check_run_file(options: argparse.Namespace) -> int:
    """Print the plan, the model, the data and the memory of a run."""
    if options.json:
        raise ConfigError(f"--json: only for a run directory, and {options.run_file} is not one")
    config = load_config(options.run_file, options.overrides)
    if has_stage_before(config):
        _check_stage(stage_of(config))
    if config.is_supervised:
        config = stage_of(config)
    here = VisibleGpus() if options.site else gpus_here(os.environ)  # a site's GPUs are on other machines
    gpus = GpuMap() if options.site else map_gpus(config, here)
    if not options.site:
        refuse_foreign_network(has_cuda=config.trainer.device == "cuda", has_vllm=config.generation.engine == "vllm")
        _refuse_place(config.run_directory)
    has_gpus = bool(options.site or here.words)
    findings, evaluations = preflight(config), preview_evaluations(config, has_gpus=has_gpus)
    if not has_gpus:
        refuse_heads_of_gpus(config, findings.model)
    memory = memory_report(config, findings.model, findings.shape, options.site, gpus, here.memory_gib)
    refuse_made_up_tensors(config.model.path, findings.model)
    own = untried_code(config) if options.site else try_own_code(config)
    print(describe_plan(config, RunLayout(config.run_directory), gpus))
    size = f", {_millions_or_more(findings.shape.num_parameters)} parameters" if findings.shape else ""
    print(f"model       {config.model.path} ({findings.model_type}, context {findings.max_positions}{size})")
    lines = _about_demonstrations(config, findings) if config.is_supervised else _about_prompts(config, findings)
    print("\n".join(lines))
    sandbox = [f"sandbox     {findings.sandbox}"] if findings.sandbox else []
    sandbox += [f"containers  {findings.containers}"] if findings.containers else []
    software = software_not_here(load_site(options.site)) if options.site else []
    odd = [f"warning     {line}" for line in unusual(config)]
    if not config.is_supervised:
        odd = [
            *biases(config),
            *odd,
            *(
                f"warning     {line}"
                for line in unreachable([each for each in config.service if each.kind != "teacher"])
            ),
            *doubtful(config, num_cores=None if options.site else len(os.sched_getaffinity(0))),
        ]
    print("\n".join([*own, *sandbox, *evaluations, memory, *software, *odd]))
    return 0


def _check_stage(stage: Config) -> None:
    """Print the plan of the supervised fine-tuning before a run.  Raises ConfigError, DataError."""
    findings = preflight(stage)
    print(
        "\n".join(
            [describe_plan(stage, RunLayout(stage.run_directory), GpuMap()), *demonstration_lines(stage, findings)]
        )
    )
    print("then")


def _about_demonstrations(config: Config, findings: Findings) -> Iterator[str]:
    yield from demonstration_lines(config, findings)
    yield from other_tokens(config.model.path, findings.tokenizer)


def _about_prompts(config: Config, findings: Findings) -> Iterator[str]:
    """Yield lines about datasets and ends of completions, and warnings."""
    total = sum(dataset.weight for dataset in config.data)
    for place, (dataset, found) in enumerate(zip(config.data, findings.datasets, strict=True)):
        share = f"{dataset.title}, {dataset.weight / total:.0%} of the prompts: " if len(config.data) > 1 else ""
        yield (
            f"data        {share}{counted(found.num_records, 'record')}, "
            f"prompts of {found.mean_prompt_tokens:.0f} tokens on average, "
            f"{found.longest_prompt_tokens} at most ({found.longest_source})"
        )
        if 0 < found.num_references_checked < found.num_records:
            yield f"references  {share}of the first {found.num_references_checked} records; the others were not read"
        yield from first_prompt(config, place, found)
    has_dialogues = any(dataset.environment for dataset in config.data)
    template = dialogue_template(config, findings.tokenizer) if has_dialogues else None
    tokenizer = findings.tokenizer
    for name, schemas in schemas_of_servers(config.tool_servers).items():
        yield f"tools       mcp.{name}: {', '.join(map(name_of, schemas))}"
    yield stop_tokens(tokenizer, template, config.generation.stop)
    yield from (f"warning     {each}" for each in prompt_warnings(config, tokenizer, findings.datasets))
    yield from route_lines(config, findings)
    yield from (f"warning     {each}" for each in teacher_warnings(config, tokenizer))
    yield from other_tokens(config.model.path, tokenizer, [found.example for found in findings.datasets])


def _refuse_place(directory: Path) -> None:
    """Raise ConfigError if a run cannot make its directory, or would refuse the existing one."""
    if long := [part for part in directory.parts if len(os.fsencode(part)) > _LONGEST_NAME]:
        raise ConfigError(
            f"run.directory={str(directory)!r}: {long[0][:20]!r}… is too long for a name, {len(os.fsencode(long[0]))} "
            f"bytes; legal: {_LONGEST_NAME} or less"
        )
    if not RunLayout(directory).is_run and holds_something(directory):
        raise ConfigError(f"{directory} exists and is not a run directory; legal: another run.directory")
    there = next(place for place in (directory, *directory.parents) if place.exists())
    if (kind := filesystem_type(there)) in _OF_THE_KERNEL:
        raise ConfigError(
            f"run.directory={str(directory)!r}: {there} is of the kernel ({kind}), which keeps no files; legal: a "
            "directory of yours"
        )
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        why = "you may not write there" if there.is_dir() else "it is not a directory"
        raise ConfigError(
            f"run.directory={str(directory)!r} cannot be created in {there}: {why}; legal: a directory of yours"
        )


def _millions_or_more(number: int) -> str:
    """Format with three digits, in millions up to a thousand of them: "0.304 M", "7.62 G"."""
    return f"{number / 1e6:.3g} M" if number < 1e9 else f"{number / 1e9:.3g} G"
