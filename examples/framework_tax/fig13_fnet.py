"""Figure 13: a better architecture against a better runtime: FNet in eager against BERT in ONNX Runtime.

python examples/framework_tax/fig13_fnet.py                       # this machine's CPU
python examples/framework_tax/fig13_fnet.py --device rtx-8000     # whose profile lacks onnxruntime
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

WAYS = (("bert-base-uncased", "eager"), ("fnet-base", "eager"), ("bert-base-uncased", "onnxruntime"))


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the three over batch; a runtime that the device's profile lacks is left out."""
    asked = shared.asked(__doc__, "fig13_fnet", arguments)
    ways = {f"{model} in {runtime}": (model, runtime) for model, runtime in WAYS if runtime in asked.runtimes}
    found = shared.curves(asked, [(label, *way) for label, way in ways.items()])
    with shared.panels(asked) as (ax,):
        for index, (label, one) in enumerate(found.items()):
            shared.draw(ax, index, label, one.batches, one.latency_ms)
            shared.over(ax, index, shared.measured(asked, *ways[label]))
            shared.table([label, "ms"], zip(one.batches, map(float, one.latency_ms), strict=True))
        shared.against(ax, "batch", shared.title(asked, "architecture against runtime"))


if __name__ == "__main__":
    main()
