"""``completion``: shell scripts, and bash's suggestions."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from onnxtrain.cli.app import COMMANDS


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish", "powershell"])
def test_scripts_know_all_commands_and_flags(success, shell):
    script = success("completion", shell).out
    for word in (*COMMANDS, "learning-rate", "run", "probabilities"):
        assert word in script


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_completes(success, files):
    (files / "completion.bash").write_text(success("completion", "bash").out)

    def complete(*words):
        program = (
            "source completion.bash; COMP_WORDS=(" + " ".join(f"'{word}'" for word in words) + "); "
            f"COMP_CWORD={len(words) - 1}; _onnxtrain; printf '%s\\n' \"${{COMPREPLY[@]}}\""
        )
        done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, cwd=files, check=True)
        return done.stdout.split()

    assert complete("onnxtrain", "ev") == ["evaluate"]
    assert set(complete("onnxtrain", "")) >= set(COMMANDS)
    assert complete("onnxtrain", "fit", "--learn") == ["--learning-rate"]
    assert complete("onnxtrain", "fit", "--free") == ["--freeze"]
    assert not any("state-dtype" in word for word in complete("onnxtrain", "fit", "--"))
    assert "adamw" in complete("onnxtrain", "fit", "--optimizer", "ad")


def test_an_unknown_shell(run):
    result = run("completion", "tcsh")
    assert result.code == 2
    assert "tcsh" in result.err
