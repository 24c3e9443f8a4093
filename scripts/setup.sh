#!/bin/sh
# Makes a virtual environment with jlora in it, from the newest usable Python. A second run is
# instant: the stamp in the environment holds what it was made from.
#
#   sh scripts/setup.sh [--venv DIR] [--extras LIST] [--python 3.X] [--first PINS] [--with PINS] [--locked DIR]
#
#   --venv    where (.venv)
#   --extras  extras of pyproject.toml (test,bench)
#   --python  exactly this minor version, instead of the newest of 3.13, 3.12, 3.11
#   --first   installed before anything else, so that nothing pulls in another version
#   --with    installed together with jlora, pins included
#   --locked  folder of lock files: what jlora needs comes from there, by its hashes; extras are free
#
# Plain sh, since the `python3` of the machine may be any version.
set -eu

venv=.venv extras=test,bench only="" first="" with="" locked=""
while [ $# -gt 0 ]; do
    case "$1" in
        --venv) venv=$2 ;;
        --extras) extras=$2 ;;
        --python) only=$2 ;;
        --first) first=$2 ;;
        --with) with=$2 ;;
        --locked) locked=$2 ;;
        *) echo "setup: unknown option $1" >&2; exit 2 ;;
    esac
    shift 2
done
cd "$(dirname "$0")/.."

probe='
import sys
minor = sys.version_info[:2]
want = sys.argv[1]
if not (3, 11) <= minor < (3, 14) or (want and want != "%d.%d" % minor):
    sys.exit(1)
import ensurepip, ssl, venv
print("%d.%03d.%03d" % sys.version_info[:3], sys.executable)
'

# Every interpreter worth asking: by name on PATH, then the versions folder of pyenv.
candidates() {
    for name in python3.13 python3.12 python3.11 python3; do
        command -v "$name" || true
    done
    for path in "${PYENV_ROOT:-$HOME/.pyenv}"/versions/*/bin/python; do
        if [ -x "$path" ]; then echo "$path"; fi
    done
}

# The newest that runs, is in range and can make environments. A name that does not (a pyenv
# shim without a version behind it, a Debian python without ensurepip) is passed over.
choose() {
    candidates | while IFS= read -r path; do
        "$path" -c "$probe" "$only" 2>/dev/null || true
    done | sort -r | head -n 1 | cut -d ' ' -f 2-
}

recipe() {
    echo "extras=$extras python=$only first=$first with=$with locked=$locked"
    cat pyproject.toml scripts/setup.sh
    if [ -n "$locked" ]; then cat "$locked"/*.txt; fi
}

stamp="$venv/jlora-setup"
if [ -f "$stamp" ] && recipe | cmp -s - "$stamp" && "$venv/bin/python" -c "" 2>/dev/null; then
    exit 0
fi

# Two at once would take the environment from under each other. The lock goes with the process, however that ends.
if [ -z "${JLORA_SETUP_LOCKED:-}" ] && command -v flock >/dev/null; then
    mkdir -p "$(dirname "$venv")"
    flock --nonblock "$venv.lock" true || echo "setup: waits for another setup of $venv"
    export JLORA_SETUP_LOCKED=1
    exec flock "$venv.lock" sh scripts/setup.sh --venv "$venv" --extras "$extras" --python "$only" \
        --first "$first" --with "$with" --locked "$locked"
fi

if ! { [ -f "$stamp" ] && "$venv/bin/python" -c "$probe" "$only" >/dev/null 2>&1; }; then
    python=$(choose)
    if [ -z "$python" ]; then
        echo "setup: no usable Python ${only:-3.11, 3.12 or 3.13} found." >&2
        echo "setup: looked for python3.13, python3.12, python3.11 and python3 on PATH and in" >&2
        echo "setup: ${PYENV_ROOT:-$HOME/.pyenv}/versions; it needs the venv, ensurepip and ssl modules" >&2
        echo "setup: (on Debian and Ubuntu: apt-get install python3-venv)." >&2
        exit 1
    fi
    echo "setup: $("$python" --version) at $python -> $venv"
    "$python" -m venv --clear "$venv"
fi

rm -f "$stamp"
echo "setup: installing packages into $venv (some minutes the first time)"
# pip would compile on one core; all are compiled below.
pip() { "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile "$@"; }
if [ -n "$locked" ]; then
    minor=$("$venv/bin/python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    pip --require-hashes --requirement "$locked/python$minor.txt"
fi
# shellcheck disable=SC2086  # the lists are split on purpose
if [ -n "$first" ]; then pip $first; fi
# "compat" puts the checkout on the path. Otherwise a directory that holds a folder named jlora, as the parent of a clone
# does, would hide the package from a Python that runs there.
# shellcheck disable=SC2086
pip --config-settings editable_mode=compat --editable ".[$extras]" $with
# Where bytecode cannot be written later, by an image's user or with PYTHONDONTWRITEBYTECODE, each start of a process
# would compile all that it imports, for seconds. Some packages have templates that are no Python: their errors are not
# ours.
"$venv/bin/python" -m compileall -qq -j 0 "$venv/lib" > /dev/null 2>&1 || true
# shellcheck disable=SC2046
"$venv/bin/python" -m compileall -qq -j 0 $(ls -d jlora benchmarks tests tools 2>/dev/null)
recipe > "$stamp"
echo "setup: done"
