#!/usr/bin/env bash
# Runs the tests of compiled code with another version of torch; see --help.
set -euo pipefail

usage() {
    cat <<'TEXT'
Usage: scripts/other_torch.sh [--fresh] [--python PATH] [--record] VERSION [PYTEST OPTION ...]

Makes an environment with another version of torch, and runs the tests of compiled code in it (those
with the marker `compiled`, all cases). All other packages have the versions of constraints.txt. A
CUDA build of torch runs on a CPU.

VERSION is a version of torch, such as 2.12.1, or

    oldest    the oldest version that pyproject.toml allows
    newest    the newest torch and transformers, made anew on every call

The environment is kept in ${XDG_CACHE_HOME:-~/.cache}/ranvier/torch, until pyproject.toml or
constraints.txt changes.

    --fresh          make the environment anew
    --python PATH    use this interpreter, whose environment has the packages, and make none
    --record         append a row to benchmarks/data/torch_versions.csv
    --help           print this text
TEXT
}

fresh=false
python=
record=false
while (($#)); do
    case $1 in
        --fresh) fresh=true ;;
        --python) python=${2:?--python needs a path} && shift ;;
        --record) record=true ;;
        --help | -h) usage && exit ;;
        -*) echo "Unknown option $1. See scripts/other_torch.sh --help." >&2 && exit 2 ;;
        *) break ;;
    esac
    shift
done
if (($# == 0)); then
    usage >&2
    exit 2
fi
version=$1
shift

cd "$(dirname "${BASH_SOURCE[0]}")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONPATH=$PWD/src

if [[ $version == oldest ]]; then
    version=$(sed -n 's/^ *"torch>=\([0-9.]*\)",$/\1/p' pyproject.toml)
fi

# Packages that are not the ones of constraints.txt, and what pip is asked for instead.
if [[ $version == newest ]]; then
    fresh=true
    free='torch|transformers'
    wanted=(torch transformers)
else
    free=torch
    # 2.11 is 2.11.0, and not the newest patch.
    wanted=("torch==$version")
fi

start=$SECONDS
if [[ -z $python ]]; then
    cache=${XDG_CACHE_HOME:-$HOME/.cache}/ranvier/torch
    digest=$(cat pyproject.toml constraints.txt | sha1sum | cut -c 1-12)
    environment=$cache/$version-$digest
    python=$environment/bin/python
    # The file `complete` is written last, so that an interrupted installation is made anew.
    if $fresh || [[ ! -e $environment/complete ]]; then
        # An environment has several GB: those of other constraints are removed.
        rm -rf "$cache/$version-"*
        python3 -m venv "$environment"
        grep -Ev "^($free)==" constraints.txt > "$environment/constraints.txt"
        "$python" -m pip install --quiet -c "$environment/constraints.txt" "${wanted[@]}" -e '.[test]'
        touch "$environment/complete"
    fi
fi
printf 'Environment of torch %s: %d s\n' "$version" $((SECONDS - start))
"$python" -c 'import torch, transformers
print(f"torch {torch.__version__}, transformers {transformers.__version__}")'

# Only the modules with such tests are imported.
mapfile -t modules < <(grep -rl --include='test_*.py' 'pytest\.mark\.compiled' tests | sort)
results=$(mktemp)
trap 'rm -f "$results"' EXIT
start=$SECONDS
status=0
"$python" -m pytest --full -m compiled --junitxml "$results" "$@" "${modules[@]}" || status=$?
printf 'Tests of compiled code: %d s\n' $((SECONDS - start))
if $record; then
    "$python" scripts/torch_record.py "$results" $((SECONDS - start)) "$@"
fi
exit $status
