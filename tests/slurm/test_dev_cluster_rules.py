"""What a dev cluster refuses, and with what words; needs no Slurm."""

from __future__ import annotations

import os
import platform
import shutil
import socket
import tempfile
from pathlib import Path

import psutil
import pytest

from launch.cli import main
from launch.private_slurm import packages
from launch.private_slurm.cluster import DevCluster
from launch.private_slurm.daemons import CONTROLLER, MUNGED, Daemons, reserved_ports
from launch.private_slurm.packages import (
    OWN_LIBRARIES,
    RELEASE_VARIABLE,
    Installation,
    SlurmMissing,
    installed,
    obtain,
    private,
)
from launch.private_slurm.processes import Process, process, read_record, write_record
from launch.private_slurm.shape import (
    LONGEST_ROOT,
    ClusterLayout,
    ClusterShape,
    Description,
    Ground,
    NodeGroup,
    Partition,
    cgroup_conf,
    default_shape,
    gres_conf,
    prepare_database,
    slurm_conf,
)
from rlhpc.protocol.errors import ConfigError, RoleFailed, RunDirectoryError
from tests.full_disk import fill, small_disk

GROUND = Ground("dev", "me", Path("/plugins"), (22, 5), 10_000, {"t0": 10_001, "g0": 10_002, "g1": 10_003}, 1000)


def test_a_directory_too_long_for_sockets_is_refused() -> None:
    ClusterLayout(Path("/" + "a" * (LONGEST_ROOT - 1)))
    with pytest.raises(RunDirectoryError, match=f"room for {LONGEST_ROOT}"):
        ClusterLayout(Path("/" + "a" * LONGEST_ROOT))


def test_the_longest_socket_of_the_longest_directory_has_a_legal_length() -> None:
    node = NodeGroup("train", 100).nodes[-1]
    socket_path = ClusterLayout(Path("/" + "a" * (LONGEST_ROOT - 1))).spool(node) / f"{node}_67108863.4294967291.9"
    assert len(str(socket_path)) == 107


@pytest.mark.parametrize("name", ["with blank", "with,comma", "with#hash", "50%"])
def test_a_directory_that_slurm_conf_cannot_hold_is_refused(name: str) -> None:
    with pytest.raises(RunDirectoryError, match=r"slurm\.conf cannot hold"):
        ClusterLayout(Path("/tmp") / name)


def test_a_directory_with_something_else_in_it_is_left_alone() -> None:
    with tempfile.TemporaryDirectory(prefix="rlhpc-", dir="/tmp") as name:  # short enough for sockets
        (Path(name) / "thesis.tex").write_text("years")
        with pytest.raises(RunDirectoryError, match="not a dev cluster"):
            DevCluster.create(Path(name), default_shape(), Installation())
        assert main(["cluster", "down", name, "--delete"]) == 2
        assert (Path(name) / "thesis.tex").read_text() == "years"


def test_a_shape_without_nodes_or_with_a_partition_of_unknown_ones_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a node group"):
        default_shape(0, 0, 0)
    with pytest.raises(ConfigError, match=r"partition gen: groups=\('x',\): legal: g"):
        ClusterShape((NodeGroup("g", 1),), (Partition("gen", ("x",)),))
    with pytest.raises(ConfigError, match="legal: 1 to 100 nodes"):
        default_shape(train=-1)


def test_a_description_survives_its_file() -> None:
    description = Description(default_shape(1, 2, 3, gpus=8), "/prefix", 17)
    assert Description.decode(description.encode()) == description


