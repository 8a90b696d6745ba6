#!/usr/bin/env bash
# Make an environment that holds this project and one rollout engine, in exact versions.
#
#   scripts/engines.sh vllm            .venv-vllm
#   scripts/engines.sh sglang          .venv-sglang
#   scripts/engines.sh vllm sglang     both
#
#   PYTHON=python3.12          the interpreter of a new environment (3.11 or newer)
#   PIP_ARGS="…"               options of pip, for example --extra-index-url of PyTorch's CPU builds
#   ENGINES_DEVICE=cpu|cuda    what to install for; by default cuda if nvidia-smi lists a GPU
#   VENV_VLLM, VENV_SGLANG     the folders of the environments
#
# Each engine needs an environment of its own, because the engines require different versions of
# torch's companions. scripts/engines/<engine>-<device>.txt lists the versions. An environment that
# was made from the same list is left as it is.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

fail() {
  echo "scripts/engines.sh: $*" >&2
  exit 1
}

device() {
  if [[ -n ${ENGINES_DEVICE:-} ]]; then
    [[ $ENGINES_DEVICE == cpu || $ENGINES_DEVICE == cuda ]] \
      || fail "ENGINES_DEVICE must be cpu or cuda, got '$ENGINES_DEVICE'"
    echo "$ENGINES_DEVICE"
  elif command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q GPU; then
    echo cuda
  else
    echo cpu
  fi
}

# new_venv <folder>: create it unless it is there.
new_venv() {
  [[ -x $1/bin/python ]] && return
  local python=${PYTHON:-python3}
  "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
    || fail "Quadriga needs Python 3.11 or newer; $python is older. Set PYTHON=…"
  echo "creating the virtual environment $1"
  "$python" -m venv "$1"
}

# pip <folder> <arguments>: install into the environment of that folder.
pip() {
  local venv=$1
  shift
  # PIP_ARGS holds several options, so it is split at spaces.
  # shellcheck disable=SC2086
  "$venv/bin/python" -m pip install --quiet --disable-pip-version-check ${PIP_ARGS:-} "$@"
}

# up_to_date <folder> <list>: whether the environment was made from these lines.
up_to_date() { [[ -x $1/bin/python ]] && cmp --silent "$2" "$1/.installed-engine"; }

# finish <folder> <list> <module> <version>: import the engine, then mark the environment as done.
finish() {
  local found
  found=$("$1/bin/python" -c "import quadriga, importlib; print(importlib.import_module('$3').__version__)" \
    | tail -n 1) || fail "$3 was installed into $1 but cannot be imported; see the error above"
  [[ ${found%%+*} == "$4" ]] || fail "$1 holds $3 $found, expected $4; remove $1 and run this again"
  cp "$2" "$1/.installed-engine"
  echo "$1 is ready: $3 $found"
}

# install_list <folder> <list> <engine>: the versions of the list and no others, then the project.
install_list() {
  pip "$1" --no-deps -r "$2" \
    || fail "$3 could not be installed from $2. If torch==…+cpu was not found, name the index of" \
      "PyTorch's CPU builds: PIP_ARGS='--extra-index-url …'"
  pip "$1" --no-deps -e .
}

# One function an engine: vllm <device> <folder> <list>.

vllm() {
  if [[ $1 == cpu ]]; then
    install_list "$2" "$3" vllm
  else
    pip "$2" -r "$3" -e '.[math,lora]' || fail "vllm could not be installed from $3"
  fi
  finish "$2" "$3" vllm 0.32.0
}

sglang() {
  if [[ $1 == cpu ]]; then
    install_list "$2" "$3" sglang
    local packages
    packages=$("$2/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # torchvision's build is for CUDA: what it registers with torch does not exist in a CPU build.
    : >"$packages/torchvision/_meta_registrations.py"
    # SGLang imports sgl_kernel, which has no build for CPUs; see the file.
    cp tests/real_engines/sgl_kernel_cpu.py "$packages/sgl_kernel.py"
  else
    pip "$2" -r "$3" -e '.[math,lora]' || fail "sglang could not be installed from $3"
  fi
  finish "$2" "$3" sglang 0.5.23
}

[[ $# -gt 0 ]] || fail "name an engine: vllm or sglang"
device=$(device)
for engine in "$@"; do
  case $engine in
    vllm) folder=${VENV_VLLM:-.venv-vllm} ;;
    sglang) folder=${VENV_SGLANG:-.venv-sglang} ;;
    *) fail "there is no engine '$engine'; known: vllm, sglang" ;;
  esac
  list=scripts/engines/$engine-$device.txt
  [[ -f $list ]] || fail "$engine on $device has no list of versions ($list)"
  if up_to_date "$folder" "$list"; then
    echo "$folder is ready"
    continue
  fi
  echo "installing $engine for $device into $folder (takes minutes)"
  new_venv "$folder"
  "$engine" "$device" "$folder" "$list"
done
