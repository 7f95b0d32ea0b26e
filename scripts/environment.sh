# Sourced by the scripts beside it: enters the project's folder and makes .venv with the pinned set of versions.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

make_environment() {
    local python stamp want
    for python in "${PYTHON:-python3}" python3.13 python3.12 python3.11; do
        if command -v "$python" >/dev/null && "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
            break
        fi
        python=
    done
    if [ -z "$python" ]; then
        echo "Error: Python 3.11 or newer is needed: install it, or name it in PYTHON=..." >&2
        exit 3
    fi
    stamp=.venv/.installed
    want="$(cat pyproject.toml scripts/constraints.txt | cksum)${EXTRAS:+ $EXTRAS}"
    if [ ! -f "$stamp" ] || [ "$(cat "$stamp")" != "$want" ]; then
        echo "making .venv with the versions in scripts/constraints.txt ..." >&2
        .venv/bin/python -m pip --version >/dev/null 2>&1 || "$python" -m venv --clear .venv
        # Compiled when it is loaded, which most of it never is: half of the time that installing takes.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
            --constraint scripts/constraints.txt --editable ".[dev,rtx${EXTRAS:+,$EXTRAS}]"
        echo "$want" >"$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    unset PYTHONDONTWRITEBYTECODE
}

# mypy can't follow package-dir in pyproject.toml: it gets a tree of links that looks like the installed package.
make_typing_tree() {
    rm -rf .typing
    mkdir -p .typing/posexport
    local entry
    for entry in posexport/*; do
        ln -s "../../$entry" .typing/posexport/
    done
    ln -s ../../models ../../custom_ops .typing/posexport/
}
