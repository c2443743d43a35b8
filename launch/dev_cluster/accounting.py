"""Accounting for a dev cluster: a private MariaDB behind a private slurmdbd, so that sacct and accounts work.

Input: paths and a port.  Functions that make text and argument lists are pure; `prepare_database` writes.  The database
listens on a unix socket only and has no passwords: access to the socket's directory is the access control.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from launch.dev_cluster.installation import Installation, SlurmMissing
from launch.dev_cluster.layout import ClusterLayout
from rlhpc.errors import RoleFailed

DATABASE, DAEMON = "mariadbd", "slurmdbd"
ACCOUNT = "lab"  # exists in every cluster with accounting; jobs of another account are refused
_SYSTEM_TABLES = ("system_tables.sql", "system_tables_data.sql")  # mysql_…; since MariaDB 11 mariadb_…


def slurmdbd_conf(layout: ClusterLayout, user: str, plugins: Path, port: int) -> str:
    """Text of slurmdbd.conf, which must be readable by its owner alone."""
    return "\n".join(
        [
            "AuthType=auth/munge",
            f"AuthInfo=socket={layout.munge_socket}",
            "DbdHost=localhost",
            "DbdAddr=127.0.0.1",
            f"DbdPort={port}",
            f"SlurmUser={user}",
            f"LogFile={layout.log(DAEMON)}",
            f"PidFile={layout.run}/slurmdbd.own",
            f"PluginDir={plugins}",
            "StorageType=accounting_storage/mysql",
            "StorageHost=localhost",
            "StorageUser=slurm",
            "StorageLoc=slurm_acct_db",
            "",
        ]
    )


def lines_of_slurm_conf(layout: ClusterLayout, port: int, *, enforces_limits: bool) -> list[str]:
    """Its lines in slurm.conf."""
    return [
        "AccountingStorageType=accounting_storage/slurmdbd",
        "AccountingStorageHost=127.0.0.1",
        f"AccountingStoragePort={port}",
        f"AccountingStoragePass={layout.munge_socket}",  # munge's socket goes here; AuthInfo is not asked
        f"AccountingStorageEnforce=associations,{'limits,' if enforces_limits else ''}qos",
        "AccountingStorageTRES=gres/gpu",  # else no limit can name GPUs
    ]


def database_command(layout: ClusterLayout, installation: Installation, user: str) -> list[str]:
    """MariaDB's server command, with settings that keep it small."""
    share = _system_tables(installation)[0].parent  # where its messages are, too
    return [
        *(installation.program(DATABASE), "--no-defaults", f"--user={user}"),
        *(f"--datadir={layout.database}/data", f"--tmpdir={layout.database}/tmp"),
        *(f"--lc-messages-dir={share}", f"--character-sets-dir={share}/charsets"),
        *("--innodb-buffer-pool-size=16M", "--innodb-log-file-size=8M", "--innodb-flush-log-at-trx-commit=0"),
        "--loose-innodb-snapshot-isolation=OFF",  # else slurmdbd ends where two transactions meet; 10.6 may not know it
        *("--innodb-lock-wait-timeout=900", "--key-buffer-size=1M", "--performance-schema=OFF"),
        *("--max-connections=20", "--thread-cache-size=2", "--skip-log-bin"),
        *("--skip-networking", "--skip-grant-tables"),
    ]


def serve_arguments(layout: ClusterLayout) -> list[str]:
    """Options added to `database_command` for serving."""
    return [f"--socket={layout.database_socket}", f"--pid-file={layout.database}/mariadb.own"]


def prepare_database(
    layout: ClusterLayout, installation: Installation, user: str, environment: Mapping[str, str]
) -> None:
    """Create MariaDB's system tables, once.  Raises RoleFailed with its last message."""
    data, unfinished = layout.database / "data", layout.database / "data.unfinished"
    if data.exists():
        return
    shutil.rmtree(unfinished, ignore_errors=True)  # of a start that was killed, or found its disk full
    for directory in (unfinished, layout.database / "tmp"):
        directory.mkdir(parents=True, exist_ok=True)
    layout.database.chmod(0o700)
    tables = "".join(path.read_text(encoding="utf-8") for path in _system_tables(installation))
    done = subprocess.run(
        [*database_command(layout, installation, user), f"--datadir={unfinished}", "--bootstrap"],
        input=f"create database mysql;\nuse mysql;\n{tables}",
        env=dict(environment),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RoleFailed(f"mariadbd cannot create a database: {(done.stderr or 'no output').strip().splitlines()[-1]}")
    unfinished.rename(data)


def _system_tables(installation: Installation) -> list[Path]:
    """Definitions of MariaDB's own tables, and what is in them.  Raises SlurmMissing: not there."""
    base = installation.prefix or Path("/")
    for directory in ("usr/share/mariadb", "usr/share/mysql"):
        for brand in ("mariadb", "mysql"):
            found = [base / directory / f"{brand}_{name}" for name in _SYSTEM_TABLES]
            if all(path.exists() for path in found):
                return found
    raise SlurmMissing(
        f"no {' and '.join(_SYSTEM_TABLES)} of MariaDB below {base}/usr/share: install mariadb-server-core"
    )
