# Sourced by run_rl_train.sh and tools/run_tests.sh, from the repository's root: sets PYTHON to an
# interpreter that has everything. PYTHON = interpreter to start from (default: python3, else a newer
# one on PATH); VENV = folder of the virtual environment (default: the active one, else .venv; VENV=
# uses PYTHON as it is). What cannot be used is named, with exit status 2; nothing is removed.
fail() {
    echo "$1" >&2
    exit 2
}

version_of() { "$1" -c 'import platform; print(platform.python_version())' 2>/dev/null; }

is_new_enough() { "$1" -c 'import sys; raise SystemExit(sys.version_info < (3, 11))' 2>/dev/null; }

choose_python() { # sets PYTHON, unless the user has
    [ -z "${PYTHON:-}" ] || return 0
    for PYTHON in python3 python3.13 python3.12 python3.11; do
        if is_new_enough "$PYTHON"; then return 0; fi
    done
    PYTHON=python3
}

check_python() {
    local version remedy
    remedy="set PYTHON=/path/to/python3.11 (from: apt install python3.11-venv, uv python install 3.11, or conda create -n rl python=3.11)"
    version=$(version_of "$PYTHON") || fail "PYTHON=$PYTHON does not run: Python 3.11 or newer is needed; $remedy"
    is_new_enough "$PYTHON" || fail "Python $version ($PYTHON) is too old: 3.11 or newer is needed; $remedy"
}

check_venv() { # that what is in $VENV can be used
    local version remedy
    remedy="move it away (mv $VENV $VENV.old) and run this again, or set VENV=/another/folder"
    version=$(version_of "$VENV/bin/python") || fail "$VENV is no working virtual environment: $VENV/bin/python does not run; $remedy"
    is_new_enough "$VENV/bin/python" || fail "$VENV holds Python $version, and 3.11 or newer is needed; $remedy"
    "$VENV/bin/python" -c 'import pip' 2>/dev/null || fail "$VENV is half installed: it has no pip; $remedy"
}

if [ -n "${VENV-${VIRTUAL_ENV:-.venv}}" ]; then
    VENV=${VENV-${VIRTUAL_ENV:-.venv}}
    if [ ! -e "$VENV" ] && [ ! -L "$VENV" ]; then
        choose_python
        check_python
        "$PYTHON" -m venv "$VENV" || fail "$PYTHON -m venv $VENV failed: install its venv package (apt install python3-venv), then move $VENV away and run this again"
    fi
    NEEDED="torch transformers peft nltk pycocotools tensorboard pyarrow pytest xdist hypothesis datasets openai inflect ruff"
    CHECK="from importlib.util import find_spec; raise SystemExit(not all(map(find_spec, '$NEEDED'.split())))"
    if ! "$VENV/bin/python" -c "$CHECK" 2>/dev/null; then
        check_venv
        echo "installing PyTorch, transformers and the other requirements into $VENV: about 2 GB (more with CUDA), some minutes"
        "$VENV/bin/python" -m pip install -e ".[test]" -c constraints.txt
    fi
    PYTHON=$VENV/bin/python
else
    choose_python
fi
check_python
# Once it is there, whether it works is what the training asks at its start.
[ -f "$(dirname "$PYTHON")/../nltk_data/corpora/wordnet/lexnames" ] || "$PYTHON" -m tools.fetch_wordnet
