"""Figure 9: one model on several devices. The faster the device, the longer the framework bounds it.

python examples/framework_tax/fig09_devices.py --device titan-x-pascal,rtx-2080ti,rtx-8000,rtx-a6000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import shared

DEVICES = "titan-x-pascal,rtx-2080ti,rtx-8000,rtx-a6000"


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for each model, a line for each device, and print the crossovers."""
    asked = shared.asked(__doc__, "fig09_devices", arguments, device=DEVICES, protocol="pipelined")
    devices = asked.device.split(",")
    models = asked.models_or("bert-base-uncased", "resnet-50")
    with shared.panels(asked, len(models)) as axes:
        for ax, model in zip(axes, models, strict=True):
            rows = []
            for index, device in enumerate(devices):
                one = shared.curve(replace(asked, device=device), model)
                shared.draw(ax, index, device, one.batches, one.latency_ms)
                rows.append((device, float(one.latency_ms[0]), str(one.crossover.batch)))
            shared.against(ax, "batch", f"{model}\n{asked.precision}, {asked.protocol}")
            shared.table([model[:14], "first ms", "crossover"], rows)


if __name__ == "__main__":
    main()
