#!/usr/bin/env bash
# Unpacks SGLang and the small packages that its cache's modules import, outside the checkout, and prints the path of the
# directory: its only line on stdout. It goes on sys.path behind .venv, whose torch and transformers it is used with;
# nothing in it can run a model. A directory is named by its pins; one that is there and whole is used as it is.
#
#   requirements/sglang.sh [sglang-0.5.23 | sglang-0.5.9]
#
#   PYTHON                the interpreter to fetch wheels for, if there is no .venv (3.11 or newer)
#   KVSTORED_ENGINES_DIR  where the directories are kept; by default kvstored in the user's cache directory
#
# 1. A directory is whole if it has the file .complete, written last: an install that was broken off is done again.
# 2. Whoever makes one holds a lock; the others wait, and find the work done.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'sglang: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

name=${1:-sglang-0.5.23}
pins=requirements/$name.txt
case $name in
    sglang-*) [ -f "$pins" ] || die "no environment '$name': there is no $pins" ;;
    *) die "no environment '$name'; there are sglang-0.5.23 and sglang-0.5.9" ;;
esac
python=.venv/bin/python
[ -x "$python" ] || python=${PYTHON:-python3}
root=${KVSTORED_ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstored}
for tool in flock sha256sum; do
    command -v "$tool" >/dev/null || die "needs '$tool' (packages util-linux and coreutils)"
done
command -v "$python" >/dev/null || die "no '$python' on PATH; name a Python 3.11 or newer: PYTHON=python3.12"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); raise SystemExit(sys.version_info < (3, 11))') ||
    die "'$python' is Python $version; 3.11 or newer is needed: PYTHON=python3.12"
directory=$root/$name-$({ cat "$pins"; printf '%s\n' "$version"; } | sha256sum | cut -c1-12)

mkdir -p "$root" || die "cannot make $root; name another place: KVSTORED_ENGINES_DIR"
if [ ! -f "$directory/.complete" ]; then
    exec 9>"$directory.lock"
    flock --nonblock 9 || { say "waiting for another make of $directory"; flock 9; }
fi
if [ ! -f "$directory/.complete" ]; then
    began=$SECONDS
    say "making $directory: 250 MB, a minute"
    rm -rf "$directory"
    "$python" -m pip install --disable-pip-version-check --no-input --progress-bar off --quiet --no-compile \
        --no-deps --target "$directory" -r "$pins" 2>&1 | sed -u -nE '/^(ERROR|error)/p' >&2 ||
        die "pip could not install $pins; what it said is above. It needs the package index, and room in $root"
    : >"$directory/.complete"
    say "ready in $((SECONDS - began)) s"
fi
printf '%s\n' "$directory"
