"""The command line: `latpred VERB ...`. One module per group of verbs, loaded when its verb is called.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a gate failed, 2 the request was wrong, 3 the
environment was (no profile, no device, a damaged file), 130 interrupted. Only click is imported here: `latpred --help`
needs no torch.
"""

from __future__ import annotations

import sys

try:
    import click

    from latpred.cli.main import State, Verb, VerbGroup
except KeyboardInterrupt:  # pressed before there is a group that could answer
    sys.stderr.write("latpred: interrupted.\n")
    sys.exit(130)

# In the order of --help. Each is a click command of the same name in its module.
VERBS = {
    "predict": Verb("predict", "Predict the latency of MODEL, with its interval and crossover."),
    "curve": Verb("predict", "Predict the latency of MODEL over a range of batch sizes."),
    "rank": Verb("predict", "Order MODELS by predicted latency, on one device or several."),
    "explain": Verb("predict", "Compare runtimes for MODEL, and say what to change."),
    "timeline": Verb("predict", "Follow host and device through one forward pass of MODEL."),
    "report": Verb("predict", "Write one HTML file about MODELS, to share."),
    "generate": Verb("predict", "Predict how long MODEL takes to generate text."),
    "trace": Verb("trace", "Count operations, multiply-adds, bytes and launches of MODEL."),
    "calibrate": Verb("calibrate", "Measure this machine, and keep it as a profile."),
    "check": Verb("calibrate", "Say in half a minute whether a PROFILE still holds."),
    "adapt": Verb("compare", "Correct a profile with a few measured models."),
    "fit": Verb("calibrate", "Fit a profile to a journal, or to tables of latencies."),
    "measure": Verb("measure", "Time whole models on this machine."),
    "compare": Verb("compare", "Compare a predicted table with a measured one."),
    "validate": Verb("compare", "Measure a suite of models and judge the predictions."),
    "evaluate": Verb("compare", "Judge predictions on tables measured elsewhere."),
    "models": Verb("trace", "List the models that go by name."),
    "profiles": Verb("profiles", "List, show and locate device profiles."),
    "cache": Verb("profiles", "Show or clear what latpred keeps only to save time."),
    "doctor": Verb("profiles", "Say what keeps this machine from a prediction, and what to do."),
}

EPILOG = """\b
The first time, on a fresh machine:
  latpred predict bert-base-uncased --batch 1,8,32
"""


@click.group(cls=VerbGroup, verbs=VERBS, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latpred", message="%(package)s %(version)s", help="Print the version.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
@click.pass_context
def main(context: click.Context, debug: bool) -> None:
    """Predict how long one forward pass of a model takes on a device, in each runtime, before running it there."""
    context.obj = State(debug=debug)
