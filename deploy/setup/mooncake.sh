#!/usr/bin/env bash
# Brings the shared libraries that Mooncake's wheel leaves to the system. Debian's packages of them are unpacked beside
# those that the wheel has with it, where its programs look first: nothing is installed, so nobody has to be root. Called
# by the set-up; where it cannot be done, tests of Mooncake skip, saying so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

packages="libcurl4 libibverbs1 libnuma1"
missing() { .venv/bin/python deploy/setup/check_env.py mooncake | xargs; }
give_up() {
    echo "setup: $*: tests of Mooncake will skip. Once that is mended, deploy/setup/mooncake.sh tries again"
    exit 0
}

absent=$(missing)
[ -n "$absent" ] || exit 0
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    give_up "$absent: not here, and there is no apt-get. On Debian these are in $packages"
fi
mkdir -p .cache
folder=$(mktemp -d "$PWD/.cache/mooncake.XXXXXX")
trap 'rm -rf "$folder"' EXIT
mkdir -p "$folder/lists/partial" "$folder/debs"

apt() { apt-get -qq -o Acquire::http::Timeout=30 -o Acquire::https::Timeout=30 "$@"; }

# Those that are not installed, with all that they need.
download() {
    local names
    # shellcheck disable=SC2086  # one word a package
    names=$(apt "$@" --simulate --no-upgrade --no-install-recommends install $packages | awk '$1 == "Inst" {print $2}')
    # shellcheck disable=SC2086
    [ -n "$names" ] && (cd "$folder/debs" && apt "$@" download $names)
}

# Lists of packages that nobody has brought up to date for long name some that are no longer there.
own=(-o "Dir::State::Lists=$folder/lists" -o "Dir::Cache=$folder/cache")
if ! { download || { apt "${own[@]}" update && download "${own[@]}"; }; } >.cache/mooncake.log 2>&1; then
    give_up "apt-get could not download $packages (.cache/mooncake.log)"
fi
for deb in "$folder"/debs/*.deb; do
    dpkg-deb -x "$deb" "$folder/unpacked"
done
find "$folder/unpacked" -name 'lib*.so.*' -exec cp -P {} .venv/lib/python3.11/site-packages/mooncake_transfer_engine*.libs/ \;
absent=$(missing)
[ -z "$absent" ] || give_up "$absent: not in Debian's $packages"
echo "setup: the libraries that Mooncake needs are in .venv"
