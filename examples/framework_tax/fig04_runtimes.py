"""Figure 4: runtimes over batch, and over sequence length at batch 1. They differ where the framework bounds latency.

python examples/framework_tax/fig04_runtimes.py                   # this machine's CPU
python examples/framework_tax/fig04_runtimes.py --device simulated
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

LENGTHS = (16, 32, 64, 128, 256, 512)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw latency over batch and over sequence length for each runtime of the device's profile."""
    asked = shared.asked(__doc__, "fig04_runtimes", arguments)
    model = asked.models_or("bert-base-uncased")[0]
    found = shared.curves(asked, [(runtime, model, runtime) for runtime in asked.runtimes])
    first = asked.batches[0]
    lengths = [length for length in LENGTHS if length <= 128 * max(1, len(asked.batches) // 2)]
    with shared.panels(asked, 2) as (left, right):
        for index, (runtime, one) in enumerate(found.items()):
            shared.draw(left, index, runtime, one.batches, one.latency_ms)
            shared.over(left, index, shared.measured(asked, model, runtime, input_size=128))
            took = [
                shared.curve(asked, model, runtime, seq=length, batches=[first]).latency_ms[0] for length in lengths
            ]
            shared.draw(right, index, runtime, lengths, took)
            known = {length: shared.measured(asked, model, runtime, input_size=length) for length in lengths}
            shared.over(right, index, {length: ms[first] for length, ms in known.items() if first in ms})
            shared.table([runtime[:14], "ms"], zip(one.batches, map(float, one.latency_ms), strict=True))
        shared.against(left, "batch", shared.title(asked, model))
        shared.against(right, "tokens", shared.title(asked, f"{model}, batch {first}"))


if __name__ == "__main__":
    main()
