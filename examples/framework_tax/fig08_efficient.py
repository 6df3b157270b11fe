"""Figure 8: efficient variants of BERT. Fewer operations help at batch 1, fewer multiply-adds at large batches.

python examples/framework_tax/fig08_efficient.py --device rtx-8000
"""

from __future__ import annotations

from collections.abc import Sequence

import shared

MODELS = ("bert-base-uncased", "distilbert-base-uncased", "squeezebert-uncased", "albert-base-v2", "mobilebert-uncased")


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw all over batch."""
    asked = shared.asked(__doc__, "fig08_efficient", arguments)
    shared.over_batch(asked, asked.models_or(*MODELS), "efficient variants")


if __name__ == "__main__":
    main()
