"""How far off is the time of each further token of a generated text?

python examples/published/decode_steps.py optimum_benchmark.csv.gz [--device a100] [--host "EPYC 7742"]

A row says in its notes how many tokens were generated and what one took: "generate 512 new tokens (total);
(total-prefill)/(n-1)=25.77 ms". Attention was in parts then, but where BetterTransformer is noted, which calls
`scaled_dot_product_attention`. Quantised models and attention of a package of its own are left out, repeats are one
row.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence

import numpy as np
import pandas as pd
import torch

import latpred

NOTE = r"generate (?P<tokens>\d+) new tokens \(total\); \(total-prefill\)/\(n-1\)=(?P<step_ms>[\d.]+) ms"
OTHERS = "quant=|GPTQ|awq|FlashAttention"
ASKED = ["decoder", "attention", "prompt", "tokens"]
DECODERS = {"Llama-2-7b|vicuna-7b": "Llama", "Mistral-7B": "Mistral"}


def steps(path: str) -> pd.DataFrame:
    """Milliseconds of a step by what was asked and batch."""
    table = pd.read_csv(path).fillna("")
    found = table["notes"].str.extract(NOTE)
    name = table["model"].map(lambda model: next((to for of, to in DECODERS.items() if re.search(of, model)), ""))
    keep = (name != "") & found["tokens"].notna() & ~(table["notes"] + table["model"]).str.contains(OTHERS)
    attention = table["notes"].str.contains("BetterTransformer").map({True: "sdpa", False: "eager"})
    rows = found.assign(decoder=name, attention=attention, prompt=table["seq_or_image"], batch=table["batch"])
    rows = rows[keep].astype({"tokens": int, "step_ms": float, "prompt": int, "batch": float})
    return rows.groupby([*ASKED, "batch"], as_index=False)["step_ms"].median()


def decoder(name: str) -> torch.nn.Module:
    """A decoder of 7 billion parameters without numbers in them."""
    import transformers

    with torch.device("meta"):
        config = getattr(transformers, f"{name}Config")()
        return getattr(transformers, f"{name}ForCausalLM")(config).half().eval()


def main(arguments: Sequence[str] | None = None) -> None:
    """Print every step, predicted and published, and how far off they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table")
    parser.add_argument("--device", default="a100", help="a profile's name or file, or a GPU's name")
    parser.add_argument("--host", default="EPYC 7742", help="the CPU of the machine")
    asked = parser.parse_args(arguments)
    errors = []
    for (name, attention, prompt, tokens), rows in steps(asked.table).groupby(ASKED):
        batches = [int(batch) for batch in rows["batch"]]
        options = {"device": asked.device, "host": asked.host, "attention": attention}
        curve = latpred.predict_generation(decoder(name), prompt, tokens, batches, **options)
        for one, batch, step_ms in zip(curve, batches, rows["step_ms"], strict=True):
            errors.append(one.per_token_ms / step_ms - 1.0)
            print(f"{name:8} {attention:5} {prompt:4} + {tokens:4} tokens, batch {batch:3}: ", end="")
            print(f"{one.per_token_ms:6.1f} ms predicted, {step_ms:6.1f} published, {errors[-1]:+6.1%}")
    sizes = np.abs(errors)
    print(f"{len(sizes)} steps: {np.median(sizes):.1%} in the median, {np.quantile(sizes, 0.9):.1%} at p90")


if __name__ == "__main__":
    main()
