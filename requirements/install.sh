#!/usr/bin/env bash
# Makes or renews .venv: the pinned packages, torch, and this checkout installed editable (so that .venv/bin has
# kvstored and kvctl). Does nothing when .venv already matches. Called by make; from the checkout's root by hand.
#
#   PYTHON          the interpreter to make .venv with (3.11 or newer)
#   TORCH_PIP_ARGS  further arguments of pip for torch alone, to choose its build
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

python=${PYTHON:-python3}
venv=.venv
pip=("$venv/bin/python" -m pip install --disable-pip-version-check --no-input --progress-bar off)

say() { printf 'setup: %s\n' "$*" >&2; }
die() { say "$@"; exit 1; }

# Tells of the large downloads and of whatever went wrong; ends with pip's own status.
quietly() {
    "$@" 2>&1 | sed -u -nE '/^WARNING: (Location|Running pip as)/d; /^(ERROR|WARNING|error)/p
        s#^ *Downloading (.*/)?([^/ ]+\.whl)( \([0-9.]+ [MG]B\))$#setup:   \2\3#p' >&2
}

for tool in flock sha256sum; do
    command -v "$tool" >/dev/null || die "needs '$tool' (packages util-linux and coreutils): kvstored runs on Linux"
done
command -v "$python" >/dev/null || die "no '$python' on PATH; name a Python 3.11 or newer: make PYTHON=python3.12"
"$python" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' ||
    die "'$python' is $("$python" --version 2>&1); kvstored needs 3.11 or newer: make PYTHON=python3.12"

# Two makes at once take turns; the second finds the work done.
exec 9>.venv.lock
flock 9

# The environment is keyed by what goes into it, not by file times; the tools' settings in setup.cfg do not count.
packages_key=$({ cat requirements/lock.txt requirements/torch.txt; echo "${TORCH_PIP_ARGS:-}"; } | sha256sum | cut -c1-16)
project_key=$({ pwd; sed '/^\[tool:pytest\]/,$d' setup.cfg; cat pyproject.toml; } | sha256sum | cut -c1-16)
have_packages="" have_project=""
if [ -f "$venv/.stamp" ] && "$venv/bin/python" -c '' 2>/dev/null; then
    read -r have_packages have_project <"$venv/.stamp" || true
fi
if [ "$have_packages $have_project" = "$packages_key $project_key" ]; then
    touch "$venv/.stamp"
    exit 0
fi

if ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    say "making $venv with $("$python" --version)"
    rm -rf "$venv"
    "$python" -m venv "$venv" ||
        die "'$python -m venv' failed; on Debian and Ubuntu: apt-get install python3-venv, or name another: make PYTHON=..."
fi
rm -f "$venv/.stamp"
if [ "$have_packages" != "$packages_key" ]; then
    say "installing $(grep -cv '^#' requirements/lock.txt) pinned packages (a minute or two)"
    quietly "${pip[@]}" -r requirements/lock.txt ||
        die "pip could not install requirements/lock.txt; what it said is above"
    say "installing $(grep -v '^#' requirements/torch.txt) (several GB with CUDA; README, 'Choosing torch', tells how to take the CPU build)"
    # shellcheck disable=SC2086  # TORCH_PIP_ARGS is a list of arguments
    quietly "${pip[@]}" -r requirements/torch.txt ${TORCH_PIP_ARGS:-} ||
        die "pip could not install torch; what it said is above"
fi
say "installing this checkout (editable)"
quietly "${pip[@]}" --no-build-isolation --no-deps -e . ||
    die "pip could not install this checkout; what it said is above"
echo "$packages_key $project_key" >"$venv/.stamp"
say "ready: $venv/bin/kvstored, $venv/bin/kvctl"
