"""``onnxtrain completion``: print a script with which a shell completes commands and flags."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from onnxtrain.cli import flags

HELP = "Print a script with which a shell completes commands, flags and files."

EXAMPLES = """\
Examples

  In bash, for this session and for all later ones:
    source <(onnxtrain completion bash)
    onnxtrain completion bash \\
        > ~/.local/share/bash-completion/completions/onnxtrain

  In zsh, in a folder of $fpath; in fish:
    onnxtrain completion zsh > ~/.zfunc/_onnxtrain
    onnxtrain completion fish > ~/.config/fish/completions/onnxtrain.fish
"""


def command(
    shell: Annotated[Literal["bash", "zsh", "fish", "powershell"], Parameter(help="The shell.")],
    /,
    *,
    debug: flags.Debug = False,
) -> None:
    """Run ``onnxtrain completion``."""
    from onnxtrain.cli.app import build

    print(build().generate_completion(shell=shell))  # noqa: T201 - the output of the command
