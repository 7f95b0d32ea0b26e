# The scripts in this folder source this file. It changes to the project folder and creates .venv with pinned versions.
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
        # --no-compile halves the time of installing. Modules are compiled when they are loaded, and most never are.
        .venv/bin/python -m pip install --quiet --disable-pip-version-check --no-compile \
            --constraint scripts/constraints.txt --editable ".[dev,rtx${EXTRAS:+,$EXTRAS}]"
        echo "$want" >"$stamp"
    fi
    export PATH="$PWD/.venv/bin:$PATH"
    unset PYTHONDONTWRITEBYTECODE
}

# Tests exchange gigabytes in short-lived files. They are kept in memory if there is enough room.
keep_temporary_files_in_memory() {
    local free
    if [ -n "${TMPDIR-}" ] || [ ! -w /dev/shm ] || grep -q ' /dev/shm .*noexec' /proc/mounts; then return; fi
    free=$(df --output=avail --block-size=1M /dev/shm | tail -n 1)
    if [ "$free" -ge 8000 ]; then export TMPDIR=/dev/shm; fi
}

# Finds a Chromium for the browser tests: one of the system, or one from npm in .venv, or (as root) one from apt.
# Without any of them, the browser tests are "not run". The search runs once: delete .venv/chromium to search again.
find_chromium() {
    local name folder=$PWD/.venv/chromium
    for name in chromium chromium-browser google-chrome google-chrome-stable chrome; do
        if command -v "$name" >/dev/null; then return; fi
    done
    if [ -d "$folder" ]; then return; fi
    mkdir -p "$folder"
    echo "getting a Chromium for the browser tests ..." >&2
    chromium_from_npm "$folder" || chromium_from_apt || echo "found no Chromium: browser tests are not run" >&2
}

# @sparticuz/chromium contains a headless Chromium for x86-64 Linux and the libraries that it needs.
chromium_from_npm() {
    local folder=$1 part
    [ "$(uname -sm)" = "Linux x86_64" ] && command -v npm node tar timeout >/dev/null || return 1
    timeout 120 npm install --silent --no-audit --no-fund --ignore-scripts --prefix "$folder" \
        @sparticuz/chromium@153.0.0 >/dev/null 2>&1 || return 1
    for part in chromium al2023.tar swiftshader.tar fonts.tar; do
        node -e 'const [from, to] = process.argv.slice(1), fs = require("fs")
            fs.writeFileSync(to, require("zlib").brotliDecompressSync(fs.readFileSync(from)))' \
            "$folder/node_modules/@sparticuz/chromium/bin/$part.br" "$folder/$part" 2>/dev/null || return 1
    done
    for part in al2023 swiftshader fonts; do
        tar -xf "$folder/$part.tar" -C "$folder" && rm "$folder/$part.tar" || return 1
    done
    rm -r "$folder/node_modules"
    chmod +x "$folder/chromium"
    cat >.venv/bin/chromium <<EOF
#!/bin/sh
[ -e /etc/fonts/fonts.conf ] || export XDG_DATA_HOME="$folder"
LD_LIBRARY_PATH="$folder/lib" exec "$folder/chromium" "\$@"
EOF
    chmod +x .venv/bin/chromium
    .venv/bin/chromium --version >/dev/null 2>&1 || { rm .venv/bin/chromium && return 1; }
}

chromium_from_apt() {
    [ "$(id -u)" = 0 ] && command -v apt-get timeout >/dev/null || return 1
    DEBIAN_FRONTEND=noninteractive timeout 300 sh -c \
        'apt-get update -qq && apt-get install -qq -y --no-install-recommends chromium' >/dev/null 2>&1 || return 1
}

# mypy cannot follow package-dir in pyproject.toml. It gets a tree of links that looks like the installed package.
make_typing_tree() {
    rm -rf .typing
    mkdir -p .typing/posexport
    local entry
    for entry in posexport/*; do
        ln -s "../../$entry" .typing/posexport/
    done
    ln -s ../../models ../../custom_ops .typing/posexport/
}
