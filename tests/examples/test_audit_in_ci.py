"""The workflow for others' CI: it is one that GitHub reads, and its step does what the page says, in a bare repository."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.support.launch import ROOT, environment

_MODEL = """
from transformers import GPT2Config, GPT2LMHeadModel

def tiny_model():
    return GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=16, n_layer=1, n_head=2))
"""


@pytest.mark.slow
def test_the_steps_of_the_workflow_audit_a_model_of_the_repository(tmp_path):
    workflow = yaml.safe_load((ROOT / "examples" / "16_audit_in_ci.yml").read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML reads "on" as true, and GitHub does not mind
    module, _, function = workflow["env"]["MODEL"].partition(":")
    assert f"def {function}(" in _MODEL
    source = tmp_path / f"{module.replace('.', '/')}.py"
    source.parent.mkdir(parents=True)
    source.write_text(_MODEL)
    runs = [step["run"] for step in workflow["jobs"]["audit"]["steps"] if "run" in step]
    ours = [run for run in runs if not run.startswith("pip install ")]
    assert len(ours) == 1  # one documented step
    assert ours[0].replace('"$MODEL"', workflow["env"]["MODEL"]) in (ROOT / "docs" / "packed_models.md").read_text()
    summary = tmp_path / "summary.md"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    github = {"GITHUB_ACTIONS": "true", "GITHUB_STEP_SUMMARY": str(summary), "PATH": path, **workflow["env"]}
    command = ["bash", "-e", "-o", "pipefail", "-c", ours[0]]  # as GitHub calls it
    done = subprocess.run(command, cwd=tmp_path, env=environment(**github), capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    told = json.loads((tmp_path / "audit.json").read_text())
    assert told["verdict"] == "exact"
    assert summary.read_text().startswith("### ullage audit: exact")
    assert "::error" not in done.stderr
