#!/usr/bin/env bash
# Makes the environments that run real engines, outside the checkout, and prints the path of the one asked for: its only
# line on stdout. An environment is named by its pins; one that is there and whole is used as it is.
#
#   requirements/engines.sh [vllm-0.32 | vllm-0.28]
#
#   PYTHON                the interpreter to make it with (3.11 or newer)
#   TORCH_PIP_ARGS        further arguments of pip for torch alone: vLLM on a CPU needs torch's CPU build
#   KVSTORED_ENGINES_DIR  where the environments are kept; by default kvstored in the user's cache directory
#
# 1. An environment is whole if it has the file .complete, written last: an install that was broken off is done again.
# 2. Whoever makes one holds a lock; the others wait, and find the work done.
# 3. vllm-0.28 is a layer over vllm-0.32: a virtual environment of its own, with the other's packages behind its own.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

say() { printf 'engines: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

name=${1:-vllm-0.32}
base=vllm-0.32
case $name in
    vllm-0.32 | vllm-0.28) ;;
    *) die "no environment '$name'; there are vllm-0.32 and vllm-0.28" ;;
esac
python=${PYTHON:-python3}
root=${KVSTORED_ENGINES_DIR:-${XDG_CACHE_HOME:-$HOME/.cache}/kvstored}
for tool in flock sha256sum; do
    command -v "$tool" >/dev/null || die "needs '$tool' (packages util-linux and coreutils)"
done
command -v "$python" >/dev/null || die "no '$python' on PATH; name a Python 3.11 or newer: PYTHON=python3.12"
version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2]); raise SystemExit(sys.version_info < (3, 11))') ||
    die "'$python' is Python $version; 3.11 or newer is needed: PYTHON=python3.12"

path_of() { # where an environment with these pins is kept
    local files=("requirements/$base.txt")
    [ "$1" = "$base" ] || files+=("requirements/$1.txt")
    printf '%s/%s-%s\n' "$root" "$1" \
        "$({ cat "${files[@]}"; printf '%s\n' "$version" "${TORCH_PIP_ARGS:-}"; } | sha256sum | cut -c1-12)"
}

# Tells of the large downloads and of whatever went wrong; ends with pip's own status.
quietly() {
    "$@" 2>&1 | sed -u -nE '/^WARNING: (Location|Running pip as)/d; /^(ERROR|WARNING|error)/p
        s#^ *Downloading (.*/)?([^/ ]+\.whl)( \([0-9.]+ [MG]B\))$#engines:   \2\3#p' >&2
}

pip_into() { # ENVIRONMENT ARGUMENTS...
    local into=$1
    shift
    quietly "$(path_of "$base")/bin/python" -m pip --python "$into/bin/python" install \
        --disable-pip-version-check --no-input --progress-bar off "$@"
}

failed() {
    die "pip could not install $1; what it said is above. It needs the package index, about 3 GB of room in $root," \
        "and for torch its CPU build (TORCH_PIP_ARGS)"
}

make_base() { # DIRECTORY
    say "making $1: vLLM for CPUs, 2.5 GB, 3 to 10 minutes"
    "$python" -m venv "$1" >&2 || die "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv"
    say "torch"
    # shellcheck disable=SC2086  # TORCH_PIP_ARGS is a list of arguments
    pip_into "$1" -c "requirements/$base.txt" torch ${TORCH_PIP_ARGS:-} || failed torch
    say "$(grep -cv '^#' "requirements/$base.txt") pinned packages"
    pip_into "$1" --no-deps -r "requirements/$base.txt" || failed "requirements/$base.txt"
}

make_layer() { # DIRECTORY NAME
    local below
    below=$(make "$base")
    say "making $1: a layer over $below"
    "$python" -m venv --without-pip "$1" >&2 || die "'$python -m venv' failed"
    pip_into "$1" --no-deps -r "requirements/$2.txt" || failed "requirements/$2.txt"
    printf '%s/lib/python%s/site-packages\n' "$below" "$version" >"$1/lib/python$version/site-packages/below.pth"
}

make() ( # NAME; prints the directory
    directory=$(path_of "$1")
    mkdir -p "$root" || die "cannot make $root; name another place: KVSTORED_ENGINES_DIR"
    if [ ! -f "$directory/.complete" ]; then
        exec 9>"$directory.lock"
        flock --nonblock 9 || { say "waiting for another make of $directory"; flock 9; }
    fi
    if [ ! -f "$directory/.complete" ]; then
        began=$SECONDS
        rm -rf "$directory"
        if [ "$1" = "$base" ]; then make_base "$directory"; else make_layer "$directory" "$1"; fi
        said=$("$directory/bin/python" -c 'import torch, vllm; print("vLLM", vllm.__version__, "torch", torch.__version__)' \
            2>&1 | tail -n 1) || die "what was installed does not start: $said"
        : >"$directory/.complete"
        say "ready in $((SECONDS - began)) s: $said"
    fi
    printf '%s\n' "$directory"
)

make "$name"
