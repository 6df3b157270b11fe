"""Figure 6: BERT made wider, and deeper. Below the crossover width costs nothing; every layer always costs.

python examples/framework_tax/fig06_width_depth.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

WIDTHS = (128, 256, 512, 768, 1024, 1536, 2048)
DEPTHS = (1, 2, 4, 8, 12, 16, 24)


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw latency over width at 12 layers, and over depth at width 768, a line for each batch."""
    asked = shared.asked(__doc__, "fig06_width_depth", arguments, batches=(1, 8, 32))
    wide = [shared.curve(asked, shared.bert(asked.device, width=width)) for width in WIDTHS]
    deep = [shared.curve(asked, shared.bert(asked.device, layers=layers)) for layers in DEPTHS]
    with shared.panels(asked, 2) as (left, right):
        for ax, sizes, found, name in ((left, WIDTHS, wide, "w{}-l12"), (right, DEPTHS, deep, "w768-l{}")):
            known = {size: shared.measured(asked, f"bert-{name.format(size)}") for size in sizes}
            for index, batch in enumerate(asked.batches):
                took = [float(one.latency_ms[index]) for one in found]
                shared.draw(ax, index, f"batch {batch}", sizes, took)
                shared.over(ax, index, {size: ms[batch] for size, ms in known.items() if batch in ms})
                shared.table([name, f"ms at {batch}"], zip(sizes, took, strict=True))
        shared.against(left, "width", shared.title(asked, "BERT, 12 layers"))
        shared.against(right, "layers", shared.title(asked, "BERT, width 768"))


if __name__ == "__main__":
    main()
