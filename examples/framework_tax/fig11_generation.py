"""Figure 11: GPT-2 generates 16 tokens. Each further token is framework-bound up to batches at which the first is not.

python examples/framework_tax/fig11_generation.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

import latpred

PROMPT, NEW = 128, 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the time to the first token, of each further one and of all over batch."""
    asked = shared.asked(__doc__, "fig11_generation", arguments)
    model = asked.models_or("gpt2")[0]
    found = latpred.predict_generation(
        model, PROMPT, NEW, list(asked.batches), device=asked.device, precision=asked.precision
    )
    lines = {
        "first token": [point.first_token_ms for point in found],
        "each further token": [point.per_token_ms or float("nan") for point in found],
        f"all {NEW}": [point.latency_ms for point in found],
        "of that, dispatch": [point.overhead_ms for point in found],
    }
    with shared.panels(asked) as (ax,):
        for index, (label, took) in enumerate(lines.items()):
            shared.draw(ax, index, label, asked.batches, took)
        shared.against(ax, "batch", shared.title(asked, f"{model}, {PROMPT} tokens of prompt"))
    shared.table(["batch", *lines], zip(asked.batches, *lines.values(), strict=True))


if __name__ == "__main__":
    main()
