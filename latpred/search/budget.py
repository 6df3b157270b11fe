"""A latency limit that a search has to keep: what Optuna, Ray Tune and syne-tune take as a constraint.

Only predicts and compares; the searching is theirs, and none of them is imported here.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from numbers import Real
from typing import TYPE_CHECKING, Any

from latpred.errors import UsageError
from latpred.query import Options, is_one

if TYPE_CHECKING:
    from latpred.prediction.predictor import Predictor
    from latpred.query import Device


@dataclass(frozen=True, slots=True)
class Spent:
    """What a candidate takes of a budget.

    Attributes
    ----------
    name : str
        Of the budget; the keys of `to_dict` start with it.
    latency_ms, low_ms, high_ms : float
        Predicted milliseconds, and the ends of their 90 % interval.
    limit_ms : float
        The limit.
    macs, parameters : float
        Multiply-adds of the forward pass, and parameters of the candidate.
    caveats : tuple[str, ...]
        Sentences about what may not hold.
    """

    name: str
    latency_ms: float
    low_ms: float
    high_ms: float
    limit_ms: float
    macs: float
    parameters: float
    caveats: tuple[str, ...] = ()

    @property
    def margin_ms(self) -> float:
        """Milliseconds above the limit: zero or less within the budget, as constraints are counted in Optuna."""
        return self.latency_ms - self.limit_ms

    @property
    def fits(self) -> bool:
        return self.margin_ms <= 0

    def to_dict(self) -> dict[str, float]:
        """Latencies as plain floats, as Ray Tune's `tune.report` and syne-tune's `Reporter` take them.

        >>> list(Spent("latency", 4.0, low_ms=3.5, high_ms=4.5, limit_ms=5.0, macs=1e9, parameters=1e6).to_dict())
        ['latency_ms', 'latency_low_ms', 'latency_high_ms', 'latency_limit_ms', 'latency_margin_ms']
        """
        values = {"ms": self.latency_ms}
        values |= {name: getattr(self, name) for name in ("low_ms", "high_ms", "limit_ms", "margin_ms")}
        return {f"{self.name}_{key}": float(value) for key, value in values.items()}

    def tell(self, trial: Any) -> None:
        """Note it on an Optuna trial: values as user attributes and, from Optuna 5 on, the margin as a constraint."""
        for key, value in self.to_dict().items():
            trial.set_user_attr(key, value)
        if hasattr(trial, "set_constraint"):
            trial.set_constraint(f"{self.name}_margin_ms", self.margin_ms)


@dataclass(frozen=True, slots=True)
class LatencyBudget:
    """A limit on the predicted latency, and where it holds.

    Call it with a candidate to get the milliseconds above the limit: zero or less is within.

    Attributes
    ----------
    limit_ms : float
        Milliseconds of one forward pass.
    device, host, precision, attention, protocol, inputs, seq, image
        As for `latpred.predict_many`.
    batch : int
        Batch size.
    runtime : str
        Runtime.
    name : str
        What keys start with; give each budget of a search its own.

    Raises
    ------
    UsageError
        When the limit is not a positive number, or there are several batch sizes, runtimes or devices.

    Notes
    -----
    Optuna: call `budget.check(candidate).tell(trial)` in the objective. From version 5 on samplers find the constraint
    on the trial; before, they need `NSGAIISampler(constraints_func=budget.constraints_func)`. A candidate that cannot
    be predicted raises; `study.optimize(objective, n_trials=100, catch=(latpred.LatpredError,))` goes on without it.

    Ray Tune: `tune.report({**budget.check(candidate).to_dict(), "accuracy": 0.9})` in the trainable. Its schedulers
    know no constraints, so report the worst metric there is where `fits` is False.

    syne-tune: `report(**budget.check(candidate).to_dict(), accuracy=accuracy)` in the training script, where `report`
    is a `syne_tune.Reporter`; or tell `AskTellScheduler` the same numbers. Multi-objective searchers take "latency_ms"
    among their metrics; since syne-tune 0.14 none knows constraints, so report the worst metric where `fits` is False.

    Examples
    --------
    >>> budget = LatencyBudget(5.0, device="rtx-8000", precision="fp16")
    >>> budget.check("bert-base-uncased").fits  # doctest: +SKIP
    False
    """

    limit_ms: float
    device: Device | Predictor | None = None
    batch: int = 1
    runtime: str = "eager"
    precision: str | None = None
    protocol: str = "single"
    inputs: Any = None
    seq: int | None = None
    image: int | None = None
    name: str = "latency"
    host: float | str | None = None
    attention: str | None = None

    def __post_init__(self) -> None:
        number = isinstance(self.limit_ms, Real) and not isinstance(self.limit_ms, bool)
        if not (number and 0 < self.limit_ms < inf):
            raise UsageError(f"limit_ms must be a positive number of milliseconds, not {self.limit_ms!r}.")
        if not (is_one(self.batch) and isinstance(self.runtime, str) and is_one(self.device)):
            raise UsageError("a budget holds at one batch size in one runtime on one device; make one for each.")

    def check(self, candidate: Any) -> Spent:
        """What a candidate takes of the budget.

        Parameters
        ----------
        candidate : nn.Module, callable, transformers config, str or ModelGraph
            As for `latpred.predict_many`.

        Raises
        ------
        CandidateError
            When it cannot be built, traced or predicted.
        UsageError, ProfileError
            When the device, runtime or another part of the budget is wrong.
        """
        from latpred.search.resume import Evaluator

        asked = {name: getattr(self, name) for name in ("inputs", "seq", "image", "precision", "attention", "protocol")}
        evaluator = Evaluator.of(self.device, self.batch, self.runtime, Options(**asked), self.host)
        (row,) = evaluator.rows(0, candidate, errors="raise")
        return Spent(
            name=self.name,
            latency_ms=row.latency_ms,
            low_ms=row.low_ms,
            high_ms=row.high_ms,
            limit_ms=float(self.limit_ms),
            macs=row.macs,
            parameters=row.parameters,
            caveats=row.caveats,
        )

    def __call__(self, candidate: Any) -> float:
        return self.check(candidate).margin_ms

    def constraints_func(self, trial: Any) -> tuple[float]:
        """The margin noted on an Optuna trial, for samplers of Optuna 4.

        Raises
        ------
        UsageError
            When nothing was noted.
        """
        key = f"{self.name}_margin_ms"
        if key not in trial.user_attrs:
            raise UsageError(f"the trial has no {key!r}; call budget.check(candidate).tell(trial) in the objective.")
        return (float(trial.user_attrs[key]),)
