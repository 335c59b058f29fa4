"""The commands of docs/machines.md: options that the launchers and the verb have, and two machines of accelerate's."""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys

import pytest
import yaml
from torch.distributed.run import get_args_parser

from tests.support.launch import ROOT, environment
from tests.support.page_blocks import blocks_of
from tests.support.train_verb import losses, texts, train_in
from ullage.cli.train import Parser
from ullage.report.run import read_run

BLOCKS = blocks_of(ROOT / "docs" / "machines.md")
NAMES = {action.dest for action in Parser()._actions}


def commands() -> list[list[str]]:
    """The launchers' commands of the page, a list of words each; that of the PyTorchJob too."""
    shell = "\n".join(each.text for each in BLOCKS if each.language == "sh").replace("\\\n", " ")
    found = [shlex.split(line.rstrip(" &")) for line in shell.splitlines() if re.search(r"\b(torchrun|launch)\b", line)]
    return [*found, job()["command"] + job()["args"]]


def job():
    [told] = [found for found in map(yaml.safe_load, texts_of("yaml")) if "kind" in found]
    assert (told["apiVersion"], told["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    worker, policy = told["spec"]["pytorchReplicaSpecs"]["Worker"], told["spec"]["elasticPolicy"]
    assert policy["minReplicas"] <= worker["replicas"] <= policy["maxReplicas"]
    pod = worker["template"]["spec"]
    [container] = pod["containers"]
    assert {each["name"] for each in container["volumeMounts"]} == {each["name"] for each in pod["volumes"]}
    return container


def texts_of(language):
    return [each.text for each in BLOCKS if each.language == language]


def test_the_options_of_the_page_are_those_of_torchrun_accelerate_and_the_verb():
    from accelerate.commands.launch import launch_command_parser

    seen = []
    for words in commands():
        launcher = next(k for k, word in enumerate(words) if word in ("torchrun", "launch"))
        parser = get_args_parser() if words[launcher] == "torchrun" else launch_command_parser()
        told = parser.parse_args(words[launcher + 1 :])
        assert (told.training_script, told.training_script_args[0], told.module) == ("ullage", "train", True)
        options = {word.partition("=")[0] for word in told.training_script_args if word.startswith("--")}
        assert {name.removeprefix("--") for name in options} <= NAMES
        assert {"--packing_global_batch_size", "--output_dir", "--save_steps"} <= options
        seen.append(words[launcher])
    assert seen == ["torchrun", "torchrun", "launch", "torchrun"]


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.distributed
def test_accelerate_launches_two_machines_which_train_to_the_losses_of_one_process(tmp_path):
    [file] = [text for text in texts_of("yaml") if "num_machines" in text]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {"num_processes": 2, "main_process_ip": "127.0.0.1", "main_process_port": port}.items():
        file, changed = re.subn(rf"^{name}: .*$", f"{name}: {value}", file, flags=re.MULTILINE)
        assert changed == 1
    (tmp_path / "two.yaml").write_text(file)
    words = next(words for words in commands() if "launch" in words)
    launch = words[words.index("launch") + 1 : words.index("-m")]
    small = ["-m", "ullage", "train", "--data", texts(tmp_path, 48), "--model", "llama-32x1", "--packing_capacity", 128]
    small += ["--packing_global_batch_size", 6, "--max_steps", 4, "--save_steps", 2, "--logging_steps", 1]
    started = []
    for machine in (0, 1):
        given = {"--config_file": tmp_path / "two.yaml", "--machine_rank": machine}
        own = [given.get(before, word) for before, word in zip(["", *launch], launch, strict=False)]
        command = [sys.executable, "-m", "accelerate.commands.launch", *own, *small, "--output_dir", tmp_path / "two"]
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "cwd": tmp_path}
        options |= {"env": environment(GLOO_SOCKET_IFNAME="lo"), "start_new_session": True}
        started.append(subprocess.Popen(list(map(str, command)), **options))
    try:
        said = [process.communicate(timeout=600)[0] for process in started]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)  # at which torchrun ends its ranks
    assert [process.returncode for process in started] == [0, 0], said[0][-3000:] + said[1][-3000:]
    assert [span.layout for span in read_run(tmp_path / "two").spans] == ["2 processes"]
    done = train_in(1, tmp_path, *small[3:], "--output_dir", "one")
    assert done.returncode == 0, done.stderr
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=2e-6)
