"""Figure 1: multiply-adds against latency. At batch 1 on a GPU, one says next to nothing about the other.

python examples/framework_tax/fig01_macs.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared
from scipy.stats import kendalltau

import latpred

MODELS = (
    *("bert-base", "distilbert", "squeezebert", "albert", "fnet", "electra-small", "mobilebert"),
    *("resnet-18", "resnet-50", "resnet-101", "mobilenet-v2", "efficientnet-b0", "vit-base-32"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for the smallest and one for the largest batch."""
    asked = shared.asked(__doc__, "fig01_macs", arguments, batches=(1, 64))
    models = asked.models_or(*MODELS)
    found = shared.curves(asked, [(model, model, "eager") for model in models])
    giga = {model: latpred.trace(model).macs(1) / 1e9 for model in found}
    batches = (asked.batches[0], asked.batches[-1])
    with shared.panels(asked, 2) as axes:
        for ax, batch in zip(axes, batches, strict=True):
            at = list(asked.batches).index(batch)
            x = [giga[model] for model in found]
            y = [float(one.latency_ms[at]) for one in found.values()]
            for index, (one, two) in enumerate(zip(x, y, strict=True)):
                colour = shared.style.LINES[index % 7]
                fill = colour if index < 7 else "none"  # the second seven are hollow
                marker = shared.style.MARKERS[index % 7]
                ax.plot(one, two, linestyle="", marker=marker, ms=5, color=colour, mfc=fill)
            for index, model in enumerate(found):
                points = shared.measured(asked, model)
                shared.over(ax, index, {giga[model]: points[batch]} if batch in points else {})
            tau = kendalltau(x, y).statistic
            shared.against(ax, "gigaMACs per sample", shared.title(asked, f"batch {batch}, Kendall tau {tau:.2f}"))
            shared.table(["model", "GMACs", f"ms at {batch}"], [(m, a, b) for m, a, b in zip(found, x, y, strict=True)])
        axes[0].figure.legend(axes[0].lines[: len(found)], list(found), loc="outside lower center", ncols=5)


if __name__ == "__main__":
    main()
