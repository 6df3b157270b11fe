"""How many candidates of a search latpred predicts in a second, in how much memory, and what the time goes into.

    python examples/nas_benchmark.py --candidates 20000

Seconds are those of one core's CPU, so that other jobs on the machine count for little. Transformers come as configs
drawn at random: "first" is while the widths are met for the first time and each is traced once, "warm" is afterwards.
NAS-Bench-201 networks come as strings, all different: put together from traces of a supernet, and a few of them built
and traced each. Without a profile of this machine one that ships stands in.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

from latpred import predict_many
from latpred.errors import ProfileError
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.profile.document import DeviceProfile
from latpred.search.spaces import nasbench201
from latpred.zoo.candidates import traceable
from latpred.zoo.names import build_config
from latpred.zoo.spaces.nasbench201 import PIXELS

WIDTHS = [(heads, 64 * heads, 512 * steps) for heads in (2, 4, 6, 8, 10, 12) for steps in (1, 2, 3, 4, 6, 8)]
DEPTHS = range(1, 13)
# What the time goes into: a stage, and the function whose time it is, with all that it calls.
STAGES = {
    "graphs of transformers, from layers": ("layer_extrapolation.py", "graph"),
    "graphs of cells, from a supernet": ("spaces.py", "graph"),
    "a schedule for the runtime": ("__init__.py", "lower"),
    "dispatch costs and distinct kernels": ("pricing.py", "price"),
    "kernel times": ("pricing.py", "times"),
    "the two clocks": ("clocks.py", "latency"),
    "rows and the table": ("resume.py", "_row"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="name or path of a profile (default: this machine's)")
    parser.add_argument("--candidates", type=int, default=2000, help="transformers to predict (default: 2000)")
    parser.add_argument("--cells", type=int, default=2000, help="NAS-Bench-201 networks to predict (default: 2000)")
    parser.add_argument("--built", type=int, default=20, help="of these, how many to build as well (default: 20)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    predictor = Predictor(store.find(options.profile) if options.profile else usual_profile())
    print(f"profile {predictor.profile.name}, batch 1, eager, one core")
    transformers(predictor, options.candidates)
    cells(predictor, options.cells, options.built)


def usual_profile() -> DeviceProfile:
    """The profile of this machine, else one that ships."""
    try:
        return store.find()
    except ProfileError:
        return store.load("epyc-shared")


def transformers(predictor: Predictor, count: int) -> None:
    """Random BERT-like configs."""
    configs = berts(random.Random(0))
    print(f"BERT-like configs, {len(WIDTHS)} widths x {len(DEPTHS)} depths, 128 tokens")
    predict_many(islice(configs, 1), device=predictor)  # imports transformers
    first = max(1, count // 10)
    rate("first, from config to prediction", first, lambda: predict_many(islice(configs, first), device=predictor))
    show_growth(predictor, configs, count)
    some = list(islice(configs, min(count, 200)))
    rate("warm, configs made beforehand", len(some), lambda: predict_many(some, device=predictor))
    show_stages(lambda: predict_many(some, device=predictor))
    models = [build_config(config) for config in some[:5]]
    rate("models that are there already, each traced", len(models), lambda: predict_many(models, device=predictor))


def cells(predictor: Predictor, count: int, built: int) -> None:
    """NAS-Bench-201 networks, all different; then some of them from their modules."""
    encodings = [nasbench201.encoding(index) for index in range(nasbench201.size)]
    random.Random(0).shuffle(encodings)
    print(f"NAS-Bench-201, {len(encodings):,} cells in random order")
    print(f"  {'traces of the supernet, once':<46}{cpu(partial(nasbench201.supernet, image=PIXELS)) * 1e3:9.0f} ms")
    show_growth(predictor, map(nasbench201.graph, encodings * (1 + count // len(encodings))), count)
    some = encodings[: min(count, 200)]
    rate("graphs alone, without a prediction", len(some), lambda: [nasbench201.graph(each) for each in some])
    show_stages(lambda: predict_many(map(nasbench201.graph, some), device=predictor))
    ask = partial(predict_many, image=PIXELS, device=predictor)
    ask([partial(nasbench201.build, encodings[-1])])
    builders = [partial(nasbench201.build, each) for each in encodings[:built]]
    rate("built and traced, from string to prediction", built, lambda: ask(builders))
    modules: list[Any] = []
    rate("of that, building", built, lambda: modules.extend(map(traceable, builders)))
    rate("modules that are there already, each traced", built, lambda: ask(modules))


def show_growth(predictor: Predictor, candidates: Iterator[Any], count: int) -> None:
    """Print rate and memory as more and more candidates are predicted."""
    print("  candidates   ms each   a second   peak memory")
    some = max(1, count // 5)
    for done in range(some, count + 1, some):
        each = cpu(lambda: predict_many(islice(candidates, some), device=predictor)) / some
        print(f"  {done:10,}{each * 1e3:10.2f}{1 / each:11,.0f}{peak_megabytes():11,.0f} MB")


def berts(choose: random.Random) -> Iterator[Any]:
    """Random configs without end."""
    from transformers import BertConfig

    while True:
        heads, hidden, inner = choose.choice(WIDTHS)
        yield BertConfig(
            num_hidden_layers=choose.choice(DEPTHS),
            hidden_size=hidden,
            num_attention_heads=heads,
            intermediate_size=inner,
        )


def rate(what: str, count: int, call: Callable[[], object]) -> None:
    """Print what one of so many takes."""
    seconds = cpu(call)
    print(f"  {what:<46}{seconds / count * 1e3:9.2f} ms each{count / seconds:9,.0f} a second")


def cpu(call: Callable[[], object]) -> float:
    """CPU seconds of a call."""
    start = time.process_time()
    call()
    return time.process_time() - start


def peak_megabytes() -> float:
    """The most memory that this process ever held."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def show_stages(call: Callable[[], object]) -> None:
    """Print what the time of a call goes into, in percent; under a profiler, which makes Python look slower."""
    profiler = cProfile.Profile(time.process_time)
    profiler.runcall(call)
    stats = pstats.Stats(profiler)
    found = {(Path(file).name, name): values[3] for (file, _, name), values in stats.stats.items()}  # type: ignore[attr-defined]
    total = stats.total_tt  # type: ignore[attr-defined]
    print("  where the time goes, warm, under a profiler")
    shares = {stage: found[key] / total for stage, key in STAGES.items() if key in found}
    for stage, share in shares.items():
        print(f"    {stage:<44}{share:7.0%}")
    print(f"    {'everything else':<44}{1 - sum(shares.values()):7.0%}")


if __name__ == "__main__":
    main()
