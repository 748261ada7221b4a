#!/usr/bin/env bash
# All checks that need a CUDA device, in stages; a stage that fails does not keep the next from running.
#
#   tests/gpu/run.sh [--out DIR] [--stages driver,kernels,...] [--bundle DIR] [--trace FILE] [--kvcached SDIST]
#                    [--python PYTHON] [--commit ID] [--bound SECONDS] [-- ARGUMENTS]
#
#   --out       where tables and JSON go (default: tests/bench/results)
#   --stages    some of driver,kernels,memcheck,pages,engines,bench,activation,reclaim,kills
#   --bundle    folder with vLLM for this machine: vllm_site/, or vllm_core.tar.xz and vllm_serve.tar.xz
#               (default: $VLLM_BUNDLE); the stages from `engines` on need it, unless vLLM is installed
#   --trace     arrivals in the Azure CSV format, for bench and kills (default: a generator's)
#   --kvcached  source archive of the public library kvcached, which is built and measured beside ours (optional)
#   --python    a Python with torch and triton (default: python3)
#   --commit    what results say they are of, where the checkout came without its history
#   --bound     a stage is ended after so many seconds; what it has written by then stays
#   --          the rest goes to the one stage that is run, such as `--stages bench -- --rows references`
#
# bench, engines and kills write after every row and go on with the results of earlier calls of the same commit and
# options, so a machine that is there for ten minutes at a time does them in pieces:
#
#   tests/gpu/run.sh --stages driver,kernels,memcheck,pages ...
#   tests/gpu/run.sh --stages engines ...
#   tests/gpu/run.sh --stages bench ... -- --rows references              # then dual,density15,density2, then the others
#   tests/gpu/run.sh --stages activation,reclaim ...
#   tests/gpu/run.sh --stages kills ...                                   # four kills; three times
#
# Needs no package registry. What is made goes to out/gpu, logs of engines to out/bench. The exit code is 0 only when every
# stage passed.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
all=driver,kernels,memcheck,pages,engines,bench,activation,reclaim,kills
out="" stages=$all bundle=${VLLM_BUNDLE:-} trace="" kvcached="" python=python3 bound=""
extra=()

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --) shift; extra=("$@"); break ;;
        --out | --stages | --bundle | --trace | --kvcached | --python | --commit | --bound)
            [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
            case $1 in
                --out) mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 2 ;;
                --stages) stages=$2 ;;
                --bundle) bundle=$(cd "$2" && pwd) || exit 2 ;;
                --trace) trace=$(realpath "$2") ;;
                --kvcached) kvcached=$(realpath "$2") ;;
                --python) python=$2 ;;
                --commit) export COSERVE_COMMIT=$2 ;;
                --bound) bound=$2 ;;
            esac
            shift 2 ;;
        *) echo "run.sh: unknown argument $1" >&2; usage >&2; exit 2 ;;
    esac
done

work=$root/out/gpu
export PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1 XDG_CACHE_HOME=$work/cache TRITON_CACHE_DIR=$work/cache/triton
export VLLM_USE_FLASHINFER_SAMPLER=0 VLLM_USE_DEEP_GEMM=0 VLLM_WORKER_MULTIPROC_METHOD=spawn VLLM_NO_USAGE_STATS=1
export HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1 DO_NOT_TRACK=1
cd "$root" || exit 2

declare -A outcome
failed=0

note() {  # stage, outcome: for the summary
    outcome[$1]=$2
    [ "$2" = passed ] || failed=1
}

