"""Figure 3: what the device computes for against what the user waits for. The space between is the framework's tax.

python examples/framework_tax/fig03_device_time.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for each model: latency and device time over batch."""
    asked = shared.asked(__doc__, "fig03_device_time", arguments)
    models = asked.models_or("bert-base-uncased", "resnet-50")
    with shared.panels(asked, len(models)) as axes:
        for ax, model in zip(axes, models, strict=True):
            found = shared.curve(asked, model)
            busy = [point.latency_ms * point.device_busy for point in found]
            shared.draw(ax, 0, "latency", found.batches, found.latency_ms)
            shared.draw(ax, 1, "device computing", found.batches, busy)
            ax.fill_between(found.batches, busy, found.latency_ms, color=shared.style.ORANGE, alpha=0.25, label="tax")
            shared.over(ax, 0, shared.measured(asked, model))
            shared.against(ax, "batch", shared.title(asked, model))
            rows = [(p.batch, p.latency_ms, b, f"{p.device_busy:.0%}") for p, b in zip(found, busy, strict=True)]
            shared.table([model[:14], "latency ms", "device ms", "busy"], rows)


if __name__ == "__main__":
    main()
