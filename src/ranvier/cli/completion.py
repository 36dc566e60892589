"""Shell completion: a script with the commands of this version and their options."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ranvier.cli.help import option_names
from ranvier.config import arguments
from ranvier.errors import PlanError

OPTION_CLASSES = {
    "train": arguments.TrainOptions,
    "verify": arguments.RunOptions,
    "import": arguments.ImportOptions,
    "export": arguments.ExportOptions,
    "upcycle": arguments.UpcycleOptions,
    "extend-context": arguments.ExtendContextOptions,
    "generate": arguments.GenerateOptions,
    "eval": arguments.EvalOptions,
    "profile": arguments.ProfileOptions,
    "simulate": arguments.SimulateOptions,
    "bench": arguments.BenchOptions,
    "scaling-laws": arguments.ScalingLawsOptions,
    "dry-run": arguments.DryRunOptions,
    "measure": arguments.MeasureOptions,
    "doctor": arguments.DoctorOptions,
    "data": arguments.PrepareOptions,
    "checkpoint": arguments.ConvertOptions,
}
SUBCOMMAND_OPTION_CLASSES: dict[str, dict[str, type]] = {
    "simulate": {"serving": arguments.SimulateServingOptions},
    "data": {
        "needles": arguments.NeedleCorpusOptions,
        "canaries": arguments.CanaryFileOptions,
    },
}
"""Options of subcommands that differ from those of their command."""
SHELLS = ("bash", "zsh")
SCRIPT = """\
# Completion of ranvier: eval "$(ranvier completion {shell})"
{setup}_ranvier() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" words
    if [ "$COMP_CWORD" -eq 1 ]; then
        words="{verbs}"
    else
        case "${{COMP_WORDS[1]}}" in
{cases}
            *) words="--help" ;;
        esac
    fi
    COMPREPLY=($(compgen -W "$words" -- "$current"))
    [ "${{#COMPREPLY[@]}}" -gt 0 ] || COMPREPLY=($(compgen -f -- "$current"))
}}
complete -o filenames -F _ranvier ranvier
"""


def find_option_class(verb: str) -> type | None:
    """Returns the class with the options of a command; None if it has none."""
    # Imported here: only these two commands need their modules.
    if verb == "plan":
        from ranvier.cli.plan import PlanOptions

        return PlanOptions
    if verb == "serve":
        from ranvier.cli.serve import ServeOptions

        return ServeOptions
    return OPTION_CLASSES.get(verb)


def completion_script(
    shell: str, verbs: Iterable[str], subcommands: Mapping[str, Iterable[str]]
) -> str:
    """Returns the script of a shell, for `eval "$(ranvier completion bash)"` in its start-up
    file."""
    if shell not in SHELLS:
        raise PlanError(
            f"{shell!r} is not a supported shell. Completion supports bash and zsh. Use one of "
            "them."
        )
    cases = []
    for verb in verbs:
        words = list({**subcommands, "completion": SHELLS}.get(verb, ()))
        kind = find_option_class(verb)
        names = list(option_names(kind())) if kind is not None else []
        for own in SUBCOMMAND_OPTION_CLASSES.get(verb, {}).values():
            names += option_names(own())
        words += ["--" + name.replace("_", "-") for name in dict.fromkeys(names)]
        cases.append(f'            {verb}) words="{" ".join([*words, "--help"])}" ;;')
    # bashcompinit lets zsh run completions written for bash.
    setup = "autoload -U +X bashcompinit && bashcompinit\n" if shell == "zsh" else ""
    return SCRIPT.format(shell=shell, setup=setup, verbs=" ".join(verbs), cases="\n".join(cases))
