"""Table 1 of "The Framework Tax": where the framework bounds latency, width, batch and sequence length are free.

python examples/framework_tax/table1.py                   # the shipped profile of an RTX 8000
python examples/framework_tax/table1.py --device rtx-a6000

Predicts BERT at batch 1 and 128 tokens, and with four times the batch, four times the tokens, and twice the width. The
profile was fitted to other measurements of that GPU; none of the paper's table. The paper does not give its number
format, so both are predicted.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NamedTuple

import figures

import latpred


class Row(NamedTuple):
    """One row of the table: the width of BERT, sizes of its input, and the milliseconds that the paper prints."""

    width: int
    batch: int
    tokens: int
    printed_ms: float


PRINTED = (
    Row(768, 1, 128, 13.6),
    Row(768, 4, 128, 13.4),
    Row(768, 1, 512, 13.4),
    Row(1536, 1, 128, 13.4),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print predicted and printed latencies, and each as a multiple of the first row's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="rtx-8000", help="name or file of a profile")
    parser.add_argument("--layers", type=int, default=12)
    asked = parser.parse_args(arguments)
    print(
        f"{'precision':9} {'width':>6} {'batch':>6} {'tokens':>6} {'predicted ms':>13} {'x first':>8} {'paper ms':>9}"
    )
    for precision in sorted(figures.profile_of(asked.device).kernels):
        first = 0.0
        for row in PRINTED:
            found = latpred.predict(
                figures.bert(asked.device, row.width, asked.layers, heads=12),
                row.batch,
                seq=row.tokens,
                precision=precision,
                device=asked.device,
                protocol="pipelined",
            )
            first = first or found.latency_ms
            print(
                f"{precision:9} {row.width:6} {row.batch:6} {row.tokens:6} {found.latency_ms:13.2f} "
                f"{found.latency_ms / first:8.2f} {row.printed_ms:9.1f}  {found.regime}"
            )


if __name__ == "__main__":
    main()