def test_slurm_conf_says_what_the_shape_says() -> None:
    shape, layout = default_shape(1, 2, 0, gpus=2), ClusterLayout(Path("/tmp/c"))
    text = slurm_conf(shape, layout, GROUND)
    assert "NodeName=g1 NodeHostname=localhost NodeAddr=127.0.77.3 Port=10003 CPUs=16" in text
    assert "PartitionName=train Nodes=t0 Default=YES State=UP MaxTime=60 PriorityTier=10 PreemptMode=OFF" in text
    assert (
        "PartitionName=scavenge Nodes=t0,g[0-1] Default=NO State=UP MaxTime=60 PriorityTier=1 PreemptMode=REQ" in text
    )
    assert "/none" not in text  # plugins of that name went with 23.11
    assert gres_conf(shape, layout).count("/nvidia[0-1] Flags=nvidia_gpu_env\n") == 3
    assert [cgroup_conf(version) for version in ((22, 5), (23, 11))] == ["", "CgroupPlugin=disabled\n"]


def test_two_reservations_never_share_a_port_and_a_daemon_can_have_it() -> None:
    with reserved_ports(50) as some, reserved_ports(50) as others:
        assert len({*some, *others}) == 100
        with socket.socket() as daemon:
            daemon.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            daemon.bind(("", some[0]))
            daemon.listen()


def _stand_in(prefix: Path, program: str, script: str) -> Installation:
    """An installation that has nothing but this one program."""
    path = prefix / "usr" / "sbin" / program
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    (prefix / OWN_LIBRARIES).mkdir(exist_ok=True)
    return Installation(prefix)


