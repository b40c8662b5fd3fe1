"""Scripts of the recipes for clusters and gates are run as the page has them, with stand-ins for what no test has.

Stand-ins are the scheduler, the launcher, Ray, the bucket's client, and the training program, which puts the traces of
a job where a recorded run has written. What is thence in the scripts is thence, as forks of one process.
"""

from __future__ import annotations

import gzip
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from diff_runs import STEP, trace_file
from forked_command import forked_command
from helpers import DATA

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
GITHUB = ROOT / "docs" / "diff_workflow.yml"
JOB = DATA / "torch" / "waits"
NOTHING = "#!/bin/sh\n"
LAUNCHER = """#!/bin/sh
# What the first rank of the node would write.
mkdir -p "$NODE_FOLDER"
cp "$JOB/group_rank$NODE.json.gz" "$NODE_FOLDER"
"""
PROGRAMS = {
    "scontrol": "#!/bin/sh\necho node0\necho node1\n",
    "srun": """#!/bin/sh
for SLURM_NODEID in 0 1; do
    export SLURM_NODEID NODE=$SLURM_NODEID NODE_FOLDER="$RUN/$SLURM_NODEID"
    "$@"
done
""",
    "torchrun": LAUNCHER,
    "ray": f"#!/bin/sh\n[ $1 = start ] || exit 0\n{LAUNCHER.partition(chr(10))[2]}",
    "hostname": '#!/bin/sh\necho "$NODE"\n',
    "aws": '#!/bin/sh\nmkdir -p "${5#file://}" && cp -r "$4"/. "${5#file://}"\n',
    "sleep": '#!/bin/sh\n[ -e "$RUN.store" ] && kill $PPID || true\n',
    "pip": NOTHING, "git": NOTHING,
    "python": """#!/bin/sh
case "$*" in *--trace*) cp "$RUNS/$(basename "$(dirname "$5")")/$(basename "$5")" "$5" ;; esac
""",
}  # fmt: skip


def blocks(kind: str, after: str) -> list[str]:
    """The blocks of a kind between a text of the page and the next recipe."""
    part = PAGE[PAGE.index(after) + len(after) :]
    part = re.split(r"^(?:\*\*\w|## )", part, maxsplit=1, flags=re.MULTILINE)[0]
    return re.findall(rf"^```{kind}\n(.*?)^```$", part, re.MULTILINE | re.DOTALL)


class Shell:
    """A folder in which scripts run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        programs = folder / "programs"
        programs.mkdir()
        for name, text in PROGRAMS.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        paths = (str(programs), str(Path(sys.executable).parent), "/usr/bin", "/bin")
        run = folder / "run1"
        run.mkdir()
        self.variables = {
            "PATH": os.pathsep.join(paths), "HOME": str(folder), "RUN": str(run), "JOB": str(JOB), "NODE": "0",
            "NODE_FOLDER": str(run / "0"), "POLARS_MAX_THREADS": "1",
        }  # fmt: skip

    def run(self, script: str, *, code: int = 0, options: str = "-ec", **variables: str) -> str:
        done = subprocess.run(
            ["bash", options, script], cwd=self.folder, env=self.variables | variables, text=True, capture_output=True,
            timeout=200, check=False,
        )  # fmt: skip
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    made = Shell(tmp_path)
    with forked_command(tmp_path / "programs" / "thence"):
        yield made


def test_slurm_records_each_node_into_a_folder_and_asks_for_late_ranks(shell: Shell) -> None:
    (script,) = blocks("bash", "**Slurm")
    said = shell.run(script, SLURM_JOB_NODELIST="node[0-1]", SLURM_NNODES="2")
    assert "2 ranks; read now 2" in said
    assert "no late rank is named" in said


def test_the_sidecar_of_kubernetes_ingests_what_the_job_records(shell: Shell) -> None:
    (text,) = blocks("yaml", "**Kubernetes")
    service, job = yaml.safe_load_all(text)
    pod = job["spec"]["template"]["spec"]
    assert service["metadata"]["name"] == pod["subdomain"]
    assert service["spec"]["selector"] == {"job-name": job["metadata"]["name"]}
    (sidecar,), (train,) = pod["initContainers"], pod["containers"]
    assert sidecar["restartPolicy"] == "Always"
    claimed = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for container in (sidecar, train) for mount in container["volumeMounts"]} == claimed
    shell.run(train["args"][0], JOB_COMPLETION_INDEX="0")
    assert "1 rank" in shell.run(sidecar["args"][0], code=-signal.SIGTERM, options="-c", JOB_COMPLETION_INDEX="0")


def test_ray_train_is_recorded_by_what_starts_its_workers(shell: Shell) -> None:
    (script,) = blocks("bash", "**Ray Train")
    shell.run(script)
    assert [path.name for path in (shell.folder / "run1" / "0").iterdir()] == ["group_rank0.json.gz"]


def test_an_object_store_is_an_input(shell: Shell) -> None:
    on_node, afterwards = blocks("bash", "**An object store")
    bucket = {"BUCKET": f"file://{shell.folder}/bucket", "TMPDIR": str(shell.folder)}
    shell.run(on_node, **bucket)
    assert "1 rank" in shell.run(afterwards, **bucket)


def steps_of_github() -> list[str]:
    steps = yaml.safe_load(GITHUB.read_text(encoding="utf-8"))["jobs"]["diff"]["steps"]
    return [step["run"] for step in steps if step.get("name", "").startswith(("record", "compare"))]


def steps_of_gitlab() -> list[str]:
    (text,) = blocks("yaml", "## A gate in GitHub and GitLab")
    job: dict[str, Any] = yaml.safe_load(text)["speed"]
    return ["\n".join(job["script"])]


@pytest.mark.parametrize("steps", [steps_of_github, steps_of_gitlab])
def test_a_gate_fails_where_the_step_is_slower_for_sure(shell: Shell, steps: Any) -> None:
    slower = tuple(replace(work, us=1.1 * work.us) for work in STEP)
    for side, work in (("before", STEP), ("after", slower)):
        for folder in (side, f"runs/{side}", f"made/{side}"):
            (shell.folder / folder).mkdir(parents=True)
        for run in range(1, 6):
            made = trace_file(shell.folder / "made" / side / "run", 10 * run + (side == "after"), work)
            made.with_name(f"{run}.json.gz").write_bytes(gzip.compress(made.read_bytes()))
    (shell.folder.parent / "before").mkdir(exist_ok=True)  # the other worktree of GitLab
    *before, gate = steps()
    given = {"RUNS": str(shell.folder / "made"), "CI_PROJECT_DIR": str(shell.folder)}
    given |= {"GITHUB_STEP_SUMMARY": str(shell.folder / "summary.md")}
    for script in before:
        shell.run(script, **given)
    shell.run(gate, code=1, **given)  # a bound is exceeded; 2 would be: cannot be compared
    assert "| slower |" in (shell.folder / "diff.md").read_text()
