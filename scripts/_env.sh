# Sourced by scripts/test and scripts/demo. Works from the repository's root and knows one function:
#
#   prepare_venv DIR EXTRA [CONSTRAINT ...]
#
# makes the virtual environment DIR, puts torch, this project (editable) and its extra ("" for none) into it, and sets
# PY to its python. A stamp inside DIR remembers what was installed, so a second call only compares it.
# Environment: PYTHON (default python3), TORCH_INDEX_URL (where to take torch from), and all of pip's own variables.

cd "$(dirname "${BASH_SOURCE[0]}")/.."

TORCH_VERSION=2.13.0 # installed where PYTHON has no torch >= 2.11 of its own

# The models that tests and demo run are small: one thread is the fastest, and it leaves shared machines alone.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"

die() {
    echo "$(basename "$0"): $*" >&2
    exit 1
}

# The folder that holds PYTHON's own torch, if that is a release that will do; else nothing.
torch_folder() {
    "$1" -c '
import importlib.util, importlib.metadata, pathlib, re
spec = importlib.util.find_spec("torch")
found = re.match(r"(\d+)\.(\d+)[\d.]*(\+|$)", importlib.metadata.version("torch")) if spec and spec.origin else None
if found and (int(found[1]), int(found[2])) >= (2, 11):
    print(pathlib.Path(spec.origin).parent.parent)
' 2>/dev/null || true
}

make_venv() {
    local venv=$1 python=${PYTHON:-python3} torch_home
    command -v "$python" >/dev/null || die "no $python found; install Python 3.11 or newer, or name one with PYTHON=."
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        die "$("$python" -V 2>&1) is too old; install Python 3.11 or newer, or name one with PYTHON=."
    echo "making $venv" >&2
    torch_home=$(torch_folder "$python")
    "$python" -m venv --clear ${torch_home:+--system-site-packages} "$venv" ||
        die "$python cannot make virtual environments; install its venv module (Debian: python3-venv)."
    # Where PYTHON belongs to an active environment, --system-site-packages means that environment's base instead.
    if [ -n "$torch_home" ] && [ -z "$(torch_folder "$venv/bin/python")" ]; then
        echo "$torch_home" >"$("$venv/bin/python" -c 'import site; print(site.getsitepackages()[0])')/torch_home.pth"
    fi
}

prepare_venv() {
    local venv=$1 extra=$2 wanted
    shift 2
    PY=$venv/bin/python
    wanted="$PWD $(cat pyproject.toml scripts/_env.sh | cksum) $*"
    if "$PY" -c '' 2>/dev/null; then
        if [ "$(cat "$venv/.installed-$extra" 2>/dev/null)" = "$wanted" ]; then return; fi
    else
        make_venv "$venv"
    fi
    # A bare `torch` would let pip take whatever build is newest: torch goes in first, and nothing may replace it.
    if [ -z "$(torch_folder "$PY")" ]; then
        echo "installing torch $TORCH_VERSION (set TORCH_INDEX_URL to choose its build)" >&2
        "$PY" -m pip install --quiet ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} "torch==$TORCH_VERSION"
    fi
    {
        "$PY" -c 'import importlib.metadata as m; print("torch==" + m.version("torch"))'
        [ $# -eq 0 ] || printf '%s\n' "$@"
    } >"$venv/constraints.txt"
    echo "installing compressed-spec and what it needs" >&2
    "$PY" -m pip install --quiet --constraint "$venv/constraints.txt" --editable ".${extra:+[$extra]}"
    echo "$wanted" | tee "$venv/.installed-" >"$venv/.installed-$extra" # any extra includes none
}
