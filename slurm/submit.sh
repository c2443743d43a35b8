# What hetjob.sbatch and jobs.sbatch have in common; read by them, not run.

slurm_directory=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

refuse() { echo "rlhpc: $*" >&2; exit 2; }

# submit_run PLACEMENT RUN.toml [key=value …]: `rlhpc submit` with the site file of this checkout, or of $RLHPC_SITE.
submit_run() {
    local placement=$1 run_file=$2 site=${RLHPC_SITE:-$slurm_directory/site.toml} said rlhpc
    [ $# -ge 2 ] || refuse "usage: sbatch slurm/$placement.sbatch RUN.toml [key=value …] (bash instead of sbatch does, too)"
    [ -r "$run_file" ] || refuse "$run_file: no such run file (looked for from $PWD)"
    [ -r "$site" ] || refuse "$site: no site file; copy slurm/sites/example.toml there and put in what your cluster has, or set RLHPC_SITE"
    said=$(sed -nE "s/^[^#]*placement[[:space:]]*=[[:space:]]*[\"'](hetjob|jobs)[\"'].*/\1/p" "$site")
    [ "${said:=hetjob}" = "$placement" ] ||
        refuse "$site says cluster.placement = \"$said\": take slurm/$said.sbatch, or write \"$placement\" there"
    rlhpc=$(command -v "${RLHPC:-rlhpc}") || rlhpc=$slurm_directory/../.venv/bin/rlhpc
    [ -x "$rlhpc" ] || refuse "rlhpc is not in PATH; load its module, activate its environment, or set RLHPC to its path"
    exec "$rlhpc" submit "$run_file" "$site" "${@:3}"
}
