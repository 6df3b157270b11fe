"""The example that predicts published steps of generated texts: which rows it takes, and what it says of them."""

from __future__ import annotations

import runpy
from pathlib import Path

import pandas as pd
import pytest
import transformers

import latpred

SCRIPT = Path(__file__).parents[2] / "examples" / "published" / "decode_steps.py"
HEADS = ("num_attention_heads", "num_key_value_heads")
SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2} | dict.fromkeys(HEADS, 4)
PUBLISHED = {"Llama": "TheBloke/Llama-2-7b-fp16", "Mistral": "mistralai/Mistral-7B-v0.1"}


def row(model: str, batch: int, step_ms: float, *, more: str = "") -> dict[str, object]:
    notes = f"generate 8 new tokens (total); (total-prefill)/(n-1)={step_ms} ms; {more}"
    return {"model": model, "batch": batch, "seq_or_image": 16, "notes": notes}


def written(folder: Path, *rows: dict[str, object]) -> str:
    pd.DataFrame(rows).to_csv(folder / "table.csv.gz", index=False)
    return str(folder / "table.csv.gz")


def test_steps_are_in_fp16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    decoders, rows = {}, []
    for name, times in (("Llama", 0.8), ("Mistral", 1.25)):
        config = getattr(transformers, f"{name}Config")(**SMALL)
        decoders[name] = getattr(transformers, f"{name}ForCausalLM")(config).eval()
        asked = {"device": "a100", "host": "EPYC 7742", "attention": "eager", "precision": "fp16"}
        for one in latpred.predict_generation(decoders[name], 16, 8, [1, 64], **asked):
            rows.append(row(PUBLISHED[name], one.batch, times * one.per_token_ms))
    main = runpy.run_path(str(SCRIPT))["main"]
    monkeypatch.setitem(main.__globals__, "decoder", lambda name: decoders[name].half())
    main([written(tmp_path, *rows)])
    *steps, last = capsys.readouterr().out.splitlines()
    said = [(line.split()[0], line.split()[7], line.split()[-1]) for line in steps]
    assert said == [
        *(("Llama", f"{batch}:", "+25.0%") for batch in (1, 64)),
        *(("Mistral", f"{batch}:", "-20.0%") for batch in (1, 64)),
    ]
    assert last == "4 steps: 22.5% in the median, 25.0% at p90"
