# Sourced by the launchers. `use_environment [dev]` sets PYTHON to an interpreter that has the project's dependencies:
#   1. $PYTHON, if it is set;
#   2. else the first python on PATH, if it has them (an environment of the user's own is used as it is);
#   3. else the one in .venv of the repository, which is made first where it is missing or unfinished.
# Expects `repo`, the repository's folder. dev: with the packages that tests need.

new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null
}

lacks() { # lacks PYTHON [dev]: prints what that Python lacks; fails if that is nothing
    if ! new_enough "$1"; then
        echo "Python 3.10 or newer"
        return
    fi
    ! "$1" "$repo/scripts/check_env.py" ${2:+"$2"} 2>&1
}

use_environment() {
    local extra="${1:-}" candidate missing
    if [[ -n "${PYTHON:-}" ]]; then
        if ! command -v "$PYTHON" >/dev/null; then
            fail "PYTHON=$PYTHON: no such program."
        fi
        if missing="$(lacks "$PYTHON" "$extra")"; then
            fail "PYTHON=$PYTHON lacks: $missing. Install them there, or unset PYTHON."
        fi
        return
    fi
    for candidate in python3 python; do
        if command -v "$candidate" >/dev/null && ! lacks "$candidate" "$extra" >/dev/null; then
            PYTHON="$(command -v "$candidate")"
            return
        fi
    done
    if [[ -n "${VIRTUAL_ENV:-${CONDA_PREFIX:-}}" ]] && missing="$(lacks python "$extra")"; then
        say "The active environment (${VIRTUAL_ENV:-$CONDA_PREFIX}) is not used: it lacks $missing."
    fi
    PYTHON="$repo/.venv/bin/python"
    (make_venv "$extra") 9<"$repo"
}

# .venv/setup-state says how far a set-up came: "unfinished", or what it was made from. It is written last, so that one
# that was interrupted is seen and redone. An environment without it is not ours to change.
make_venv() { # in a subshell whose file descriptor 9 is the repository's folder, to lock it
    local extra="$1" venv="$repo/.venv" sources state="" base
    # One set-up at a time. Where folders cannot be locked (some network file systems, no flock): go without.
    if command -v flock >/dev/null && ! flock -n 9 2>/dev/null; then
        say "Waiting for a set-up that is already under way ..."
        flock 9 2>/dev/null || true
    fi
    sources="$(cat "$repo/pyproject.toml" "$repo/constraints.txt" | cksum | tr ' ' -)"
    if [[ -f "$venv/setup-state" ]]; then
        state="$(<"$venv/setup-state")"
        if [[ "$state" == "$sources dev" || "$state" == "$sources $extra" ]]; then
            return
        fi
    elif [[ -e "$venv/pyvenv.cfg" ]]; then
        if lacks "$venv/bin/python" "$extra" >/dev/null; then
            fail ".venv was not made by this script, and lacks: $(lacks "$venv/bin/python" "$extra")." \
                "Install them there, or remove the folder."
        fi
        return
    fi

    SECONDS=0
    if [[ "$state" == "" || "$state" == unfinished ]]; then
        base="$(find_python)"
        say "Setting up $venv with $("$base" --version). This happens once and takes some minutes (torch is large)."
        rm -rf "$venv"
        mkdir "$venv"
        echo unfinished >"$venv/setup-state"
        if ! "$base" -m venv "$venv"; then
            fail "$base cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv." \
                "Or activate an environment of your own with the packages of pyproject.toml."
        fi
    else
        say "Bringing $venv up to date with pyproject.toml and constraints.txt."
        echo unfinished >"$venv/setup-state"
    fi
    if ! "$venv/bin/python" -m pip install --disable-pip-version-check \
        -c "$repo/constraints.txt" -e "$repo${extra:+[$extra]}" >&2; then
        fail "Installing the packages failed; pip says why above. The next start tries again."
    fi
    echo "$sources $extra" >"$venv/setup-state"
    say "Set-up finished after $SECONDS seconds."
}

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python3.10 python; do
        if command -v "$candidate" >/dev/null && new_enough "$candidate"; then
            command -v "$candidate"
            return
        fi
    done
    fail "No Python 3.10 or newer on PATH."
}

say() {
    echo "$*" >&2
}

fail() {
    say "$*"
    exit 1
}
