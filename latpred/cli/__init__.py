"""The command line: `latpred VERB ...`. One module per group of verbs, loaded when its verb is called.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a gate failed, 2 the request was wrong, 3 the
environment was (no profile, no device, a damaged file), 130 interrupted. Only click is imported here: `latpred --help`
needs no torch.
"""

from __future__ import annotations

import click

from latpred.cli.main import State, Verb, VerbGroup

# In the order of --help. Each is a click command of the same name in its module.
VERBS = {
    "predict": Verb("predict", "Predict the latency of MODEL, with its interval, its regime and its crossover batch."),
    "curve": Verb(
        "predict",
        "Predict the latency of MODEL over a range of batch sizes; see `latpred predict` for what MODEL may be.",
    ),
    "rank": Verb("predict", "Order MODELS by predicted latency, on one device or several."),
    "explain": Verb(
        "predict",
        "Compare runtimes for MODEL: what each takes, where the time goes, how far it can grow, what to change.",
    ),
    "timeline": Verb(
        "predict",
        "Follow host and device through one forward pass of MODEL: every dispatch, every kernel, and the gaps between.",
    ),
    "report": Verb(
        "predict",
        "Write one HTML file about MODELS: answer, figures, runtimes, what is free, what to change, how far to trust "
        "it.",
    ),
    "generate": Verb(
        "predict", "Predict how long MODEL takes to generate text: its first token, each further one, and all of them."
    ),
    "trace": Verb(
        "trace", "Trace MODEL without a device: operations, multiply-adds, bytes and launches of one forward pass."
    ),
    "calibrate": Verb(
        "calibrate",
        "Measure what ops and kernels cost on this machine, and keep it as a profile. Once per machine and device.",
    ),
    "check": Verb(
        "calibrate",
        "Say in half a minute whether a PROFILE of this machine still holds, after a new driver, torch or library.",
    ),
    "adapt": Verb("compare", "Correct a profile with a few measured models, and say what that bought."),
    "fit": Verb(
        "calibrate",
        "Fit a profile from a calibration's journal, or from tables of published latencies, and keep it.",
    ),
    "measure": Verb(
        "measure", "Run models on this machine and time them, in rounds, with the repeat noise of the same run."
    ),
    "compare": Verb(
        "compare",
        "Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines.",
    ),
    "validate": Verb(
        "compare", "Measure whole models that no fit has seen, and compare the profile's predictions with them."
    ),
    "evaluate": Verb(
        "compare", "Predict every cell of measurement tables made elsewhere, and say how far off that is."
    ),
    "models": Verb(
        "trace",
        "List the models that go by name, or those with TEXT in a name. Any name works with _ for - and - for _.",
    ),
    "profiles": Verb("profiles", "List, show and locate device profiles."),
    "cache": Verb("profiles", "Show or clear what latpred keeps only to save time."),
    "doctor": Verb("profiles", "Say what stands between this machine and a prediction, and what to do about it."),
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
