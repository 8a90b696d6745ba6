"""The SLURM script runs under a stand-in of SLURM; the manifest has the fields of KubeRay."""

import os
import re
import signal
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "examples/cluster"
# `srun OPTIONS… COMMAND` runs the command here. Ray's daemons stay until they are ended.
SRUN = """#!/usr/bin/env bash
node=
while [[ $1 == --* ]]; do [[ $1 == --nodelist=* ]] && node=${1#*=}; shift; done
echo "$node: $*" >> "$CALLS"
exec "$@"
"""
RAY = """#!/usr/bin/env bash
[[ $1 == health-check ]] && { [[ -e $CALLS.asked ]]; code=$?; touch "$CALLS.asked"; exit $code; }
exec sleep 300
"""
QUADRIGA = """#!/usr/bin/env bash
trap 'kill $!; echo "saved" >> "$CALLS"; exit 75' USR1
echo "$RAY_ADDRESS ${#RAY_AUTH_TOKEN}" >> "$CALLS"
[[ $1 == train ]] && { until grep -q ^b: "$CALLS"; do sleep 0.1; done; exit 3; }
sleep 300 & wait
"""


def started(tmp_path, command):
    tools = {"srun": SRUN, "ray": RAY, "quadriga": QUADRIGA,
             "scontrol": "#!/usr/bin/env bash\nprintf 'a\\nb\\n'\n"}  # fmt: skip
    for name, text in tools.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    slurm = {"SLURM_JOB_NODELIST": "[a-b]", "SLURM_GPUS_ON_NODE": "8", "SLURM_CPUS_ON_NODE": "64"}
    found = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CALLS": str(tmp_path / "calls"), **slurm}
    return subprocess.Popen(
        ["bash", str(CLUSTER / "slurm.sh"), command, "a.b=1"], env=found, start_new_session=True
    )


def test_slurm_starts_ray_on_every_node_and_returns_the_code_of_the_run(tmp_path):
    assert started(tmp_path, "train").wait(60) == 3
    calls = (tmp_path / "calls").read_text().splitlines()
    assert "a:6379 48" in calls  # the address, and a token
    start = "ray start --block --disable-usage-stats --num-gpus=8 --num-cpus=64"
    assert f"a: {start} --head --node-ip-address=a --port=6379" in calls
    assert f"b: {start} --address=a:6379" in calls
    assert calls.count("a: ray health-check --address a:6379") == 2  # until it answers
    assert "a: quadriga train a.b=1 trainer.nnodes=2 trainer.n_gpus_per_node=8" in calls


def test_the_signal_of_slurm_reaches_the_run(tmp_path):
    script = started(tmp_path, "sft")
    calls = tmp_path / "calls"
    while not calls.exists() or "a:6379 48" not in calls.read_text():
        assert script.poll() is None
    script.send_signal(signal.SIGUSR1)
    assert script.wait(60) == 75 and "saved" in calls.read_text()


def test_the_manifest_is_a_ray_job_with_the_version_of_the_image():
    job = yaml.safe_load((CLUSTER / "kuberay.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    spec = job["spec"]
    assert {*spec} <= {"entrypoint", "shutdownAfterJobFinishes", "ttlSecondsAfterFinished",
                       "backoffLimit", "rayClusterSpec"}  # fmt: skip
    cluster = spec["rayClusterSpec"]
    assert {*cluster} == {"rayVersion", "headGroupSpec", "workerGroupSpecs"}
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    (workers,) = cluster["workerGroupSpecs"]
    assert {*workers} == {"groupName", "replicas", "minReplicas", "maxReplicas", "rayStartParams",
                          "template"}  # fmt: skip
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        names = {volume["name"] for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == names
        assert container["resources"]["limits"] == container["resources"]["requests"]
    gpus = int(
        workers["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]
    )
    words = spec["entrypoint"].split()
    assert f"trainer.nnodes={workers['replicas']}" in words
    assert f"trainer.n_gpus_per_node={gpus}" in words


def test_the_image_has_the_pinned_versions_and_known_extras():
    text = (CLUSTER / "Containerfile").read_text()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (chosen,) = re.findall(r"ARG EXTRAS=(\S+)", text)
    assert {*chosen.split(",")} <= {*extras} and "-c constraints.txt" in text
    assert {"vllm", "sglang", "all-trackers"} <= {*extras}


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed (make docs)")
def test_the_documentation_site_is_built(tmp_path):
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, timeout=300)
    assert (tmp_path / "concepts/trl/index.html").exists()


def test_every_page_is_on_the_site():
    text = (ROOT / "mkdocs.yml").read_text()
    pages = {path.relative_to(ROOT / "docs").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert {*re.findall(r"\S+\.md", text)} == pages