if [ ${#extra[@]} -gt 0 ] && [[ $stages = *,* ]]; then
    echo "run.sh: arguments after -- are for one stage, and there are several: $stages" >&2
    exit 2
fi
reason=$(PYTHONPATH=$root "$python" -m tests.gpu.machine 2>&1) && reason=""
for stage in ${stages//,/ }; do
    case ,$all, in
        *,$stage,*) ;;
        *) echo "run.sh: there is no stage $stage" >&2; exit 2 ;;
    esac
    [ -z "$reason" ] || echo "$stage: not run: ${reason##*$'\n'}"
done
[ -z "$reason" ] || exit 1

mkdir -p "$work"
# The package with its entry points, from a copy of this checkout, which stays as it is; nothing is downloaded.
site=$work/site source=$work/source
rm -rf "$site" "$source" && mkdir -p "$source"
tar -cf - --exclude=__pycache__ --exclude=vllm_coserve/kernels setup.py pyproject.toml README.md vllm_coserve rl_driver \
    kernels | tar -xf - -C "$source"
if ! "$python" -m pip install -q --no-deps --no-build-isolation --no-compile --disable-pip-version-check \
    --target "$site" "$source" > "$work/install.log" 2>&1; then
    echo "run.sh: the checkout could not be installed, it is used as it is; see $work/install.log" >&2
    rm -rf "$site" && mkdir -p "$site/vllm_coserve"
    ln -sf "$root"/vllm_coserve/* "$site/vllm_coserve/"
    ln -sfn "$root/kernels" "$site/vllm_coserve/kernels"
fi
if [ -n "$bundle" ] && [ ! -d "$bundle/vllm_site" ]; then
    mkdir -p "$work/bundle"
    for part in core serve; do
        tar -xf "$bundle/vllm_$part.tar.xz" -C "$work/bundle" || echo "run.sh: no vllm_$part.tar.xz in $bundle" >&2
    done
    bundle=$work/bundle
fi
vllm_site=${bundle:+$bundle/vllm_site}
plain=$site:$root
with_vllm=$site${vllm_site:+:$vllm_site}:$root

run() {  # stage, bound in seconds, PYTHONPATH, module's arguments
    local stage=$1 seconds=${bound:-$2} path=$3
    shift 3
    echo "== $stage"
    # SIGTERM ends a stage's engines with it, which may take half a minute.
    if PYTHONPATH=$path timeout -k 60 "$seconds" "$python" -m "tests.gpu.$stage" ${out:+--out "$out"} "$@" \
        ${extra[@]+"${extra[@]}"}; then
        note "$stage" passed
    else
        note "$stage" "failed ($?)"
    fi
}

build_kvcached() {  # prints the folder it was installed into; nothing when there is none
    [ -n "$kvcached" ] || return 0
    if "$python" -m pip install -q --no-deps --no-build-isolation --no-compile --disable-pip-version-check \
        --target "$work/kvcached" "$kvcached" > "$work/kvcached.log" 2>&1; then
        echo "$work/kvcached"
    else
        echo "run.sh: kvcached could not be built, see $work/kvcached.log" >&2
    fi
}

run_with_vllm() {  # stage, bound in seconds, module's arguments
    if PYTHONPATH=$with_vllm "$python" -c 'import importlib.util as u; raise SystemExit(u.find_spec("vllm") is None)'; then
        run "$1" "$2" "$with_vllm" "${@:3}"
    else
        echo "$1: not run: vLLM is not installed, and no folder with it was given (--bundle)"
        note "$1" "not run"
    fi
}

for stage in ${stages//,/ }; do
    case $stage in
        driver) run driver 600 "$with_vllm" ;;
        kernels) run kernels 600 "$plain" ;;
        memcheck) run memcheck 1200 "$with_vllm" ;;
        pages)
            folder=$(build_kvcached)
            run pages 600 "$plain" ${folder:+--kvcached "$folder"}
            [ -z "$kvcached" ] || [ -n "$folder" ] || note pages "failed (kvcached was not built)" ;;
        engines) run_with_vllm engines 2400 --work "$work" ;;
        bench) run_with_vllm bench 7200 ${trace:+--trace "$trace"} ;;
        activation) run_with_vllm activation 1200 ;;
        reclaim) run_with_vllm reclaim 1200 ;;
        kills) run_with_vllm kills 2400 ${trace:+--trace "$trace"} ;;
    esac
done

echo "== summary"
for stage in ${stages//,/ }; do
    echo "$stage: ${outcome[$stage]}"
done
exit $failed
