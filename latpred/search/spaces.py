"""Published search spaces, each traced once; its networks are then put together by their encoding or their number.

>>> fbnet.graph("C").launches() > fbnet.graph("A").launches()
True
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from latpred.graph.graph import ModelGraph
from latpred.ops import generation
from latpred.query import whole_number
from latpred.search.choices import Choice
from latpred.search.supernet import Supernet
from latpred.zoo.spaces import space


@dataclass(frozen=True, slots=True)
class SearchSpace:
    """A published search space.

    Attributes
    ----------
    name : str
        What names of its networks start with, as in "nasbench201:17".

    Examples
    --------
    >>> nasbench201.encoding(9)
    '|avg_pool_3x3~0|+|none~0|none~1|+|skip_connect~0|none~1|nor_conv_3x3~2|'
    >>> nasbench201.graph(9) == nasbench201.graph(nasbench201.encoding(9))
    True
    """

    name: str

    @property
    def size(self) -> int:
        return space(self.name).size

    def encoding(self, index: int) -> str:
        """The encoding of a number below `size`; of NAS-Bench-201 the numbers are those of its tables."""
        return str(space(self.name).encoded(index))

    def graph(
        self, architecture: Any, *, image: int | None = None, precision: str | None = None, **options: Any
    ) -> ModelGraph:
        """What `latpred.trace` gives of a network, without building or tracing it.

        Parameters
        ----------
        architecture : str, int, sequence or mapping
            Its encoding or its number.
        image : int, optional
            The image's side; default: the space's, or what the encoding says.
        precision : str, optional
            As for `latpred.Supernet`.
        **options
            As for `supernet`.
        """
        of = space(self.name)
        encoding = of.encoded(architecture)
        chosen = of.chosen(encoding)
        asked = {**of.options(encoding), **options}
        side = of.pixels(encoding) if image is None else image
        return self.supernet(image=side, precision=precision, **asked).graph(chosen)

    def supernet(self, *, image: int, precision: str | None = None, **options: Any) -> Supernet:
        """All networks at once; made in seconds, and kept until a cost formula is registered.

        `options` are classes, and channels and cells of NAS-Bench-201, last of FBNet, and width of once-for-all.
        """
        side, state = whole_number("image", image, "length"), (generation(), torch.get_default_dtype())
        return _supernet(self.name, side, precision, state, **options)

    def build(self, architecture: Any, **options: Any) -> nn.Module:
        return space(self.name).build(architecture, **options)


@cache
def _supernet(name: str, image: int, precision: str | None, state: tuple[Any, ...], **options: Any) -> Supernet:
    """The supernet of a space; `state` is what of the process it follows from beside the options."""

    def choice(label: str, layers: Any) -> Choice:
        return Choice(label, {option: build() for option, build in layers.items()})

    return Supernet(lambda: space(name).network(choice, **options), image=image, precision=precision)


nasbench201, fbnet, once_for_all = map(SearchSpace, ("nasbench201", "fbnet", "once_for_all"))
