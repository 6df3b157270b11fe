"""Figure 12: number formats. Half the bits shorten the device's time, not that of a host that is slower still.

python examples/framework_tax/fig12_precision.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for each model, a line for each precision that the device's profile knows."""
    asked = shared.asked(__doc__, "fig12_precision", arguments)
    models = asked.models_or("bert-base-uncased", "resnet-50")
    with shared.panels(asked, len(models)) as axes:
        for ax, model in zip(axes, models, strict=True):
            for index, precision in enumerate(sorted(shared.profile_of(asked.device).kernels)):
                one = shared.curve(asked, model, precision=precision)
                shared.draw(ax, index, precision, one.batches, one.latency_ms)
                shared.over(ax, index, shared.measured(asked, model, precision=precision))
                shared.table(
                    [f"{precision} {model}"[:14], "ms"], zip(one.batches, map(float, one.latency_ms), strict=True)
                )
            shared.against(ax, "batch", f"{model}\n{shared.profile_of(asked.device).name}, {asked.protocol}")


if __name__ == "__main__":
    main()
