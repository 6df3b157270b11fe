"""Figure 10: runtimes on images and speech. Networks of many small operations gain most from a leaner runtime.

python examples/framework_tax/fig10_vision_speech.py
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

MODELS = ("resnet-50", "mobilenet-v2", "vit-base-32", "wavlm-base")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a panel for each model, a line for each runtime of the device's profile."""
    asked = shared.asked(__doc__, "fig10_vision_speech", arguments)
    models = asked.models_or(*MODELS)
    with shared.panels(asked, len(models)) as axes:
        for ax, model in zip(axes, models, strict=True):
            found = shared.curves(asked, [(runtime, model, runtime) for runtime in asked.runtimes])
            for index, (runtime, one) in enumerate(found.items()):
                shared.draw(ax, index, runtime, one.batches, one.latency_ms)
                shared.over(ax, index, shared.measured(asked, model, runtime))
            shared.against(ax, "batch", shared.title(asked, model))
            rows = [(runtime, float(one.latency_ms[0]), float(one.latency_ms[-1])) for runtime, one in found.items()]
            shared.table([model[:14], "first ms", "last ms"], rows)


if __name__ == "__main__":
    main()
