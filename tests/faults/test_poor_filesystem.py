"""A run on a filesystem without hard links, changes of modes and fsync of directories: SMB, FUSE, NFS with own ACLs.

A library that is loaded before the C library refuses these calls below one directory, with the errors that such a
filesystem gives.
"""

from __future__ import annotations

import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ring.run_kit import Run, command_environment, make_lab

pytestmark = [pytest.mark.ring, pytest.mark.starts]

LIBRARY = r"""
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

static int is_below(const char *path) {
    const char *poor = getenv("POOR_DIRECTORY");
    return poor && !strncmp(path, poor, strlen(poor));
}
static int is_there(int fd) {
    char name[64], path[PATH_MAX];
    snprintf(name, sizeof name, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(name, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return is_below(path);
}
static int refused(int number) { errno = number; return -1; }
int link(const char *from, const char *to) {
    return is_below(to) ? refused(EPERM) : syscall(SYS_linkat, AT_FDCWD, from, AT_FDCWD, to, 0);
}
int linkat(int from, const char *name, int to, const char *new_name, int flags) {
    return is_below(new_name) ? refused(EPERM) : syscall(SYS_linkat, from, name, to, new_name, flags);
}
int chmod(const char *path, mode_t mode) {
    return is_below(path) ? refused(EOPNOTSUPP) : syscall(SYS_fchmodat, AT_FDCWD, path, mode);
}
int fchmod(int fd, mode_t mode) { return is_there(fd) ? refused(EPERM) : syscall(SYS_fchmod, fd, mode); }
int fchmodat(int at, const char *path, mode_t mode, int flags) {
    return is_below(path) ? refused(EOPNOTSUPP) : syscall(SYS_fchmodat, at, path, mode);
}
int fsync(int fd) {
    struct stat found;
    int is_directory = !fstat(fd, &found) && S_ISDIR(found.st_mode);
    return is_directory && is_there(fd) ? refused(EINVAL) : syscall(SYS_fsync, fd);
}
"""
TRIES = """\
import sys; from pathlib import Path; from launch.doctor.site import check_operations
for finding in check_operations(Path(sys.argv[1])): print(finding.verdict, finding.key, finding.text)
"""


@pytest.fixture
def poor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory on such a filesystem, for processes that are started from now on."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    (tmp_path / "poor.c").write_text(LIBRARY)
    library = tmp_path / "poor.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(tmp_path / "poor.c")], check=True)
    directory = tmp_path / "poor"
    directory.mkdir()
    monkeypatch.setenv("POOR_DIRECTORY", str(directory))
    monkeypatch.setenv("LD_PRELOAD", str(library))
    return directory


@pytest.mark.timeout(600)
def test_a_run_needs_no_hard_links_no_changes_of_modes_and_no_fsync_of_directories(poor: Path) -> None:
    lab = make_lab(poor)
    layout = lab.layout("poor")
    with Run(lab.run_file("poor"), layout) as run:
        assert run.finish() == 0, run.story()
    assert layout.summary.exists()
    assert {stat.S_IMODE(file.stat().st_mode) for file in layout.secrets.glob("*.secret")} <= {0o600}
    with Run(lab.run_file("poor", run={"num_steps": 1000}), layout, "--resume") as run:
        run.wait_for_step(1)


def test_the_doctor_names_what_a_filesystem_lacks(poor: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", TRIES, str(poor)], env=command_environment(), capture_output=True, text=True, check=True
    )
    modes, links, fsync = done.stdout.splitlines()
    assert modes == "warn shared: modes Operation not supported: files keep the mode that they are made with"
    assert links == "warn shared: hard links Operation not permitted: files are copied instead"
    assert fsync == "warn shared: fsync Invalid argument: a power cut may lose the newest files' names"
    assert not list(poor.iterdir())
