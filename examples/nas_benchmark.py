"""How many candidates of a search latpred predicts in a second, in how much memory, and what the time goes into.

    python examples/nas_benchmark.py --candidates 20000

Seconds are those of one core's CPU, so that other jobs on the machine count for little. Transformers come as configs
drawn at random: "first" is while the widths are met for the first time and each is walked once, "warm" is afterwards.
NAS-Bench-201 networks come as strings, all different. Without a profile of this machine a made-up one stands in.
"""

from __future__ import annotations

import argparse
import cProfile
import os
import pstats
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch
from benchmark import usual_profile
from spaces import nasbench201

from latpred import profiles
from latpred.predictor import Predictor
from latpred.tracing.candidates import walkable

WIDTHS = [(heads, 64 * heads, 512 * steps) for heads in (2, 4, 6, 8, 10, 12) for steps in (1, 2, 3, 4, 6, 8)]
DEPTHS = range(1, 13)
# What the time goes into: a stage, and the function whose time it is, with all that it calls.
STAGES = {
    "graphs put together from layers": ("stacks.py", "graph"),
    "a schedule for the runtime": ("eager.py", "lower"),
    "dispatch costs and distinct kernels": ("pricing.py", "price"),
    "kernel times": ("pricing.py", "rows_at"),
    "the two clocks": ("clocks.py", "latency"),
    "rows and the table": ("many.py", "_row"),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print everything."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", help="name or path of a profile (default: this machine's)")
    parser.add_argument("--candidates", type=int, default=2000, help="transformers to predict (default: 2000)")
    parser.add_argument("--cells", type=int, default=20, help="NAS-Bench-201 networks to predict (default: 20)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    predictor = Predictor(profiles.find(options.profile) if options.profile else usual_profile())
    print(f"profile {predictor.profile.name}, batch 1, eager, one core")
    transformers(predictor, options.candidates)
    cells(predictor, options.cells)


def transformers(predictor: Predictor, count: int) -> None:
    """Random BERT-like configs."""
    configs = berts(random.Random(0))
    print(f"BERT-like configs, {len(WIDTHS)} widths x {len(DEPTHS)} depths, 128 tokens")
    predictor.predict_many(islice(configs, 1))  # imports transformers
    first = count // 10
    rate("first, from config to prediction", first, lambda: predictor.predict_many(islice(configs, first)))
    print("  candidates   ms each   a second   peak memory")
    done = 0
    for step in steps(count):
        seconds = cpu(lambda step=step: predictor.predict_many(islice(configs, step)))
        done += step
        print(f"  {done:10,}{seconds / step * 1e3:10.2f}{step / seconds:11,.0f}{peak_megabytes():11,.0f} MB")
    some = list(islice(configs, min(count, 200)))
    rate("warm, configs made beforehand", len(some), lambda: predictor.predict_many(some))
    show_stages(lambda: predictor.predict_many(some))
    graphs = [walkable(config_builder(config)) for config in some[:5]]
    rate("models that are there already, each walked", len(graphs), lambda: predictor.predict_many(graphs))


def cells(predictor: Predictor, count: int) -> None:
    """NAS-Bench-201 networks, all different, then the same ones again."""
    encodings = list(nasbench201.encodings())
    random.Random(0).shuffle(encodings)
    ask = partial(predictor.predict_many, image=nasbench201.PIXELS)
    ask([partial(nasbench201.build, encodings.pop())])
    chosen = encodings[:count]
    print(f"NAS-Bench-201, {count} cells")
    rate("from string to prediction", count, lambda: ask(partial(nasbench201.build, each) for each in chosen))
    built: list[Any] = []
    rate("of that, building", count, lambda: built.extend(walkable(partial(nasbench201.build, e)) for e in chosen))
    rate("without building, from module to prediction", count, lambda: ask(built))


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


def config_builder(config: Any) -> Callable[[], torch.nn.Module]:
    """A function that builds a config's model."""
    from latpred.tracing.names import build_config

    return lambda: build_config(config)


def steps(count: int) -> Iterable[int]:
    """`count` in five parts."""
    return [count // 5] * 5


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
    print("  where the time goes, warm")
    shares = {stage: found.get(key, 0.0) / total for stage, key in STAGES.items()}
    for stage, share in shares.items():
        print(f"    {stage:<44}{share:7.0%}")
    print(f"    {'everything else':<44}{1 - sum(shares.values()):7.0%}")


if __name__ == "__main__":
    main()
