"""The command line: `latpred VERB ...`. One module per group of verbs.

Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 a gate failed, 2 the request was wrong, 3 the
environment was (no profile, no device, a damaged file), 130 interrupted. Nothing heavy is loaded before a verb runs:
`latpred --help` needs no torch.
"""

from __future__ import annotations

import sys

try:
    import click

    from latpred.cli import calibrate, compare, measure, predict, profiles, trace
    from latpred.cli.main import VerbGroup, state
except KeyboardInterrupt:  # pressed before there is a group that could answer
    sys.stderr.write("latpred: interrupted.\n")
    sys.exit(130)

EPILOG = """\b
The first time, on a fresh machine:
  latpred predict bert-base-uncased --batch 1,8,32
"""


@click.group(cls=VerbGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="latpred", message="%(package)s %(version)s", help="Print the version.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def main(debug: bool) -> None:
    """Predict how long one forward pass of a model takes on a device, in each runtime, before running it there."""
    state().debug = debug


for verb in (  # in the order of --help
    *(predict.predict, predict.curve, predict.rank, predict.explain, predict.timeline, predict.report),
    *(predict.generate, trace.trace, calibrate.calibrate, calibrate.check, compare.adapt, calibrate.fit),
    *(measure.measure, compare.compare, compare.validate, compare.evaluate, trace.models),
    *(profiles.profiles, profiles.cache, profiles.doctor),
):
    main.add_command(verb)
