#!/usr/bin/env bash
# Set-up for the demo, the tests and development: system libraries, a virtual environment at .venv, and this
# project installed into it in editable mode with its native module built.
#
#   scripts/setup.sh            installs what is missing; about a second when nothing is
#   scripts/setup.sh --force    reinstalls everything
#
# Variables: PYTHON (interpreter for a new .venv, 3.11 or later), SGLANG_VERSION (one of those in
# python/sglang_scout/core/sglang_versions.py; default: the one in .venv, else the first), CXX and
# CMAKE_BUILD_PARALLEL_LEVEL as usual.
# Packages come from the indexes that the machine's pip or uv is configured for.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAMP=.venv/.sglang-scout-setup
BOOTSTRAP=.cache/uv-bootstrap
TRANSFER=cpu # which mooncake: an extra of pyproject.toml
[ ! -e /dev/nvidiactl ] || TRANSFER=cuda

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

first_sglang() { sed -n 's/^ADAPTERS = {"\([^"]*\)".*/\1/p' python/sglang_scout/core/sglang_versions.py; }

# The requested version, else the installed one, else the first supported one.
sglang_version() {
    local versions=python/sglang_scout/core/sglang_versions.py wanted
    wanted="$(echo .venv/lib/python*/site-packages/sglang-[0-9]*.dist-info)"
    wanted="${wanted##*/sglang-}" wanted="${wanted%.dist-info}"
    grep -qF "\"$wanted\":" "$versions" || wanted="$(first_sglang)"
    wanted="${SGLANG_VERSION:-$wanted}"
    grep -qF "\"$wanted\":" "$versions" || die "SGLANG_VERSION=$wanted is not supported; choose one of those in $versions"
    echo "$wanted"
}

# Everything that the installation depends on. Not Python files: the installation is editable.
fingerprint() {
    {
        sglang_version
        echo "$TRANSFER"
        find pyproject.toml scripts/setup.sh scripts/no_driver.sh sgl-kernel -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        .venv/bin/python -S -c 'import sys; print(sys.version, sys.prefix)' 2>/dev/null || echo "no venv"
    } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }

# -- system libraries ---------------------------------------------------------------------------------------

# ldconfig is not on the PATH of an ordinary user. Its output is read completely first, because grep -q
# would close the pipe early, which pipefail treats as a failure.
has_library() {
    local known
    known="$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null || true)"
    grep -q "$1" <<<"$known"
}

APT_UPDATED=0
apt_install() {
    local -a as_root=()
    command -v apt-get >/dev/null || die "there is no apt-get; install the equivalent of these Debian packages: $*"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || die "not root; run this as root first: apt-get install -y $*"
        as_root=(sudo -n)
    fi
    say "apt-get install $*"
    if [ "$APT_UPDATED" = 0 ]; then
        "${as_root[@]}" apt-get update -qq || say "apt-get update failed; continuing with the present package lists"
        APT_UPDATED=1
    fi
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null \
        || die "apt-get install $* failed"
}

system_packages() {
    local -a missing=()
    has_library 'libibverbs\.so\.1' || missing+=(libibverbs1) # mooncake, also over TCP
    has_library 'librdmacm\.so\.1' || missing+=(librdmacm1)
    has_library 'libnuma\.so\.1' || missing+=(libnuma1)
    if [ "$TRANSFER" = cuda ]; then
        has_library 'libmlx5\.so\.1' || missing+=(ibverbs-providers)
        has_library 'libcurl\.so\.4' || missing+=(libcurl4)
    fi
    command -v numactl >/dev/null || missing+=(numactl)
    command -v "${CXX:-c++}" >/dev/null || missing+=(g++)
    [ "${#missing[@]}" = 0 ] || apt_install "${missing[@]}"
}

# -- Python -------------------------------------------------------------------------------------------------

python_version() { "$1" -c 'import sys; print(sys.version_info[0] * 100 + sys.version_info[1])' 2>/dev/null; }

# 3.11 and 3.12 first: all of SGLang's requirements have wheels there.
find_python() {
    local candidate version
    if [ -n "${PYTHON:-}" ]; then
        version="$(python_version "$PYTHON")" || die "PYTHON=$PYTHON cannot be run"
        [ "$version" -ge 311 ] || die "PYTHON=$PYTHON is older than 3.11"
        echo "$PYTHON"
        return
    fi
    for candidate in python3 python3.12 python3.11; do
        version="$(python_version "$candidate")" || continue
        if [ "$version" = 311 ] || [ "$version" = 312 ]; then echo "$candidate"; return; fi
    done
    for candidate in python3 python3.13; do
        version="$(python_version "$candidate")" || continue
        if [ "$version" = 313 ]; then echo "$candidate"; return; fi
    done
    die "found no Python 3.11, 3.12 or 3.13; install one, or set PYTHON=/path/to/python3.12"
}

# Prints a uv command, or nothing.
find_uv() {
    if uv --version >/dev/null 2>&1; then echo uv; return; fi
    if [ -x "$BOOTSTRAP/bin/uv" ]; then echo "$BOOTSTRAP/bin/uv"; return; fi
    mkdir -p .cache
    if make_venv "$1" "$BOOTSTRAP" && "$BOOTSTRAP/bin/python" -m pip install -q uv >&2; then
        echo "$BOOTSTRAP/bin/uv"
    fi
}

