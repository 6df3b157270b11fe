"""The example that works out factors of hosts finds those that a table was made with, and writes all others by rule."""

from __future__ import annotations

import json
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from latpred.profile import hosts
from latpred.query import Options

ROOT = Path(__file__).parent.parent
TABLES = ("fastertransformer", "torchscript_dispatch_split", "nvidia_dle_pytorch", "optimum_benchmark", "torchbench")
COLUMNS = ("gpu", "host", "runtime", "precision", "model", "batch", "seq_or_image", "seq", "latency_ms")


def rows(script: dict[str, Any], gpu: str, host: str, factor: float, *, image: bool) -> list[tuple[object, ...]]:
    """Two rows of ResNet-50 or BERT that take a factor of the dispatch that is predicted for the reference host."""
    predictor, name = script["_predictor"](gpu), "torchvision:resnet50" if image else "bert-base-uncased"
    made = []
    for batch, tokens in ((1, 16), (1, 32)):
        options = Options(image=224, precision="fp32") if image else Options(seq=tokens, precision="fp32")
        ms = factor * predictor.predict(predictor.trace(name, options), batch).overhead_ms
        model = "resnet50v1.5" if image else "BAAI/bge-base-en-v1.5"
        made.append((gpu, host, "eager", "fp32", model, batch, 224 if image else tokens, tokens, ms))
    return made


def test_factors_are_recovered_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = runpy.run_path(str(ROOT / "examples" / "published" / "host_factors.py"))
    made = {
        "nvidia_dle_pytorch": rows(script, "A100", "DGX A100 (2x EPYC 7742)", 0.6, image=True),
        "optimum_benchmark": [
            *rows(script, "A100", "AMD EPYC 7742 64-Core Processor", 0.5, image=False),
            *rows(script, "A100", "Xeon Gold 6132", 1.2, image=False),
            *rows(script, "A100", "not stated", 9.0, image=False),
        ],
    }
    for table in TABLES:
        pd.DataFrame(made.get(table, []), columns=COLUMNS).to_csv(tmp_path / f"{table}.csv.gz", index=False)
    written = tmp_path / "hosts.json"
    written.write_bytes((ROOT / "latpred" / "models" / "hosts.json").read_bytes())
    script["main"]([str(tmp_path), "-o", str(written)])
    assert "optimum_benchmark" not in capsys.readouterr().out
    factors = {row["name"]: row for row in json.loads(written.read_text())}
    assert set(factors) == {host.name for host in hosts.HOSTS}
    assert factors["EPYC 7742"]["factor"] == pytest.approx(np.sqrt(0.6 * 0.5), rel=0.01)
    assert factors["EPYC 7742"]["measured_in"] == "DeepLearningExamples, optimum-benchmark"
    assert factors["Xeon Gold 6132"]["factor"] == pytest.approx(1.2, rel=0.01)
    assert factors["EPYC 7232P"]["factor"] == pytest.approx(factors["EPYC 7742"]["factor"] * 3.4 / 3.2, rel=0.01)
    # Measured no longer: by rating, where an Intel of twice the rating has half the factor.
    slow, fast = factors["Xeon E5-2670"], factors["Core i9-12900K"]
    assert (slow["basis"], fast["basis"]) == ("rating", "rating")
    assert slow["factor"] / fast["factor"] == pytest.approx(fast["rating"] / slow["rating"], rel=0.01)
    assert "measured_in" not in slow
