#!/usr/bin/env bash
# Set-up for the demo, the tests and development: system libraries, a virtual environment at .venv, and this
# project installed into it in editable mode with its native module built.
#
#   scripts/setup.sh            installs what is missing; about a second when nothing is
#   scripts/setup.sh --force    reinstalls everything
#
# Variables: PYTHON (interpreter for a new .venv, 3.11 or later; default: one that is installed, else uv downloads
# one), SGLANG_VERSION (one of those in python/sglang_scout/core/flags.py; default: the one in .venv, else
# the first), CXX and CMAKE_BUILD_PARALLEL_LEVEL as usual.
# Packages come from the indexes that the machine's pip or uv is configured for, so there is no lock file: it would
# name one index.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

STAMP=.venv/.sglang-scout-setup
UV=.cache/uv-bootstrap/bin/uv
VERSIONS=python/sglang_scout/core/flags.py
TRANSFER=cpu # which mooncake: an extra of pyproject.toml
[ ! -e /dev/nvidiactl ] || TRANSFER=cuda

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup: %s\n' "$*" >&2; exit 1; }

FIRST_SGLANG="$(sed -n 's/^ADAPTERS = {"\([^"]*\)".*/\1/p' "$VERSIONS")"

# The requested version, else the installed one, else the first supported one.
sglang_version() {
    local installed
    installed="$(echo .venv/lib/python*/site-packages/sglang-[0-9]*.dist-info)"
    installed="${installed##*/sglang-}" installed="${installed%.dist-info}"
    grep -qF "\"$installed\":" "$VERSIONS" || installed="$FIRST_SGLANG"
    echo "${SGLANG_VERSION:-$installed}"
}

# Everything that the installation depends on. Not Python files: the installation is editable.
fingerprint() {
    {
        sglang_version
        echo "$TRANSFER"
        find pyproject.toml scripts/setup.sh sgl-kernel -type f -print0 | LC_ALL=C sort -z | xargs -0 sha256sum
        .venv/bin/python -S -c 'import sys; print(sys.version, sys.prefix)' 2>/dev/null || echo "no venv"
    } | sha256sum | cut -d' ' -f1
}

up_to_date() { [ -f "$STAMP" ] && [ "$(cat "$STAMP")" = "$(fingerprint)" ]; }

# ldconfig is not on the PATH of an ordinary user. Its output is read completely first, because grep -q
# would close the pipe early, which pipefail treats as a failure.
has_library() {
    local known
    known="$(PATH="$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null || true)"
    grep -q "$1" <<<"$known"
}

apt_install() {
    local -a as_root=()
    command -v apt-get >/dev/null || die "there is no apt-get; install the equivalent of these Debian packages: $*"
    if [ "$(id -u)" != 0 ]; then
        sudo -n true 2>/dev/null || die "not root; run this as root first: apt-get install -y $*"
        as_root=(sudo -n)
    fi
    say "apt-get install $*"
    "${as_root[@]}" apt-get update -qq || say "apt-get update failed; continuing with the present package lists"
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

# Any Python 3 can install uv. Debian ships python3 without venv support.
find_uv() {
    if uv --version >/dev/null 2>&1; then UV=uv; return; fi
    if [ ! -x "$UV" ]; then
        python3 -c 'import ensurepip, venv' 2>/dev/null || apt_install python3-venv
        python3 -m venv --clear "${UV%/bin/uv}"
        "${UV%uv}python" -m pip install -q uv || die "cannot install uv; install it yourself"
    fi
}

# If the machine is only configured for pip, uv gets the same index.
pip_index() {
    local index
    [ -z "${UV_DEFAULT_INDEX:-}${UV_INDEX_URL:-}" ] || return 0
    index="$(python3 -m pip config get global.index-url 2>/dev/null || "${UV%uv}pip" config get global.index-url 2>/dev/null || true)"
    [ -z "$index" ] || export UV_DEFAULT_INDEX="$index"
}

# 3.11 and 3.12 first: all of SGLang's requirements have wheels there.
make_venv() {
    local new_enough='import sys; sys.exit(sys.version_info < (3, 11))' include
    if ! .venv/bin/python -c "$new_enough" 2>/dev/null; then
        rm -rf .venv
        if [ -n "${PYTHON:-}" ]; then
            "$PYTHON" -c "$new_enough" || die "PYTHON=$PYTHON cannot be run, or is older than 3.11"
        fi
        "$UV" venv -q --python "${PYTHON:->=3.11,<3.13}" .venv || "$UV" venv -q --python "${PYTHON:-3.13}" .venv \
            || die "found no Python 3.11, 3.12 or 3.13; install one, or set PYTHON=/path/to/python3.12"
    fi
    include="$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("include"))')"
    [ -e "$include/Python.h" ] || apt_install "${include##*/}-dev"
}

# The builds of mooncake share files: if the other one is installed, because a GPU was added or removed, both are
# removed, and ours is reinstalled.
drop_other_mooncake() {
    local name other=cpu
    [ "$TRANSFER" = cuda ] || other=cuda
    name="$(sed -n "s/^$other = \[\"\(.*\)==.*/\1/p" pyproject.toml)"
    if compgen -G ".venv/lib/python*/site-packages/${name//-/_}-*.dist-info" >/dev/null; then
        say "removing $name"
        "$UV" pip uninstall -q --python .venv/bin/python "$name" "$(sed -n "s/^$TRANSFER = \[\"\(.*\)==.*/\1/p" pyproject.toml)"
    fi
}

install_project() {
    local sglang
    sglang="$(sglang_version)"
    if [ -z "${SGLANG_VERSION:-}" ] && [ "$sglang" != "$FIRST_SGLANG" ]; then
        say ".venv keeps its sglang==$sglang; for the default, run SGLANG_VERSION=$FIRST_SGLANG scripts/setup.sh"
    fi
    drop_other_mooncake
    pip_index
    export CMAKE_BUILD_PARALLEL_LEVEL="${CMAKE_BUILD_PARALLEL_LEVEL:-$(nproc)}"
    # SGLang requires a release of outlines that has no wheels for Python 3.13. It is a grammar back-end,
    # imported only if selected (the default is xgrammar).
    printf '%s ; python_version < "3.13"\n' outlines outlines-core >.cache/overrides.txt
    say "installing sglang==$sglang into .venv (about 9 GB the first time)"
    "$UV" pip install --python .venv/bin/python --override .cache/overrides.txt "sglang==$sglang" -e ".[test,docs,$TRANSFER]"
}

verify() {
    # In this order: torch brings mooncake's libcudart.
    .venv/bin/python -c 'import sglang_scout._native, torch, mooncake.engine, sglang_router' \
        || die "the installation is not usable (see above); try scripts/setup.sh --force"
}

case "${1:-}" in
    "") ;;
    --force) rm -f "$STAMP" ;;
    -h | --help) sed -n '2,/^set/{/^set/d;s/^# \{0,1\}//p}' scripts/setup.sh; exit ;;
    *) die "unknown argument $1; see scripts/setup.sh --help" ;;
esac
grep -qF "\"$(sglang_version)\":" "$VERSIONS" \
    || die "SGLANG_VERSION=$SGLANG_VERSION is not supported; choose one of those in $VERSIONS"
if up_to_date; then exit; fi
mkdir -p .cache
exec 9>.cache/setup.lock
flock 9 # of two concurrent callers the second waits and finds the work done
if up_to_date; then exit; fi
system_packages
find_uv
make_venv
install_project
verify
fingerprint >"$STAMP"
say "done"