# Debian ships python3 without venv support.
make_venv() {
    "$1" -c 'import ensurepip, venv' 2>/dev/null || apt_install "python$("$1" -c \
        'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2
    "$1" -m venv "$2" >&2
}

python_headers() {
    "$1" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' \
        || apt_install "python$("$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-dev"
}

# Runs a command that is silent for minutes, with progress output. Without the lock, which a last sleep would keep.
patiently() {
    local status=0 ticker
    (while sleep 20 >&- 2>&- && kill -0 $$ 2>/dev/null; do say "still running after $SECONDS s"; done) 9>&- &
    ticker=$!
    "$@" || status=$?
    kill "$ticker"
    return "$status"
}

# -- the project --------------------------------------------------------------------------------------------

# The builds of mooncake share files: if the other one is installed, because a GPU was added or removed, both are
# removed, and ours is reinstalled.
drop_other_mooncake() {
    local name other=cpu remove=("$1" pip uninstall -q --python .venv/bin/python)
    [ "$TRANSFER" = cuda ] || other=cuda
    [ -n "$1" ] || remove=(.venv/bin/python -m pip uninstall -q -y)
    name="$(sed -n "s/^$other = \[\"\(.*\)==.*/\1/p" pyproject.toml)"
    if compgen -G ".venv/lib/python*/site-packages/${name//-/_}-*.dist-info" >/dev/null; then
        say "removing $name"
        "${remove[@]}" "$name" "$(sed -n "s/^$TRANSFER = \[\"\(.*\)==.*/\1/p" pyproject.toml)"
    fi
}

install_project() {
    local uv="$1" sglang ours=".[test,docs,$TRANSFER]"
    sglang="sglang==$(sglang_version)"
    local -a extra=()
    if [ -z "${SGLANG_VERSION:-}" ] && [ "$(sglang_version)" != "$(first_sglang)" ]; then
        say ".venv keeps its $sglang; for the default, run SGLANG_VERSION=$(first_sglang) scripts/setup.sh"
    fi
    drop_other_mooncake "$uv"
    export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
    if [ "$(python_version .venv/bin/python)" -ge 313 ]; then
        # SGLang requires a release of outlines that has no wheels for Python 3.13. It is a grammar back-end,
        # imported only if selected (the default is xgrammar).
        printf '%s ; python_version < "3.13"\n' outlines outlines-core >.cache/overrides.txt
        extra=(--override .cache/overrides.txt)
    fi
    if [ -n "$uv" ]; then
        # If the machine is only configured for pip, pass the same settings to uv.
        if [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ]; then
            local index
            index="$(.venv/bin/python -m pip config get global.index-url 2>/dev/null \
                || pip config get global.index-url 2>/dev/null || true)"
            [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
        fi
        say "installing $sglang into .venv (about 9 GB the first time)"
        if patiently "$uv" pip install -q --python .venv/bin/python "${extra[@]}" "$sglang" -e "$ours"; then return; fi
        say "uv failed; trying with pip"
    fi
    [ "${#extra[@]}" = 0 ] || die "Python 3.13 needs uv, which could not be used; set PYTHON to a Python 3.11 or 3.12"
    .venv/bin/python -m pip --version >/dev/null 2>&1 || .venv/bin/python -m ensurepip -q
    patiently .venv/bin/python -m pip install -q "$sglang" -e "$ours"
}

stand_in_for_the_driver() {
    rm -rf .venv/lib/no-driver
    if [ "$(sglang_version)" = 0.5.15.post1 ] || has_library 'libcuda\.so\.1'; then return; fi
    scripts/no_driver.sh .venv
}

verify() {
    .venv/bin/python - <<'PY' || die "the installation is not usable (see above); try scripts/setup.sh --force"
import importlib
for module in ("sglang_scout._native", "torch", "mooncake.engine", "sglang_router"):  # torch brings libcudart
    importlib.import_module(module)
PY
}

main() {
    if [ "${1:-}" = --force ]; then
        rm -f "$STAMP"
    elif [ "${1:-}" = --help ] || [ "${1:-}" = -h ]; then
        sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' scripts/setup.sh
        return
    elif [ -n "${1:-}" ]; then
        die "unknown argument $1; see scripts/setup.sh --help"
    fi
    if up_to_date; then return; fi
    mkdir -p .cache
    exec 9>.cache/setup.lock
    flock 9 # of two concurrent callers the second waits and finds the work done
    if up_to_date; then return; fi

    system_packages
    local python uv
    if [ -x .venv/bin/python ] && [ "$(python_version .venv/bin/python)" -ge 311 ]; then
        python=.venv/bin/python
    else
        python="$(find_python)"
    fi
    say "Python $("$python" -c 'import platform; print(platform.python_version())')"
    python_headers "$python"
    uv="$(find_uv "$python")"
    if [ "$python" != .venv/bin/python ]; then
        rm -rf .venv
        if [ -n "$uv" ]; then
            "$uv" venv -q --python "$(command -v "$python")" .venv
        else
            say "uv could not be installed; using pip, which takes some minutes longer"
            make_venv "$python" .venv
        fi
    fi
    install_project "$uv"
    stand_in_for_the_driver
    verify
    fingerprint >"$STAMP"
    say "done"
}

main "$@"
