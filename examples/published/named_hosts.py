"""How far off are predictions for a host that is known by its name alone?

    python examples/published/named_hosts.py TABLES --mapping examples/published/mapping.json

Of each host that the tables name, all rows are left out in which it has a part, and predicted by a fit to the others:
once with the host's factor of `latpred/models/hosts.json`, which such rows have told, and once with what its
single-thread rating says by the factors of the other hosts, as of a host that nobody has measured.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from host_factors import by_rating

from latpred.accuracy import metrics
from latpred.calibration.published import published_table
from latpred.calibration.published.joint_fit import Mask, Problem, problem
from latpred.calibration.published.row_counts import EAGER
from latpred.profile import hosts

PART = 0.05  # of the slower clock: below that a host does not show in a row
RATED_LOG_STD = 0.3  # what ratings leave open


def has_part(fitted: Problem) -> Mask:
    """Rows in which the host shows, by a fit to all."""
    shares = np.zeros(len(fitted.rows))
    for runtime, theta in fitted.thetas().items():
        own = fitted.rows.runtime == runtime
        shares[own] = fitted.host_shares(theta)[own]
    shown: Mask = shares > PART
    return shown


def left_out(fitted: Problem, *, rated: bool) -> Iterator[pd.DataFrame]:
    """Rows of each named host with what the others say of them."""
    measured = pd.Series({host.name: np.log(host.factor) for host in hosts.HOSTS if host.basis == "measured"})
    shown, priors = has_part(fitted), fitted.parameters.priors
    for name in sorted(set(fitted.rows.host) & set(measured.index)):
        mine = (fitted.rows.host == name) & shown
        index = fitted.parameters.names["named host", name]
        prior = priors[index]
        if rated:
            priors[index] = by_rating(measured.drop(name), hosts.find(name)), RATED_LOG_STD
        thetas = fitted.thetas(~mine)
        priors[index] = prior
        for runtime, theta in thetas.items():
            own = mine & (fitted.rows.runtime == runtime)
            yield fitted.table.cells[own].assign(predicted_s=fitted.predict(theta)[own], named=name)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the errors by host and runtime, with either factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tables", nargs="+")
    parser.add_argument("--mapping", help="what the columns of tables of another form mean")
    asked = parser.parse_args(arguments)
    fitted = problem(published_table.read_all(asked.tables, asked.mapping), partial=True)
    for title, rated in (("factor of latpred/models/hosts.json", False), ("factor by its rating", True)):
        print(title)
        rows = pd.concat(left_out(fitted, rated=rated))
        eager = rows[rows["runtime"] == EAGER]
        for name, own in [("eager", eager), *rows.groupby(["named", "runtime", "device"])]:
            errors = metrics.errors(own["predicted_s"], own["latency_s"], list(own["model"]))
            label = name if isinstance(name, str) else ", ".join(name)
            print(f"{label:60s}{errors.cells:6d} rows{errors.median:8.1%} median{errors.p90:8.1%} p90")


if __name__ == "__main__":
    main()
