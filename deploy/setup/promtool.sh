#!/usr/bin/env bash
# Puts Debian's promtool into .venv/bin, from the prometheus package, which is unpacked and not installed. Called by make
# before the tests; without it the tests of the alert rules skip, saying so.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

[ ! -x .venv/bin/promtool ] || exit 0
if found=$(command -v promtool); then
    ln -sf "$found" .venv/bin/promtool
    exit 0
fi
if ! command -v apt-get >/dev/null || ! command -v dpkg-deb >/dev/null; then
    echo "setup: no promtool and no apt-get: tests of deploy/prometheus will skip"
    exit 0
fi
folder=$(mktemp -d .cache/promtool.XXXXXX)
trap 'rm -rf "$folder"' EXIT
if ! (cd "$folder" && { apt-get download -qq prometheus || { apt-get update -qq && apt-get download -qq prometheus; }; }) \
    >.cache/promtool.log 2>&1; then
    echo "setup: apt-get could not download prometheus (.cache/promtool.log): tests of deploy/prometheus will skip"
    exit 0
fi
dpkg-deb -x "$folder"/prometheus_*.deb "$folder/unpacked"
install -m 755 "$folder/unpacked/usr/bin/promtool" .venv/bin/promtool
echo "setup: .venv/bin/promtool is ready"
