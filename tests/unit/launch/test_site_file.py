"""What a site file may say, what is refused and how, and that the pages list every key.

`python -m tests.unit.launch.test_site_file` prints the tables of slurm/README.md anew.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path, PosixPath
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import pytest
from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from launch.plan.site_file import SECTIONS, CommonConfig, Site, load_site, slurm_time, walltime_s
from rlhpc.config.reference import meaning_of
from rlhpc.protocol.errors import ConfigError
from tests.unit.launch.regenerate_scripts import SITE_FILES

ROOT = Path(__file__).parents[3]
SMALLEST = '[trainer]\ngpu = "h100"\n[generation]\ngpu = "h100"\n'


def load(tmp_path: Path, text: str) -> Site:
    path = tmp_path / "site.toml"
    path.write_text(SMALLEST + text)
    return load_site(path)


def refusal(tmp_path: Path, text: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, text)
    said = str(refused.value)
    assert "\n" not in said
    return said.removeprefix(f"{tmp_path / 'site.toml'}: ")


# ------------------------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("path", SITE_FILES, ids=lambda path: path.stem)
def test_a_shipped_site_file_is_valid_and_says_where_runs_may_lie(path: Path) -> None:
    site = load_site(path)
    assert site.cluster is not None
    assert site.cluster.name == path.stem


def test_two_sections_are_enough_for_a_check_of_memory(tmp_path: Path) -> None:
    site = load(tmp_path, "")
    assert site.cluster is None
    assert site.trainer.memory_gib == 79.1


def test_without_a_gpu_no_memory_is_known() -> None:
    site = Site.model_validate({"trainer": {}, "generation": {}})
    with pytest.raises(ConfigError, match="gpu: missing"):
        _ = site.trainer.memory_gib


def test_a_site_is_frozen_down_to_its_lists(tmp_path: Path) -> None:
    site = load(tmp_path, '[common]\nextra = ["--licenses=a:1"]\n')
    assert site.common.extra == ("--licenses=a:1",)
    with pytest.raises(ValidationError):
        site.common.account = "other"  # type: ignore[misc]  # that is what is tested


@pytest.mark.parametrize(
    ("value", "seconds", "written"),
    [
        (240, 14_400, "4:00:00"),
        ("240", 14_400, "4:00:00"),
        ("4:00:00", 14_400, "4:00:00"),
        ("0:00:30", 30, "0:00:30"),
        ("36:00:00", 129_600, "1-12:00:00"),
        ("2-12", 216_000, "2-12:00:00"),
        ("2-12:30", 217_800, "2-12:30:00"),
        ("2-12:30:15", 217_815, "2-12:30:15"),
    ],
)
def test_a_time_limit_is_read_as_slurm_reads_it(value: object, seconds: int, written: str) -> None:
    assert walltime_s(value) == seconds
    assert slurm_time(seconds) == written
    assert walltime_s(written) == seconds


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("4:00", 'minutes and seconds; legal: "4:00:00" for hours'),
        ("0:00:00", "longer than 0"),
        (0, "longer than 0"),
        (-5, "not a time limit; legal: minutes"),
        (True, "not a time limit"),
        (1.5, "not a time limit"),
        ("4h", "not a time limit"),
        ("UNLIMITED", "not a time limit"),
        ("1:75:00", "not a time of day"),
        ("1-25:00:00", "not a time of day"),
        ("", "not a time limit"),
        (12345678901234567890123, "longer than a year; legal: up to 366 days"),
        ("9" * 23 + "-00", "longer than a year"),
        (527_041, "longer than a year"),
    ],
)
def test_a_time_limit_that_is_none_or_reads_two_ways_is_refused(value: object, said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        walltime_s(value)


# ----------------------------------------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[clustr]\n", ["clustr={}: unknown key; legal: cluster, common", "(did you mean cluster?)"]),
        ("[cluster]\n", ["cluster.shared_directory: missing"]),
        ('[cluster]\nshared_directory = "work"', ["cluster.shared_directory='work': legal: an absolute path"]),
        ('[cluster]\nshared_directory = "/a"\nplacement = "het"', ["cluster.placement='het'", "'hetjob' or 'jobs'"]),
        ('[cluster]\nshared_directory = "/a"\nmail_events = ["EN"]', ["cluster.mail_events.0='EN'", "'END', 'FAIL'"]),
        (
            '[cluster]\nshared_directory = "/a"\nmail_events = ["ALL"]',
            ["cluster.mail_events=('ALL',): ", "without mail"],
        ),
        ('gres_type = "h100"', ["generation.gres_type='h100': ", "without gpus_per_node", "legal: both"]),
        ('gres_type = "gpu:h100:4"', ["generation.gres_type='gpu:h100:4': ", "legal: the TYPE in gpu:TYPE:N"]),
        ('gpu_request = "gpus-per-task"', ["generation.gpu_request='gpus-per-task': ", "without gpus_per_node"]),
        ('[cluster]\nshared_directory = "/a"\nwarn_s = 0', ["cluster.warn_s=0", "legal: above 0"]),
        (
            f'[cluster]\nshared_directory = "/a"\nstall_s = {10**23}',
            ["cluster.stall_s=100000000000000000000000: legal: below 2^63"],
        ),
        ('[common]\npartitions = "gpu"', ["common.partitions='gpu': unknown", "(did you mean partition?)"]),
        ('[common]\npartition = "gpu --wrap=x"', ["common.partition='gpu --wrap=x'", "would break a script"]),
        ('[common]\naccount = "a\\n#SBATCH --wrap=x"', ["common.account=", "would break a script"]),
        ('[common]\nqos = "--qos"', ["common.qos='--qos'"]),
        ('[common]\ntime = "4:00"', ["common.time='4:00'", '"4:00:00" for hours']),
        ('[common]\nextra = ["--mem=4G"]', ["common.extra.0='--mem=4G'", "legal: memory_gib_per_task or memory_gib_"]),
        ('[common]\nextra = ["-p gpu"]', ["common.extra.0='-p gpu'", "legal: partition"]),
        ('[common]\nextra = ["--array=0-3"]', ["common.extra.0='--array=0-3'", "the plan relies on its own"]),
        ('[common]\nextra = ["--cpus-per-gpu=4"]', ["common.extra.0='--cpus-per-gpu=4'", "legal: cpus_per_gpu"]),
        ('[common]\nextra = ["--licenses=\'a"]', ["common.extra.0=", "legal: the part after #SBATCH"]),
        ('[common]\nextra = ["licenses"]', ["common.extra.0='licenses'", "legal: the part after #SBATCH"]),
        ('[common]\nextra = ["--a=b\\nrm -r x"]', ["common.extra.0=", "legal: the part after #SBATCH"]),
        ('[common]\nextra = "--licenses=a"', ["common.extra='--licenses=a'", "legal: a list"]),
        ("[controller]\ncpus_per_task = 0", ["controller.cpus_per_task=0", "legal: above 0"]),
        ("[controller]\ngpus_per_node = 1", ["controller.gpus_per_node=1: unknown key; legal: cpus_per_task"]),
        ("[rewards]\nmemory_gib_per_task = 1.5", ["rewards.memory_gib_per_task=1.5", "legal: a whole number"]),
        ('[prologue]\nnccl_interface = "^lo"', ["prologue.nccl_interface='^lo'"]),
        ('[prologue]\nenvironment = {"A B" = "c"}', ["prologue.environment.A B"]),
        ("[prologue]\nenvironment = {A = 1}", ["prologue.environment.A=1", "legal: a string"]),
        ('[prologue]\ncommands = ["a\\nb"]', ["prologue.commands.0='a\\nb'", "single line"]),
        ('[prologue]\ncommands = ["ulimit -n 65536 \\\\"]', ["prologue.commands.0=", "ends in a backslash"]),
        ('[prologue]\nvenv = "/a"\nimage = "/b"\ncode = "/c"', ["prologue.image='/b': together with venv"]),
        ('[prologue]\nimage = "/b"', ["prologue.code: missing"]),
        ('[prologue]\nconda_environment = "x"', ["prologue.conda_environment='x': needs conda"]),
        ('[prologue]\nvenv = ".venv"', ["prologue.venv='.venv': legal: an absolute path"]),
        ('[prologue]\nbinds = ["scratch"]', ["prologue.binds.0='scratch'"]),
    ],
)
def test_a_fault_is_said_with_key_value_and_what_is_legal(tmp_path: Path, text: str, words: list[str]) -> None:
    said = refusal(tmp_path, text)
    for word in words:
        assert word in said


@pytest.mark.parametrize(
    "directive",
    ["--wait", "-W", "--test-only", "--clusters=all", "-M all", "--cluster=all", "--parsable", "--hetjob",
     "--het-group=1", "--cpus-per-gpu=4", "--ntasks-per-gpu=1", "--ntasks-per-socket=1", "--ntasks-per-core=1",
     "--tres-per-task=cpu:2", "--gpus-per-socket=1", "--uid=0", "--gid=0", "--quiet", "-Q", "--help", "--usage", "-V",
     "--export-file=x", "--licenses=a:1 --array=0-3", "-sW", "-Ot1"],
)  # fmt: skip
def test_a_directive_that_wrecks_a_submission_is_refused(tmp_path: Path, directive: str) -> None:
    assert f"common.extra.0={directive!r}: " in refusal(tmp_path, f'[common]\nextra = ["{directive}"]')


@pytest.mark.parametrize(
    ("directive", "said"),
    [
        ("--parti=gpu", "sbatch may read it as --partition: set by a separate key; legal: partition"),
        ("--wra=x", "sbatch may read it as --wrap: the plan relies on its own value"),
        ("--exclusiv", "sbatch may read it as --exclusive"),
        ("--arr=0-3", "sbatch may read it as --array"),
        ("--ntasks-per-n=2", "sbatch may read it as --ntasks-per-node"),
    ],
)
def test_an_abbreviation_hides_no_directive_of_ours(tmp_path: Path, directive: str, said: str) -> None:
    assert said in refusal(tmp_path, f'[common]\nextra = ["{directive}"]')


@pytest.mark.parametrize(
    "directive",
    ["--licenses=a:1", "-L a:1", "--exclude=a1", "-x a1", "--nodelist=a[1-3]", "--begin=now+1hour", "--nice=-100",
     "--gres-flags=enforce-binding", "--wait-all-nodes=1", "--time-min=10", "--tmp=100G", "--mem-bind=local",
     "--cluster-constraint=x", "--gpu-bind=none", "--tres-bind=gres/gpu:none", "--use-min-nodes", "--deadline=now+1day",
     "--switches=1@10", "--kill-on-invalid-dep=yes", "--wckey=x", "--prefer=ib", "-vv"],
)  # fmt: skip
def test_other_directives_are_taken_as_they_stand(tmp_path: Path, directive: str) -> None:
    assert load(tmp_path, f'[common]\nextra = ["{directive}"]').common.extra == (directive,)


def test_a_request_for_gpus_has_three_forms(tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(SMALLEST + 'gpu_request = "gpus"\n')
    with pytest.raises(ConfigError, match=r"generation\.gpu_request='gpus': legal: 'gres', 'gpus-per-node' or"):
        load_site(path)


@pytest.mark.parametrize(
    ("text", "legal"),
    [
        ('[common]\npartition = "a b"', "one word without spaces, quotes, backslashes and #"),
        ('[prologue]\nnccl_interface = "^lo"', "the name of a network interface, or several with commas"),
        ('[prologue]\nbinds = ["scratch"]', "an absolute path without spaces and commas"),
        ('[prologue]\nenvironment = {"A B" = "c"}', "letters, digits and _, no digit first"),
    ],
)
def test_what_would_break_a_script_is_said_in_words(tmp_path: Path, text: str, legal: str) -> None:
    assert f"would break a script; legal: {legal}" in refusal(tmp_path, text)


def test_every_fault_of_a_file_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load(tmp_path, '[cluster]\nname = "a b"\n[common]\ntime = 0\n')
    assert len(str(refused.value).splitlines()) == 3


# --------------------------------------------------------------------------------------------------------------- pages


def table_of(section: str) -> str:
    """The table of one section, as slurm/README.md holds it; keys of [common] stand only there."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    model = SECTIONS[section]
    for name, info in model.model_fields.items():
        if section == "common" or name not in CommonConfig.model_fields:
            meaning = meaning_of(model, name)
            rows.append(f"| `{name}` | {_type_in_words(info, meaning)} | {_default_in_words(info)} | {meaning} |")
    return "\n".join(rows)


