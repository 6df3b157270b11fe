"""The command line: `latpred VERB ...`. One module per group of verbs, loaded when its verb is called.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a gate failed, 2 the request was wrong, 3 the
environment was (no profile, no device, a damaged file), 130 interrupted. `latpred --help` loads nothing but click.
"""

from __future__ import annotations

import click

from latpred.cli.main import State, VerbGroup

# In the order of --help. Each is a click command of the same name in its module, which imports nothing heavy itself.
VERBS = {
    **dict.fromkeys(("predict", "curve", "explain", "timeline", "report", "generate"), "predict"),
    **{"trace": "trace", "calibrate": "calibrate", "check": "calibrate", "adapt": "compare", "fit": "calibrate"},
    **{"measure": "measure", "compare": "compare", "validate": "compare", "evaluate": "compare", "models": "trace"},
    **dict.fromkeys(("profiles", "cache", "doctor"), "profiles"),
}

EPILOG = """\b
The first time, on a fresh machine:
  latpred predict bert-base-uncased --batch 1,8,32
"""


def _version(context: click.Context, _parameter: click.Parameter, asked: bool) -> None:
    if not asked or context.resilient_parsing:
        return
    from importlib.metadata import version

    click.echo(f"latpred {version('latpred')}")
    context.exit()


@click.group(cls=VerbGroup, verbs=VERBS, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version", is_flag=True, is_eager=True, expose_value=False, callback=_version, help="Print the version."
)
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Predict how long one forward pass of a model takes on a device, in each runtime, before running it there."""
    context.obj = State(debug=debug)
