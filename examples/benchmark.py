"""How fast latpred itself is: prints, never asserts. Run it as `python examples/benchmark.py`.

Each figure is the median of several repeats on one thread. Without a profile of this machine, one that ships stands in:
how long a prediction takes does not depend on the numbers in it.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from statistics import median
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import torch
from torch.utils._pytree import tree_map_only
from torch.utils.flop_counter import FlopCounterMode

from latpred.errors import ProfileError
from latpred.graph.graph import ModelGraph
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.runtimes import get, graph_store
from latpred.runtimes.lowering import of_source
from latpred.runtimes.source import source_of
from latpred.tracing import trace
from latpred.zoo import names

MODEL, SEQ = "bert-base-uncased", 128
TRACERS = ("torchscript", "onnxruntime", "compile")  # runtimes whose own tools take a model apart
MODELS = (MODEL, "gpt2", "swin-tiny", "vit-base-patch16-224", "resnet-50", "mobilenet-v2", "efficientnet-b0")
SHIPPED = "epyc-shared"


def main() -> None:
    """Time everything and print one line each."""
    predictor = Predictor(usual_profile())
    module = names.build(MODEL, seq=SEQ).model
    graph = trace(module, seq=SEQ)
    predictor.predict(graph, 8)
    fresh = copies(graph)

    print(f"{MODEL}, {SEQ} tokens, profile {predictor.profile.name}: {len(graph.ops)} ops")
    other = count(9)  # a batch not asked for before needs kernel times that nothing has needed before
    show("graph to prediction, nothing seen before", once := timed(lambda: predictor.predict(next(fresh), next(other))))
    show("graph to prediction, a new graph of known layers", timed(lambda: predictor.predict(next(fresh), 8)))
    show("graph to prediction, the same graph at a new batch", timed(lambda: predictor.predict(graph, next(other))))
    show("graph to prediction, the same graph again", timed(lambda: predictor.predict(graph, 8)))
    many = timed(lambda: predictor.curve(next(fresh), range(1, 65)))
    show("graph to 64-point curve", many, f"{many / once:.1f} x one point")
    thresholds = timed(lambda: predictor.predict(graph, 8).to_dict())
    show("the same with crossover, knee and their intervals", thresholds)

    one = timed(lambda: predictor.predict(trace(module, seq=SEQ), 8))
    show("nn.Module to prediction", one)
    many = timed(lambda: predictor.curve(trace(module, seq=SEQ), range(1, 65)))
    show("nn.Module to 64-point curve", many, f"{many / one:.1f} x one point")
    show("lowering for eager alone", timed(lambda: get("eager").lower(next(fresh), 8)))

    show_traces(module)
    show_builds(predictor)

    bare = process("-c", "pass")
    show("bare Python", bare)
    show("import latpred, above bare Python", process("-c", "import latpred") - bare)
    show("latpred --help, above bare Python", process("-c", "from latpred.cli import main; main(['--help'])") - bare)


def show_traces(module: torch.nn.Module) -> None:
    """What the graph of each other runtime costs: first, then for another process, and for this one again."""
    source = source_of(module, seq=SEQ)
    for name in TRACERS:
        missing = get(name).available()
        if missing:
            print(f"  {name} is left out: {missing}")
            continue
        with tempfile.TemporaryDirectory() as home:
            os.environ["LATPRED_HOME"] = home  # an empty cache
            make = partial(of_source, source, name, "cpu")
            show(f"what {name} runs, the first time", timed(make, 1), "exports and compilers included")
            graph_store.forget()
            show("the same structure in another process", timed(make, 1), "read from the cache on disk")
            show("the same structure again, at any batch", timed(make))


def show_builds(predictor: Predictor, repeats: int = 9) -> None:
    """What a prediction of a module takes beside building that module on the meta device, in turns, in CPU time.

    A build by latpred's own zoo, which leaves out all initialisation, stands beside the one that PyTorch offers.
    """
    print("nn.Module to prediction, over: a build under torch.device('meta'); one that fills nothing; a counted pass")
    for name in MODELS:
        built = names.build(name)
        inputs = tree_map_only(torch.Tensor, lambda tensor: tensor.to("meta"), built.inputs(2, "meta"))
        calls = (
            lambda model=built.model: predictor.predict(trace(model), 8),
            partial(build_on_meta, built.model),
            partial(names.build, name),
            partial(count_flops, built.model, inputs),
        )
        seconds = [[cpu_seconds(call) for call in calls] for _ in range(repeats + 1)][1:]
        ratios = [median(row[0] / row[which] for row in seconds) for which in range(1, len(calls))]
        show(name, median(row[0] for row in seconds), "   ".join(f"{ratio:.2f} x" for ratio in ratios))


def build_on_meta(model: Any) -> torch.nn.Module:
    """A model of transformers built anew, as its users do it."""
    with torch.device("meta"):
        return type(model)(model.config)


def count_flops(model: torch.nn.Module, inputs: Any) -> None:
    """A pass under PyTorch's own counter."""
    with torch.no_grad(), FlopCounterMode(display=False):
        model(**inputs) if isinstance(inputs, dict) else model(*inputs)


def cpu_seconds(call: Callable[[], object]) -> float:
    """Processor time of a call, which other work on the machine hardly changes."""
    gc.collect()
    start = time.process_time()
    call()
    return time.process_time() - start


def timed(call: Callable[[], object], repeats: int = 30) -> float:
    """Median seconds of a call."""
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def process(*arguments: str) -> float:
    """Median seconds of a Python process."""
    return timed(lambda: subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL), 10)


def show(what: str, seconds: float, note: str = "") -> None:
    """Print one figure."""
    print(f"  {what:<52}{seconds * 1e3:9.2f} ms  {note}".rstrip())


def copies(graph: ModelGraph) -> Iterator[ModelGraph]:
    """Graphs equal to one but never seen before."""
    while True:
        yield msgspec.structs.replace(graph)


def usual_profile() -> DeviceProfile:
    """The profile of this machine, else one that ships."""
    try:
        return store.find()
    except ProfileError:
        return store.load(SHIPPED)


if __name__ == "__main__":
    main()
