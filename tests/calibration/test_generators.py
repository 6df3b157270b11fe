"""Generators: whatever a calibration can draw is valid, so that no draw fails and none ends a run.

Sized networks run forward on the meta device: 1,200 seeds of each kind with stages of convolutions, whose maps shrink,
every tenth of the others, whose sizes fit by construction. A stride of seeds is traced, later ones too, which a machine
ten times as fast reaches; five minutes reach 1,300. Calibrations of the host and checks draw from the same streams.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import msgspec
import onnx
import pytest
import torch

from latpred import runtimes
from latpred.calibration import cells, schedules
from latpred.calibration.devices import open_device
from latpred.calibration.runtime_calibration import onnx_workloads
from latpred.calibration.runtime_calibration.onnx_calibrator import TINY_GRAPHS, graph_cell
from latpred.calibration.runtime_calibration.onnx_workloads import Graph
from latpred.calibration.workloads import networks, single_ops
from latpred.calibration.workloads.networks import KINDS, WAVE, NetworkSpec
from latpred.errors import TraceError
from latpred.graph.graph import ModelGraph
from latpred.tracing.inputs import from_example
from latpred.tracing.meta_module import make_meta_module
from latpred.tracing.op_record import leaves
from latpred.tracing.tracer import Naming, Tracer

EACH = 1200  # seeds of a kind
STAGED = ("residual", "mobile", "dense")
THINNED = 10
TRACED = (*range(0, 13_000, 42), *range(13_000, 130_000, 382))
TINY = 10 * len(KINDS)  # as many as the calibrator of any runtime draws
PRECISIONS = ("fp32", "bf16", "fp16")
CELLS = 400  # kernel cells of a precision
GRAPHS = 6_000  # generated ONNX graphs
# Networks that are left with one pixel before their last stage; one like the first once ended a calibration's draws.
PIXELS = (10522, 3346, 9356)
REAL = ("eager", "torchscript", *(pytest.param(name, marks=pytest.mark.slow) for name in ("onnxruntime", "compile")))


def run_on_meta(spec: NetworkSpec) -> list[str]:
    """Run a network forward on the meta device, in one pass of a trace; gives the ops whose result holds nothing."""
    with torch.device("meta"):
        model = networks.build(spec)
    tracer = Tracer(make_meta_module(model), from_example(networks.inputs(spec, 2, "meta")), Naming(""))
    made = [(op.name, out) for op in tracer.one_pass(2).records if op.make for out in leaves(op.make())]
    return [name for name, out in made if not out.numel()]


def demand_sound(graph: ModelGraph, batch: int) -> None:
    """Every op is known, and every kernel writes something."""
    ops = graph.at(batch)
    assert any(op.launches for op in ops)
    assert not [op.name for op in ops if op.estimated]
    assert not [op.name for op in ops if op.launches and op.write_bytes.at(batch) < 1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_sized_network_runs_forward(kind: str) -> None:
    failed = {}
    for seed in range(KINDS.index(kind), EACH * len(KINDS), len(KINDS) * (1 if kind in STAGED else THINNED)):
        spec = networks.draw(seed)
        assert spec.kind == kind or (kind, spec.kind) == ("audio", WAVE)
        try:
            assert run_on_meta(spec) == [], seed
        except TraceError as error:
            failed[seed] = str(error)
    assert failed == {}


@pytest.mark.parametrize("kind", KINDS)
def test_sized_networks_are_traced(kind: str) -> None:
    for number, seed in enumerate(seed for seed in TRACED if KINDS[seed % len(KINDS)] == kind):
        spec = networks.draw(seed)
        demand_sound(networks.graph(spec, PRECISIONS[number % len(PRECISIONS)]), spec.batch)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_tiny_and_small_networks_are_traced(precision: str) -> None:
    usual = precision == "fp32"
    tiny = schedules.tiny_networks(TINY if usual else len(KINDS))
    for spec in (*tiny, *(islice(schedules.small_networks(), 3 * schedules.SMALL) if usual else ())):
        demand_sound(networks.graph(spec, precision), spec.batch)


@pytest.mark.parametrize("precision", [*PRECISIONS, "tf32"])
def test_kernel_cells_launch_a_kernel(precision: str) -> None:
    names = cells.PRODUCTS if precision == "tf32" else cells.KERNELS
    for cell in islice(cells.kernel_cells(precision, names), CELLS):
        demand_sound(*single_ops.graph(cell))


class Outline(Graph):
    """A graph whose weights are inputs of their shape: writing them would take most of the time."""

    def weight(self, *shape: int, scale: float | None = None) -> str:
        """Declare a weight."""
        name = f"weight{len(self.declared)}"
        self.declared[name] = shape
        return name

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.declared: dict[str, tuple[int, ...]] = {}

    def model(self, *results: str) -> bytes:
        """The serialised model, at its own batch even where an exporter would leave that open."""
        self.open_batch = False
        model = onnx.ModelProto.FromString(super().model(*results))
        for name, shape in self.declared.items():
            model.graph.input.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        return model.SerializeToString()


def demand_shapes(model: onnx.ModelProto) -> None:
    """The model is one by ONNX's own rules, and each result of each node has a known shape with something in it."""
    inferred = onnx.shape_inference.infer_shapes(model, check_type=True, strict_mode=True, data_prop=True)
    onnx.checker.check_model(inferred)
    known = {value.name: value for value in (*inferred.graph.value_info, *inferred.graph.output)}
    made = [name for node in model.graph.node for name in node.output]
    assert [name for name in made if name not in known] == []
    for name in made:
        kind = known[name].type.tensor_type
        assert kind.HasField("shape"), name
        assert all(dim.dim_value > 0 for dim in kind.shape.dim), name


@pytest.mark.parametrize("kind", dict.fromkeys(onnx_workloads.KINDS))
def test_generated_onnx_graphs_have_shapes(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(onnx_workloads, "Graph", Outline)
    drawn = [graph_cell(number, "fp32", tiny=True) for number in range(TINY_GRAPHS)]
    drawn += [graph_cell(number, "fp32") for number in range(GRAPHS)]
    for cell in (cell for cell in drawn if cell.name == kind):
        model, feed = onnx_workloads.make(kind, cell.dims["seed"], tiny=bool(cell.dims["tiny"]))
        assert feed["x"].size
        demand_shapes(onnx.ModelProto.FromString(model))


def small(seed: int) -> NetworkSpec:
    """A network as it is drawn, but narrow, so that it runs in no time."""
    return msgspec.structs.replace(networks.draw(seed), width=32, cold=False)


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method. is deprecated:DeprecationWarning")  # Inductor's imports
@pytest.mark.parametrize("runtime", REAL)
def test_networks_run_for_real(runtime: str) -> None:
    missing = runtimes.get(runtime).available()
    if missing is not None:
        pytest.skip(missing)
    device = open_device("cpu")
    others = [number for number, kind in enumerate(KINDS) if kind not in STAGED]
    others.append(len(KINDS) + KINDS.index("audio"))  # whose turn a network of waves takes
    exported = (PIXELS[0], *others[::2])  # exporting takes long, compiling longer
    for seed in {"compile": exported[:1], "onnxruntime": exported}.get(runtime, (*PIXELS, *others)):
        model = networks.real_model(small(seed), "fp32")
        for batch in (1, 2):
            inputs = networks.real_inputs(small(seed), "fp32", batch=batch)
            out = device.prepare_model(model, inputs, runtime)()
            first = torch.as_tensor(out[0] if isinstance(out, (list, tuple)) else out)
            with torch.inference_mode():
                torch.testing.assert_close(first, model(*inputs), rtol=1e-3, atol=1e-3)
