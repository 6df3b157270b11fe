"""What every runtime offers: how it turns a graph into a schedule, and how to build what it really runs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from latpred.graph import ModelGraph
from latpred.schedule import Schedule


@runtime_checkable
class Runtime(Protocol):
    """A way to run a model.

    Packages add one with an entry point in the group "latpred.runtimes" whose object is a Runtime, or a class or
    function that gives one when called without arguments.

    Attributes
    ----------
    name : str
        What `predict(..., runtime=name)` calls it, and the key of its dispatch costs in a profile.
    """

    name: str

    def lower(self, graph: ModelGraph, batch: int) -> Schedule:
        """The steps and kernels of one forward pass.

        Return the same object for the same graph wherever the schedule does not change with batch: the predictor then
        prices a whole curve at once.
        """
        ...

    def available(self) -> str | None:
        """None when models can be built here, else what is missing and how to get it."""
        ...

    def build(self, model: Any, inputs: Any) -> Callable[[], Any]:
        """The real thing: a call that runs one forward pass on inputs. For measuring, never for predicting.

        Parameters
        ----------
        model : torch.nn.Module
            On its device, in eval mode.
        inputs : tuple or dict
            Positional or keyword arguments of its forward.
        """
        ...
