#!/usr/bin/env bash
# All checks that need a CUDA device, in stages; a stage that fails does not keep the next from running.
#
#   tests/gpu/run.sh [--out DIR] [--stages driver,kernels,pages,engines,bench] [--bundle DIR] [--kvcached SDIST]
#                    [--python PYTHON]
#
#   --out       where tables and JSON go (default: tests/bench/results)
#   --bundle    folder with vLLM for this machine: vllm_site/, or vllm_core.tar.xz and vllm_serve.tar.xz
#               (default: $VLLM_BUNDLE); the stage `engines` needs it, unless vLLM is installed
#   --kvcached  source archive of the public library kvcached, which is built and measured beside ours (optional)
#   --python    a Python with torch and triton (default: python3)
#
# Needs no package registry. Everything that is made goes to out/gpu. The exit code is 0 only when every stage passed.
set -uo pipefail

root=$(cd "$(dirname "$0")/../.." && pwd)
out="" stages=driver,kernels,pages,engines,bench bundle=${VLLM_BUNDLE:-} kvcached="" python=python3

usage() { sed -n '2,/^set/{/^#/s/^# \{0,1\}//p}' "$0"; }

while [ $# -gt 0 ]; do
    case $1 in
        -h | --help) usage; exit 0 ;;
        --out | --stages | --bundle | --kvcached | --python)
            [ $# -ge 2 ] || { echo "run.sh: $1 needs a value" >&2; exit 2; }
            case $1 in
                --out) mkdir -p "$2" && out=$(cd "$2" && pwd) || exit 2 ;;
                --stages) stages=$2 ;;
                --bundle) bundle=$(cd "$2" && pwd) || exit 2 ;;
                --kvcached) kvcached=$(realpath "$2") ;;
                --python) python=$2 ;;
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

reason=$(PYTHONPATH=$root "$python" -m tests.gpu.machine 2>&1) && reason=""
for stage in ${stages//,/ }; do
    case $stage in
        driver | kernels | pages | engines | bench) ;;
        *) echo "run.sh: there is no stage $stage" >&2; exit 2 ;;
    esac
    [ -z "$reason" ] || echo "$stage: not run: ${reason##*$'\n'}"
done
[ -z "$reason" ] || exit 1

mkdir -p "$work"
# The package with its entry points, from this checkout; nothing is downloaded.
site=$work/site
rm -rf "$site"
if ! "$python" -m pip install -q --no-deps --no-build-isolation --no-compile --disable-pip-version-check \
    --target "$site" "$root" > "$work/install.log" 2>&1; then
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

run() {  # stage, bound in seconds, PYTHONPATH, module, arguments
    local stage=$1 bound=$2 path=$3
    shift 3
    echo "== $stage"
    if PYTHONPATH=$path timeout -k 20 "$bound" "$python" -m "$@" ${out:+--out "$out"}; then
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

for stage in ${stages//,/ }; do
    case $stage in
        driver) run driver 600 "$with_vllm" tests.gpu.driver ;;
        kernels) run kernels 600 "$plain" tests.gpu.kernels ;;
        pages)
            folder=$(build_kvcached)
            run pages 600 "$plain" tests.gpu.pages ${folder:+--kvcached "$folder"}
            [ -z "$kvcached" ] || [ -n "$folder" ] || note pages "failed (kvcached was not built)" ;;
        engines)
            if PYTHONPATH=$with_vllm "$python" -c 'import importlib.util as u; raise SystemExit(u.find_spec("vllm") is None)'
            then
                run engines 2400 "$with_vllm" tests.gpu.engines --work "$work"
            else
                echo "engines: not run: vLLM is not installed, and no folder with it was given (--bundle)"
                note engines "not run"
            fi ;;
        bench) run bench 3600 "$with_vllm" tests.gpu.bench ;;
    esac
done

echo "== summary"
for stage in ${stages//,/ }; do
    echo "$stage: ${outcome[$stage]}"
done
exit $failed
