"""The file to send when a site does not work: everything is in it but what nobody else should read."""

from __future__ import annotations

import os
import pwd
import stat
from pathlib import Path

import pytest

from launch.cli import main
from launch.doctor.command import Private, is_secret_name, redact, write_report
from launch.doctor.probe_jobs import Reports
from launch.doctor.site import Finding

pytestmark = pytest.mark.starts

ADA = Private(names=("ada",), homes=("/lustre/home/ada",), values=("open sesame 1",))
SECRETS = {
    "HF_TOKEN": "hf_AbCdEfGhIjKlMnOpQrStUvWx",
    "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567",
    "SLURM_JWT_TOKEN": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl",
    "AWS_SECRET_ACCESS_KEY": "wJalrXUtnFEMIK7MDENGbPxRfiCYEXAMPLEKEY",
    "MY_PASSWORD": "correct horse",
    "VLLM_API_KEY": "plain-looking",
    "CUDA_AUTH_COOKIE": "biscuit-42",
}


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("Authorization: Bearer abc.DEF-123456", "Authorization: (removed) (removed)"),
        ("curl -H 'x: bearer abcdef123456'", "curl -H 'x: bearer (removed)'"),
        ('api_key = "two words"', "api_key = (removed)"),
        ("export HF_TOKEN=hf_short; run", "export HF_TOKEN=(removed); run"),
        ('{"password": "x", "n": 3}', '{"password": (removed), "n": 3}'),
        ("--token 'abc' --n 3", "--token (removed) --n 3"),
        ("rlhpc --api-key sk-12 --n 3", "rlhpc --api-key (removed) --n 3"),
        ("MY_PASSWORD=123456 and secret: 42", "MY_PASSWORD=(removed) and secret: (removed)"),
        ("token = 12345", "token = (removed)"),
        ("//ada:p@ss@mirror.example/simple", "//(removed)@mirror.example/simple"),
        ("https://ada:pw@mirror.example/simple", "https://(removed)@mirror.example/simple"),
        ("mail ada.l@uni.example now", "mail (removed) now"),
        ("said open sesame 1 twice", "said (removed) twice"),
        ("/lustre/home/ada/runs/x", "~/runs/x"),
        ("/lustre/home/adams/runs", "/lustre/home/adams/runs"),
        ("/scratch/ada/x and /home/grace/y", "/scratch/USER/x and /HOME/y"),
        ("user ada, canada, ada_project", "user USER, canada, USER_project"),
        ("sha 0123456789abcdef0123456789abcdef", "sha (removed)"),
        ("-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n-----END OPENSSH PRIVATE KEY-----", "(removed)"),
    ],
)
def test_what_nobody_else_should_read_is_taken_out(text, wanted):
    assert redact(text, ADA) == wanted


@pytest.mark.parametrize(
    "text",
    [
        "token_budget = 8_192",
        "transformers==5.19.0 tokenizers==0.23.3 TOKENIZERS_PARALLELISM=false",
        '{"num_tokens": 5, "stop_token_ids": [1, 2]}',
        'max_prompt_tokens = 512\n[trainer]\nbackend = "megatron"',
        "generation.max_completion_tokens=1024, 3 tokens a step",
        "NVIDIA A100-SXM4-80GB, 81920 MiB, 535.183.06, 8.0",
        "CUDA_VISIBLE_DEVICES=GPU-8f6d2b1a-0c4e-4f7a-9b5d-2f1e3a4b5c6d,1",
        "fail  trainer.partition   gpuu: no such partition   legal: cpu, gpu",
        "nvidia/cuda/compat:/opt/slurm/lib",
    ],
)
def test_what_explains_a_failure_stays(text):
    assert redact(text, ADA) == text


def test_planted_secrets_names_and_homes_do_not_reach_the_file(tmp_path, monkeypatch):
    home = tmp_path / "homes" / "zoe77"
    site = tmp_path / "site.toml"
    site.write_text(
        "[cluster]\n"
        f'shared_directory = "{home}/shared"\n'
        "[prologue]\n"
        'commands = ["export OTHER_TOKEN=tok-in-a-command", "ulimit -n 65536"]\n'
        "[prologue.environment]\n"
        'WANDB_API_KEY = "in the site file"\n'
        'NCCL_SOCKET_IFNAME = "ib0"\n'
        'MIRROR = "https://zoe77:hunter2@mirror.example"\n'
    )
    environment = {
        **SECRETS,
        "HOME": str(home),
        "USER": "zoe77",
        "PATH": f"{home}/bin:/usr/bin",
        "NCCL_DEBUG": "INFO",
        "SLURM_JOB_USER": "zoe77",
        "DIARY": "dear diary",
    }
    ready = {
        "node": "gpu01",
        "driver": "535.183.06",
        "executable": f"{home}/venv/bin/python",
        "known_sha256": "ab" * 32,
    }
    reports = Reports("k", {"trainer": ready}, {}, failed={"generation": f"cannot open {home}/x as zoe77"})
    finding = Finding("trainer: job", "", "fail", f"{home}/runs: HF_TOKEN={SECRETS['HF_TOKEN']} refused")
    path = tmp_path / "report.txt"
    write_report(path, [finding], reports, [site], environment=environment)
    text = path.read_text()
    planted = [*SECRETS.values(), "tok-in-a-command", "in the site file", "hunter2", "zoe77", str(home), "dear diary"]
    assert [word for word in planted if word in text] == []
    assert pwd.getpwuid(os.getuid()).pw_dir + "/" not in text
    for kept in (
        "gpu01",
        "535.183.06",
        "ulimit -n 65536",
        'NCCL_SOCKET_IFNAME = "ib0"',
        "NCCL_DEBUG=INFO",
        "~/venv/bin",
    ):
        assert kept in text
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


@pytest.mark.parametrize("name", [*SECRETS, "GITHUB_PAT_TOKEN", "NPM_AUTH", "SSH_PASSPHRASE"])
def test_a_variable_is_secret_by_its_name(name):
    assert is_secret_name(name)


def test_a_site_that_makes_no_plan_leaves_a_report_that_says_why(tmp_path, capsys):
    site, report = tmp_path / "site.toml", tmp_path / "report.txt"
    site.write_text("[common]\ntime = 60\n")
    assert main(["doctor", str(site), "--quick", "--report", str(report)]) == 2
    text = report.read_text()
    assert "trainer: missing" in text.partition("==== what was found\n")[2].partition("====")[0]
    assert "time = 60" in text
    assert str(report) in capsys.readouterr().err


def test_a_report_that_cannot_be_written_is_the_users_error(tmp_path, capsys):
    site = tmp_path / "site.toml"
    site.write_text("[common]\ntime = 60\n")
    assert main(["doctor", str(site), "--quick", "--report", str(tmp_path / "none" / "report.txt")]) == 2
    assert "--report" in capsys.readouterr().err


def test_a_quick_look_without_slurm_leaves_a_report(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(Path("/nowhere")))
    site, report = tmp_path / "site.toml", tmp_path / "report.txt"
    site.write_text(f'[cluster]\nshared_directory = "{tmp_path}"\n[common]\ntime = 60\n[trainer]\n[generation]\n')
    assert main(["doctor", str(site), "--quick", "--report", str(report)]) == 1
    assert "slurm" in report.read_text()
    assert f"report: {report}" in capsys.readouterr().out
