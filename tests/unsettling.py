"""What people's shells and sites' modules set for Slurm's commands: each changes what one selects, prints or does."""

from __future__ import annotations

UNSETTLING = {
    "SQUEUE_PARTITION": "cpu", "SQUEUE_STATES": "RUNNING", "SQUEUE_FORMAT": "%u", "SQUEUE_SORT": "u",
    "SQUEUE_USERS": "x",
    "SCANCEL_STATE": "PENDING", "SCANCEL_INTERACTIVE": "1", "SCANCEL_VERBOSE": "1", "SACCT_FORMAT": "user",
    "SINFO_FORMAT": "%n", "SINFO_STATES": "down", "SBATCH_PARTITION": "gen", "SBATCH_TIMELIMIT": "1",
    "SBATCH_REQUEUE": "0", "SBATCH_HOLD": "1", "SBATCH_EXPORT": "NONE", "SBATCH_JOB_NAME": "mine",
    "SLURM_TIME_FORMAT": "relative", "SLURM_CLUSTERS": "elsewhere", "SLURM_EXIT_ERROR": "7", "SLURM_TIMELIMIT": "1",
    "SLURM_STDOUTMODE": "none", "SLURM_EXCLUSIVE": "1", "SLURM_WORKING_DIR": "/", "SLURM_PARTITION": "cpu",
    "SLURM_NTASKS": "7", "SLURM_IMMEDIATE": "1", "SRUN_OUTPUT": "none", "SRUN_EXPORT_ENV": "NONE",
    "SALLOC_PARTITION": "x", "SCONTROL_ALL": "1", "PMIX_RANK": "3", "SLURM_EXPORT_ENV": "NONE",
}  # fmt: skip