def _type_in_words(info: FieldInfo, meaning: str) -> str:
    if info.alias == "time" or meaning.startswith("Time limit"):
        return "integer or text"
    annotation = info.annotation
    parts = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return " or ".join(_part_in_words(part) for part in parts if part is not type(None))


def _part_in_words(part: Any) -> str:
    if hasattr(part, "__metadata__"):
        part = part.__origin__
    match get_origin(part):
        case None:
            words = {int: "integer", float: "number", bool: "`true` or `false`", str: "text", Path: "path"}
            return words[part]
        case origin if origin is Literal:
            return " or ".join(f'`"{value}"`' for value in get_args(part))
        case origin if origin is dict:
            return "table of texts"
        case _:
            inner = _part_in_words(get_args(part)[0])
            return "list of texts" if inner == "text" else f"list of {inner}"


def _default_in_words(info: FieldInfo) -> str:
    if info.default is PydanticUndefined:
        return "`{}`" if info.default_factory else "**required**"
    match info.default:
        case None:
            return "none"
        case bool():
            return f"`{str(info.default).lower()}`"
        case tuple():
            return f"`{list(info.default)}`".replace("'", '"')
        case str() | PosixPath():
            return f'`"{info.default}"`'
        case _:
            return f"`{info.default}`"


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_stands_in_the_page_with_its_type_and_default(section: str) -> None:
    page = (ROOT / "slurm" / "README.md").read_text(encoding="utf-8")
    assert table_of(section) in page, f"slurm/README.md is behind; paste:\n{table_of(section)}"


@pytest.mark.parametrize("section", SECTIONS)
def test_the_example_shows_every_key(section: str) -> None:
    text = (ROOT / "slurm" / "sites" / "example.toml").read_text(encoding="utf-8")
    parts = re.split(r"^(?:# )?\[([\w.]+)\]\n", text, flags=re.MULTILINE)
    shown = dict(zip(parts[1::2], parts[2::2], strict=True))
    if section == "prologue":
        assert "prologue.environment" in shown
    own = [
        name for name in SECTIONS[section].model_fields if section == "common" or name not in CommonConfig.model_fields
    ]
    if section in ("generation", "evaluation"):
        return  # the same keys as [trainer]
    missing = [
        name for name in own if name != "environment" and not re.search(rf"^(# )?{name} =", shown[section], re.M)
    ]
    assert missing == []


if __name__ == "__main__":
    for title in SECTIONS:
        sys.stdout.write(f"### [{title}]\n\n{table_of(title)}\n\n")
