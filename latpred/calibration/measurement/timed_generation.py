"""Measure text generation: transformers' own `generate()`, greedy, timed whole and for its first token alone.

How cells are visited in rounds is `whole_models`' business; here a call of `generate()` becomes a workload to measure,
or its graph where the device is simulated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import Any

import msgspec
import pandas as pd
import torch
from torch import nn

from latpred.calibration.devices import Device, open_device
from latpred.calibration.measurement.whole_models import REPEATS, measure
from latpred.calibration.timing import timer
from latpred.calibration.workloads.suites import SEED, Inputs, Workload, keep_lively, moved, of_one_seed
from latpred.errors import UsageError
from latpred.explanation.generation import GenerationCurve, input_kind
from latpred.graph.graph import ModelGraph
from latpred.progress import ProgressEvent
from latpred.sandbox.own_thread import without_modes
from latpred.tables import OK
from latpred.tracing.text_generation import decoder, demand_room, trace_generation


@without_modes()
def measure_generation(
    model: nn.Module | str,
    prompt: int,
    new_tokens: int,
    batch: int | Iterable[int],
    *,
    device: str | torch.device | Device = "cpu",
    precision: str = "fp32",
    threads: int | None = None,
    repeats: int = REPEATS,
    plan: timer.Plan | None = None,
    progress: Callable[[ProgressEvent], None] | None = None,
) -> pd.DataFrame:
    """Time greedy text generation in eager PyTorch.

    Parameters
    ----------
    model : nn.Module or str
        A transformers model with a `generate()`, or the name of a decoder, which is built with random weights.
    prompt, new_tokens : int
        Tokens of each prompt, and tokens to generate for each.
    batch : int or iterable of int
        Batch sizes.
    device, precision, threads, repeats, plan, progress
        As for `measure`; the simulated device runs the graph of what is generated.

    Returns
    -------
    DataFrame
        A measurement table: two rows per batch, all of it (`input_kind` "prompt+16" for 16 new tokens) and its first
        token alone ("prompt+1"). `GenerationCurve.to_frame()` has the same keys.

    Raises
    ------
    UsageError
        As for `predict_generation` and `measure`.
    DeviceError
        When the device is not there.
    StoppedError
        As for `measure`.

    Examples
    --------
    >>> measure_generation("gpt2", 128, 16, [1, 8])  # doctest: +SKIP
    """
    name, shape = decoder(model)
    prompt, new_tokens = demand_room(name, shape, prompt, new_tokens)
    live = open_device(device)

    def traced(tokens: int) -> ModelGraph:
        graph = trace_generation(model, prompt, tokens, precision=precision).whole
        return msgspec.structs.replace(graph, input_kind=input_kind(tokens), input_size=prompt)

    counts = tuple(dict.fromkeys((new_tokens, 1)))
    simulated = live.info().kind == "simulated"
    calls = [*map(traced, counts)] if simulated else generation_workloads(model, prompt, counts)
    asked: dict[str, Any] = {"device": live, "precision": precision, "threads": threads, "repeats": repeats}
    return measure(calls, batch, **asked, plan=plan, progress=progress)


def beside(curve: GenerationCurve, measured: pd.DataFrame) -> pd.DataFrame:
    """Predicted beside measured: for each batch the first token, each further one (the mean), and all of it."""
    rows: list[dict[str, Any]] = []
    for point in curve:
        here = measured[measured["batch"] == point.batch].set_index("input_kind")
        whole, first = here.loc[input_kind(point.new_tokens)], here.loc[input_kind(1)]
        status = next((row["status"] for row in (whole, first) if row["status"] != OK), OK)
        parts: list[tuple[str, float, Any]] = [("first token", point.first_token_ms, first["latency_s"])]
        if point.per_token_ms is not None:
            each = (whole["latency_s"] - first["latency_s"]) / (point.new_tokens - 1)
            parts.append(("next token", point.per_token_ms, each))
            parts.append((f"{point.new_tokens} tokens", point.latency_ms, whole["latency_s"]))
        for what, milliseconds, timed in parts:
            seconds = None if math.isnan(timed) else float(timed)
            error = milliseconds / 1e3 / seconds - 1 if seconds else None
            row = {"batch": point.batch, "what": what, "predicted_s": milliseconds / 1e3, "measured_s": seconds}
            rows.append({**row, "error": error, "status": status if seconds is None else OK})
    return pd.DataFrame(rows)


def generation_workloads(model: nn.Module | str, prompt: int, counts: Iterable[int]) -> list[Workload]:
    """Calls of `generate()` as something to measure, one for each number of new tokens; they share the model."""
    name, _ = decoder(model)

    @cache
    def built_on(device: str, precision: str) -> Any:
        if not isinstance(model, str):
            return moved(model, device, precision)
        with of_one_seed(device):
            built: Any = decoder(model, device, precision)[1]
            keep_lively(built)
        return built.eval()

    def make(new_tokens: int, device: str, precision: str) -> tuple[nn.Module, Inputs]:
        built = built_on(device, precision)
        vocabulary = int(built.config.vocab_size)

        def prompts(batch: int, place: Any) -> dict[str, torch.Tensor]:
            generator = torch.Generator().manual_seed(SEED)
            ids = torch.randint(vocabulary // 2, (batch, prompt), generator=generator).to(place)
            return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

        return _Generate(built, prompt, new_tokens), prompts

    return [Workload(name, input_kind(count), prompt, partial(make, count)) for count in counts]


class _Generate(nn.Module):
    """Its forward pass generates, and sees to it that nothing ended early."""

    def __init__(self, model: Any, prompt: int, new_tokens: int) -> None:
        super().__init__()
        self.model = model
        self._length = prompt + new_tokens
        self._options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": False, "num_beams": 1}
        end = getattr(model.generation_config, "eos_token_id", None)
        if end is not None and model.generation_config.pad_token_id is None:
            self._options["pad_token_id"] = end[0] if isinstance(end, list) else end

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.model.generate(input_ids=input_ids, attention_mask=attention_mask, **self._options)
        if out.shape[1] != self._length:
            raise UsageError(
                f"the model ended every sequence after {out.shape[1]} tokens, not {self._length}; set "
                "generation_config.eos_token_id to None to measure what it takes to generate all of them"
            )
        return out
