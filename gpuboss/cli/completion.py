"""`gpuboss completion`: completion scripts, made from the parser, so that they know every option it knows.

Called by the package's `main`. The scripts are static: completing starts no Python.
"""

from __future__ import annotations

import argparse

from gpuboss.cli.exits import Exit
from gpuboss.cli.parser import COMMANDS, build
from gpuboss.priority import CLASSES

__all__ = ["completion", "script_for"]

_BASH = """\
# bash completion for gpuboss
_gpuboss() {
    local current=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]} index
    for ((index = 2; index < COMP_CWORD; index++)); do
        if [[ ${COMP_WORDS[1]} == run && ${COMP_WORDS[index]} == -- ]]; then
            if declare -F _command_offset >/dev/null; then
                _command_offset $((index + 1))
            else
                mapfile -t COMPREPLY < <(compgen -c -f -- "$current")
            fi
            return
        fi
    done
    local words
    case $before in
        --priority) words="@CLASSES@" ;;
        --state-dir) mapfile -t COMPREPLY < <(compgen -d -- "$current"); return ;;
        *) case ${COMP_WORDS[1]} in
@CASES@
            *) words="@COMMANDS@" ;;
        esac ;;
    esac
    ((COMP_CWORD == 1)) && words="@COMMANDS@ --help --version"
    mapfile -t COMPREPLY < <(compgen -W "$words" -- "$current")
}
complete -F _gpuboss gpuboss
"""

_ZSH = """\
#compdef gpuboss
_gpuboss() {
    local -a commands=(
@DESCRIBED@
    )
    if ((CURRENT == 2)); then
        _describe command commands
        return
    fi
    local place=${words[(i)--]}
    if [[ ${words[2]} == run ]] && ((place < CURRENT)); then
        shift $place words
        ((CURRENT -= place))
        _normal
        return
    fi
    case ${words[CURRENT-1]} in
        --priority) compadd @CLASSES@; return ;;
        --state-dir) _files -/; return ;;
    esac
    case ${words[2]} in
@CASES@
    esac
}
compdef _gpuboss gpuboss
"""


def completion(told: argparse.Namespace) -> int:
    """Print the script."""
    print(script_for(told.shell), end="")
    return Exit.DONE


def script_for(shell: str) -> str:
    """The completion script of `bash`, `zsh` or `fish`."""
    options = _options()
    classes = " ".join(CLASSES)
    if shell == "fish":
        return _fish(options)
    if shell == "bash":
        cases = "\n".join(f'            {name}) words="{" ".join(words)}" ;;' for name, words in options.items())
        return _BASH.replace("@CASES@", cases).replace("@COMMANDS@", " ".join(options)).replace("@CLASSES@", classes)
    cases = "\n".join(f"        {name}) compadd -- {' '.join(words)} ;;" for name, words in options.items())
    described = "\n".join(f"        '{name}:{_quoted(text)}'" for name, text in COMMANDS.items())
    return _ZSH.replace("@CASES@", cases).replace("@DESCRIBED@", described).replace("@CLASSES@", classes)


def _fish(options: dict[str, list[str]]) -> str:
    lines = ["# fish completion for gpuboss", "complete -c gpuboss -f"]
    lines += [
        f"complete -c gpuboss -n __fish_use_subcommand -a {name} -d '{_quoted(text)}'"
        for name, text in COMMANDS.items()
    ]
    for name, words in options.items():
        seen = f"__fish_seen_subcommand_from {name}"
        for word in words:
            kind = f"-l {word[2:]}" if word.startswith("--") else f"-a {word}"
            more = f" -x -a '{' '.join(CLASSES)}'" if word == "--priority" else ""
            lines.append(f"complete -c gpuboss -n '{seen}' {kind}{more}")
    lines.append("complete -c gpuboss -n '__fish_seen_subcommand_from run; and contains -- -- (commandline -opc)' -F")
    return "\n".join(lines) + "\n"


def _options() -> dict[str, list[str]]:
    """Every command's long options, and the words it takes."""
    parser = build()
    choices = next(action for action in parser._actions if isinstance(action, argparse._SubParsersAction)).choices  # noqa: SLF001 (argparse tells nobody otherwise)
    found: dict[str, list[str]] = {}
    for name, command in choices.items():
        actions = command._actions  # noqa: SLF001
        found[name] = [word for action in actions for word in action.option_strings if word.startswith("--")]
        found[name] += [str(word) for action in actions if not action.option_strings for word in action.choices or ()]
    return found


def _quoted(text: str) -> str:
    return text.replace("'", "'\\''").replace(":", "\\:")
