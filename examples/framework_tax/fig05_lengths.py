"""Figure 5: sequences of unequal lengths. Padding wastes device time; graphs need it, and win where the host is slow.

    python examples/framework_tax/fig05_lengths.py --device simulated

Lengths are the paper's: 20.92 tokens in the mean, 10.18 of standard deviation, padded to 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import shared
import torch
from torch import nn

from latpred import Lengths

LENGTHS = Lengths(mean=20.92, std=10.18, padded_to=128)
WAYS = (
    ("padded, eager", "padded", "eager"),
    ("nested, eager", "nested", "eager"),
    ("padded, graph", "padded", "cuda-graphs"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw padded and nested execution, and CUDA graphs where the device has them, over batch."""
    asked = shared.asked(__doc__, "fig05_lengths", arguments)
    model = encoder()
    with shared.panels(asked) as (ax,):
        for index, (label, execution, runtime) in enumerate(WAYS):
            if runtime in asked.runtimes:
                one = shared.curve(asked, model, runtime, lengths=LENGTHS, execution=execution)
                shared.draw(ax, index, label, one.batches, one.latency_ms)
                shared.table([label[:14], "ms"], zip(one.batches, map(float, one.latency_ms), strict=True))
        shared.against(ax, "batch", shared.title(asked, "encoder of BERT's size, mean 21 tokens"))


def encoder(width: int = 768, layers: int = 12) -> nn.TransformerEncoder:
    """An encoder that torch can run nested, on the meta device."""
    with torch.device("meta"):
        layer = nn.TransformerEncoderLayer(width, width // 64, 4 * width, batch_first=True, activation="gelu")
        return nn.TransformerEncoder(layer, layers).eval()


if __name__ == "__main__":
    main()