@pytest.mark.starts
def test_a_full_disk_leaves_no_key_that_munged_would_refuse(tmp_path: Path) -> None:
    layout = ClusterLayout(Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp")))
    try:
        with small_disk(layout.root, 1 << 20):
            layout.make()
            fill(layout.root / "filler", 0)
            with pytest.raises(OSError, match="No space left"):
                Daemons(layout, Installation()).start(MUNGED)
            assert not layout.munge_key.exists()
            (layout.root / "filler").unlink()
            daemons = Daemons(layout, _stand_in(tmp_path, "munged", "exit 0"))
            daemons.start(MUNGED)
            daemons.end(MUNGED)
            assert layout.munge_key.stat().st_size == 128
            assert layout.munge_key.stat().st_mode & 0o777 == 0o400
    finally:
        layout.root.rmdir()


@pytest.mark.starts
def test_a_daemon_that_cannot_be_recorded_is_not_left_behind(tmp_path: Path) -> None:
    layout = ClusterLayout(Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp")))
    try:
        layout.make()
        layout.pid_file(CONTROLLER).with_suffix(".partial").mkdir()
        with pytest.raises(IsADirectoryError):
            Daemons(layout, _stand_in(tmp_path, "slurmctld", "exec sleep 3600")).start(CONTROLLER)
        assert not [each for each in psutil.Process().children(recursive=True) if "3600" in each.cmdline()]
    finally:
        shutil.rmtree(layout.root)


@pytest.mark.starts
def test_a_database_that_was_made_half_is_made_again(tmp_path: Path) -> None:
    layout = ClusterLayout(Path(tempfile.mkdtemp(prefix="rlhpc-", dir="/tmp")))
    tables = tmp_path / "usr" / "share" / "mariadb"
    tables.mkdir(parents=True)
    for name in ("mariadb_system_tables.sql", "mariadb_system_tables_data.sql"):
        (tables / name).touch()
    made = 'cat > /dev/null; for word in "$@"; do case $word in --datadir=*) place=${word#*=};; esac; done; '
    try:
        full = _stand_in(tmp_path, "mariadbd", f"{made} touch $place/half; echo disk full >&2; exit 1")
        with pytest.raises(RoleFailed, match="cannot create a database: disk full"):
            prepare_database(layout, full, "me", os.environ)
        prepare_database(layout, _stand_in(tmp_path, "mariadbd", f"{made} touch $place/whole"), "me", os.environ)
        assert [path.name for path in (layout.database / "data").iterdir()] == ["whole"]
    finally:
        shutil.rmtree(layout.root)


def test_a_pid_that_has_been_reused_is_not_the_recorded_process(tmp_path: Path) -> None:
    write_record(tmp_path / "x.pid", 1)
    recorded = read_record(tmp_path / "x.pid")
    assert recorded is not None
    assert recorded == process(1)
    assert recorded.is_alive
    assert not Process(1, recorded.birth + 1).is_alive


def test_a_machine_without_slurm_and_apt_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing, match="nor is apt-get, which could fetch it") as caught:
        private(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(shutil.which("apt-get") is None, reason="needs apt")
def test_apt_without_lists_says_so_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lists").mkdir()
    (tmp_path / "apt.conf").write_text(f'Dir::State::lists "{tmp_path}/lists";\nDir::Cache "{tmp_path}";\n')
    monkeypatch.setenv("APT_CONFIG", str(tmp_path / "apt.conf"))
    if installed() is not None:
        pytest.skip("apt knows installed packages without lists")
    with pytest.raises(SlurmMissing, match=r"apt does not deliver it.*apt-get update") as caught:
        private(tmp_path / "cache")
    assert "\n" not in str(caught.value)
    assert not [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]


def test_a_release_that_is_none_is_refused_with_the_legal_ones(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(
        ConfigError, match=r"release 'buzz': legal: bookworm \(Slurm 22.05\), trixie \(Slurm 24.11\), sid"
    ):
        obtain(release="buzz")
    monkeypatch.setenv(RELEASE_VARIABLE, "woody")
    assert main(["cluster", "up", "/tmp/rlhpc-not-made"]) == 2
    assert "release 'woody': legal: bookworm" in capsys.readouterr().err
    assert not Path("/tmp/rlhpc-not-made").exists()


@pytest.mark.parametrize(
    ("system", "tools", "words"),
    [
        (
            "debian",
            ("apt-get", "dpkg"),
            "lacks patchelf, debian-archive-keyring; `apt-get install patchelf",
        ),
        ("fedora", ("patchelf",), "taken from the package sources of a Debian machine; this is Some System"),
    ],
)
def test_a_machine_that_cannot_unpack_another_release_says_in_one_line_what_it_lacks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, tools: tuple[str, ...], words: str
) -> None:
    facts = {"ID": system, "PRETTY_NAME": "Some System", "VERSION_CODENAME": "none"}
    monkeypatch.setattr(platform, "freedesktop_os_release", lambda: facts)
    monkeypatch.setattr(packages, "KEYRING", tmp_path / "none")
    for tool in tools:
        (tmp_path / tool).touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SlurmMissing) as caught:
        private(tmp_path / "cache", release="sid")
    assert str(caught.value).startswith("Slurm 26.05 of Debian sid: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list((tmp_path / "cache").iterdir()) == []


def test_libraries_of_either_layout_are_gathered_and_second_names_left_where_they_are(tmp_path: Path) -> None:
    for directory in ("usr/lib/x86_64-linux-gnu/slurm-wlm", "lib/x86_64-linux-gnu", "lib64"):
        (tmp_path / directory).mkdir(parents=True)
    for name in ("usr/lib/x86_64-linux-gnu/libz.so.1.2", "usr/lib/x86_64-linux-gnu/slurm-wlm/auth_munge.so",
                 "lib/x86_64-linux-gnu/ld-linux-x86-64.so.2"):  # fmt: skip
        (tmp_path / name).touch()
    (tmp_path / "usr/lib/x86_64-linux-gnu/libz.so.1").symlink_to("libz.so.1.2")
    (tmp_path / "lib64/ld-linux-x86-64.so.2").symlink_to("/lib/x86_64-linux-gnu/ld-linux-x86-64.so.2")
    packages.gather_libraries(tmp_path)
    gathered = tmp_path / OWN_LIBRARIES
    assert {path.name for path in gathered.iterdir()} == {"libz.so.1.2", "libz.so.1", "ld-linux-x86-64.so.2"}
    assert not (gathered / "ld-linux-x86-64.so.2").is_symlink()
    assert (gathered / "libz.so.1").resolve().name == "libz.so.1.2"
    assert (tmp_path / "usr/lib/x86_64-linux-gnu/slurm-wlm/auth_munge.so").exists()
