"""What a limit on latency finds beside a limit on multiply-adds: the same search, run twice.

    python examples/search.py                                  # encoders on a Quadro RTX 8000 in half precision
    python examples/search.py --space residual
    python examples/search.py --device cpu --precision fp32 --measure     # this machine, and the winners measured

A reference network sets both limits: what it takes in milliseconds, and in multiply-adds. One search asks for the most
parameters within the first, the other for the most within the second, both with Optuna's NSGA-II, as many trials and
one seed. Then the largest network of each is shown that keeps to the reference's latency. Parameters stand in for how
good a network may become; nothing is trained. Predictions are at batch 1 in eager PyTorch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import optuna
from spaces import SPACES

import latpred
from latpred.profile import store
from latpred.search.budget import LatencyBudget, Spent

WIDER = "width"
DEEPER = {"encoders": ("depth",), "residual": ("blocks_1", "blocks_2", "blocks_3", "blocks_4")}
REPEATS = 6


@dataclass(frozen=True)
class Found:
    """An architecture and what it was predicted to take."""

    choice: dict[str, Any]
    spent: Spent

    def __str__(self) -> str:
        """One line."""
        chosen = ", ".join(f"{name} {value}" for name, value in self.choice.items())
        size, macs = self.spent.parameters / 1e6, self.spent.macs / 1e9
        return f"{size:8.1f} M parameters {macs:8.2f} GMACs {self.spent.latency_ms:8.2f} ms   {chosen}"


def main(arguments: Sequence[str] | None = None) -> None:
    """Search twice and print the winners."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--space", choices=SPACES, default="encoders")
    parser.add_argument("--device", default="rtx-8000")
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--trials", type=int, default=300, help="of each search")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", action="store_true", help="time the networks shown on this machine's CPU")
    asked = parser.parse_args(arguments)
    if asked.measure and (asked.precision != "fp32" or store.find(asked.device).device.kind != "cpu"):
        parser.error("--measure times a CPU in single precision: predict that, with --device cpu --precision fp32")
    space = SPACES[asked.space]
    start = time.perf_counter()

    where = {"device": asked.device, "precision": asked.precision, **space.INPUT}
    limit = latpred.predict_many([space.candidate(**space.REFERENCE)], **where)["latency_ms"].item()
    budget = LatencyBudget(limit, **where)
    reference = Found(space.REFERENCE, budget.check(space.candidate(**space.REFERENCE)))
    grown = scaled(space, DEEPER[asked.space], budget)
    show_scaling(reference, grown)

    within_latency = search(space, budget, asked, limit_macs=None)
    within_macs = search(space, budget, asked, limit_macs=reference.spent.macs)
    ours, theirs = largest(within_latency, limit), largest(within_macs, limit)
    winners = {"the most within its latency": ours, "the most within its multiply-adds, no slower": theirs}
    for title, found in {"the reference": reference, **winners}.items():
        print(f"{title:<46}{found}")
    print(f"a limit on latency found {ours.spent.parameters / theirs.spent.parameters:.2f} x the parameters")
    print(f"{2 * asked.trials} trials in {time.perf_counter() - start:.0f} s")
    if asked.measure:
        measure(space, {"the reference": reference, **grown, **winners})


def scaled(space: ModuleType, deeper: tuple[str, ...], budget: LatencyBudget) -> dict[str, Found]:
    """The reference made twice as wide, and twice as deep."""
    found = {}
    for title, names in (("twice as wide", (WIDER,)), ("twice as deep", deeper)):
        choice = space.REFERENCE | {name: 2 * space.REFERENCE[name] for name in names}
        found[title] = Found(choice, budget.check(space.candidate(**choice)))
    return found


def show_scaling(reference: Found, grown: dict[str, Found]) -> None:
    """Print what width and depth cost."""
    print(f"{'':14}parameters  multiply-adds  latency")
    before = reference.spent
    for title, found in grown.items():
        after = found.spent
        size, macs = after.parameters / before.parameters, after.macs / before.macs
        print(f"{title:14}{size:8.2f} x{macs:13.2f} x{after.latency_ms / before.latency_ms:7.2f} x")


def search(
    space: ModuleType, budget: LatencyBudget, asked: argparse.Namespace, limit_macs: float | None
) -> list[Found]:
    """All feasible architectures of a search for many parameters at little cost."""
    found: list[Found] = []

    def objective(trial: optuna.Trial) -> tuple[float, float]:
        choice = {name: trial.suggest_categorical(name, values) for name, values in space.CHOICES.items()}
        spent = budget.check(space.candidate(**choice))
        if limit_macs is None:
            spent.tell(trial)
            feasible, cost = spent.fits, spent.latency_ms
        else:
            trial.set_constraint("macs", spent.macs - limit_macs)
            feasible, cost = spent.macs <= limit_macs, spent.macs
        if feasible:
            found.append(Found(choice, spent))
        return spent.parameters, cost

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.NSGAIISampler(population_size=min(50, max(2, asked.trials // 6)), seed=asked.seed)
    study = optuna.create_study(directions=["maximize", "minimize"], sampler=sampler)
    study.enqueue_trial(space.REFERENCE)
    study.optimize(objective, n_trials=asked.trials)
    return found


def largest(found: Sequence[Found], limit_ms: float) -> Found:
    """The architecture of most parameters within a latency; the reference itself is always one."""
    return max((one for one in found if one.spent.latency_ms <= limit_ms), key=lambda one: one.spent.parameters)


def measure(space: ModuleType, shown: dict[str, Found]) -> None:
    """Time networks on the CPU, in turns, and print it beside the predictions, also as multiples of the first."""
    models = {title: space.build(**found.choice) for title, found in shown.items()}
    table = latpred.measure(models, [1], device="cpu", repeats=REPEATS, **space.INPUT)
    measured_ms = dict(zip(table["model"], table["latency_s"] * 1e3, strict=True))
    first, *_ = shown
    print("on this machine's CPU, in single precision:     measured         predicted")
    for title, found in shown.items():
        pair = [(measured_ms[title], measured_ms[first]), (found.spent.latency_ms, shown[first].spent.latency_ms)]
        print(f"{title:<46}" + "".join(f"{ms:8.2f} ms{ms / base:5.2f} x" for ms, base in pair))


if __name__ == "__main__":
    main()
