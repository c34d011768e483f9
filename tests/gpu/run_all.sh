#!/usr/bin/env bash
# Run tests/gpu, each backend in a process of its own, and print one line for each.
#
#   bash tests/gpu/run_all.sh [PYTEST ARGUMENT]...
#
# Nothing of this repository has to be installed and no network is needed: the packages are imported from
# the checkout, and their entry points come from generated metadata. Needed are pytest, hypothesis, attrs,
# cattrs, click, jinja2, pluggy, rich, ruamel.yaml, numpy, torch, transformers and matplotlib; kernel
# libraries that are missing are skipped. PYTHON names the interpreter. LOGS names a folder for the full
# output, by default a temporary one that is removed if everything passed. LIMIT is the seconds that one
# process may take (900). ONLY is a pattern of the names that are run, such as '@(memory|runner-*)'.
# CAPTURE_PLANNER_GPU_EXAMPLES: see the tests.
#
# The exit code is 0 if nothing failed, and 1 otherwise.
set -uo pipefail
shopt -s extglob

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$root" || exit 1
python=${PYTHON:-python3}
limit=${LIMIT:-900}
site=$(mktemp -d)
logs=${LOGS:-$site/logs}
mkdir -p "$logs"

# Registry and versions are read from metadata: write it for the core and for each distribution here.
"$python" - "$site" <<'PYTHON' || exit 1
import pathlib, re, sys, tomllib

site = pathlib.Path(sys.argv[1])
core = re.search(r'__version__ = "(.+?)"', pathlib.Path("capture_planner/__init__.py").read_text("utf-8"))
found = (*pathlib.Path().glob("*/pyproject.toml"), *pathlib.Path().glob("[be]*/*/pyproject.toml"))
for file in (pathlib.Path("pyproject.toml"), *found):
    if "template" in file.parts:
        continue
    project = tomllib.loads(file.read_text("utf-8"))["project"]
    name, version = project["name"], project.get("version") or core[1]
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n", "utf-8")
    groups = dict(project.get("entry-points", {}))
    groups["console_scripts"] = project.get("scripts", {})
    lines = []
    for group, entries in groups.items():
        if entries:
            lines += [f"[{group}]", *(f"{key} = {value}" for key, value in entries.items()), ""]
    (info / "entry_points.txt").write_text("\n".join(lines), "utf-8")
PYTHON

path=$root:$site
for source in */src backends/*/src engines/*/src; do
    [[ $source == backends/template/src ]] || path=$path:$root/$source
done
export PYTHONPATH=$path${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1
export HYPOTHESIS_PROFILE=${HYPOTHESIS_PROFILE:-ci} HF_HUB_OFFLINE=1

failed=0 ran=0
check() { # NAME PYTEST-ARGUMENT...
    local name=$1 code started=$SECONDS summary
    shift
    # shellcheck disable=SC2053  # a pattern
    [[ $name == ${ONLY:-*} ]] || return 0
    ran=1
    timeout --kill-after=30 "$limit" "$python" -m pytest -q -p no:cacheprovider -ra "$@" >"$logs/$name.log" 2>&1
    code=$?
    case $code in
    0) summary=passed ;;
    5) summary="nothing to run" ;; # every test was deselected, or the module skipped itself
    124 | 137) summary="FAILED: longer than $limit s" failed=1 ;;
    *) summary="FAILED (exit code $code)" failed=1 ;;
    esac
    printf '%-28s %5d s  %s: %s\n' "$name" $((SECONDS - started)) "$summary" "$(tail -n 1 "$logs/$name.log")"
}

"$python" -c 'import torch, transformers
where = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "no CUDA device: only tests for a CPU run"
print(f"{where}; torch {torch.__version__}, transformers {transformers.__version__}")'

check kernels-triton tests/gpu/test_triton.py "$@"
check kernels-flash_attention tests/gpu/test_flash_attention.py "$@"
check kernels-flashinfer tests/gpu/test_flashinfer.py "$@"
check memory tests/gpu/test_memory.py "$@"
check campaign tests/gpu/test_campaign.py "$@"
check first-use tests/gpu/test_first_use.py "$@"
# Not a test of this folder: what processes share has to be picklable on a GPU, too.
check processes tests/conformance/test_processes.py "$@"
check graph-dump tests/gpu/test_graph_dump.py "$@"
check transformers tests/gpu/test_transformers.py "$@"
for case in reference triton flash_attention flashinfer flashinfer_wrappers; do
    check "runner-$case" tests/gpu/test_runner.py tests/gpu/test_unpadded_requests.py -k "$case-cuda" "$@"
done
check runner-cpu tests/gpu/test_runner.py tests/gpu/test_unpadded_requests.py -k "not -cuda" "$@"

if ((!ran)); then
    echo "no name matches ONLY=$ONLY" >&2
    failed=2
fi
if [[ -z ${LOGS:-} && $failed -ne 0 ]]; then
    echo "output: $logs"
else
    rm -rf "$site"
fi
exit $failed
