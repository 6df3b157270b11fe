"""Figure 7: Funnel against BERT. Fewer multiply-adds in more operations: the host pays for each of those.

python examples/framework_tax/fig07_funnel.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

import latpred


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw both over batch, and print their work."""
    asked = shared.asked(__doc__, "fig07_funnel", arguments)
    models = asked.models_or("bert-base-uncased", "funnel-transformer-small")
    for model in models:
        graph = latpred.trace(model)
        print(f"{model}: {graph.macs(8) / 8e9:.2f} GMACs per sample at batch 8, {graph.launches(8)} launches")
    shared.over_batch(asked, models, "Funnel against BERT")


if __name__ == "__main__":
    main()
