""".onnx files as models, and what is wrong with those that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from clidata import document, run
from factories import device, dispatch, profile
from onnx import helper, numpy_helper, parser

import latpred
from latpred.cli import doctor
from latpred.errors import UnknownOpError, UsageError
from latpred.graph.graph import Affine
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.runtimes import graph_store
from latpred.runtimes.lowering import trace_for_runtime
from latpred.runtimes.onnx import onnx_session

EINSUM = helper.make_node("Einsum", ["x"] * 3, ["y"], name="product", equation="bij,bkj,bkl->bil")
PROFILE = profile(device(kind="cpu", asynchronous=False), runtimes={"eager": dispatch(), "onnxruntime": dispatch()})


@pytest.fixture(autouse=True)
def nothing_in_memory() -> None:
    """The same file in another test has the same key."""
    graph_store.forget()


def saved(folder: Path, inputs: dict[str, list[Any]], nodes: list[Any], **changed: Any) -> Path:
    dtype = np.dtype(changed.get("dtype", "float32"))
    kind = helper.np_dtype_to_tensor_dtype(dtype)
    given = [helper.make_tensor_value_info(name, kind, shape) for name, shape in inputs.items()]
    weights = numpy_helper.from_array(np.ones(changed.get("weight", (8, 4)), dtype=dtype), "w")
    graph = helper.make_graph(nodes, "graph", given, [helper.make_tensor_value_info("y", kind, None)], [weights])
    opset = helper.make_opsetid("", changed.get("opset", 20))
    model = helper.make_model(graph, opset_imports=[opset], ir_version=changed.get("ir_version", 9))
    onnx.save(model, str(folder / "net.onnx"), **changed.get("how", {}))
    return folder / "net.onnx"


def parsed(folder: Path, inputs: str, nodes: str, out: str = "float y", rest: str = "", **weights: Any) -> Path:
    """A file that is told in ONNX's own text, and its weights by their shapes."""
    head = '<ir_version: 9, opset_import: ["": 20, "own": 1]>'
    proto = parser.parse_model(f"{head} net ({inputs}) => ({out}) {{ {nodes} }} {rest}")
    arrays = (numpy_helper.from_array(np.ones(shape, np.float32), name) for name, shape in weights.items())
    proto.graph.initializer.extend(arrays)
    onnx.save(proto, str(folder / "net.onnx"))
    return folder / "net.onnx"


def branching(then: str, otherwise: str, dtype: str = "float") -> str:
    """The nodes of a file that takes the first of two branches where the largest input is positive."""
    bodies = {"then_branch": then, "else_branch": otherwise}.items()
    told = ", ".join(f"{name} = {name} () => ({dtype} h) {{ {nodes} }}" for name, nodes in bodies)
    return f"most = ReduceMax <keepdims = 0> (x) some = Cast <to = 9> (most) h = If <{told}> (some)"


def file(folder: Path, batch: Any = "batch", width: Any = 8, **changed: Any) -> Path:
    """A file with one product, both its nodes without a name, and one activation."""
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])]
    return saved(folder, {"x": [batch, width]}, nodes, **changed)


def traced(path: Path | str, **options: Any) -> latpred.ModelGraph:
    return trace_for_runtime(path, runtime="onnxruntime", **options)


@pytest.mark.parametrize("batch", ["batch", -1])
def test_a_file_is_traced_without_pytorch_knowing_it(batch: Any, tmp_path: Path) -> None:
    graph = traced(file(tmp_path, batch))
    assert graph.model == "net.onnx"
    assert [op.name for op in graph.ops] == ["ort::MatMul", "ort::Tanh"]
    assert (graph.macs(5), graph.parameters, graph.input_bytes.at(3)) == (5 * 8 * 4, 32, 3 * 8 * 4)


def test_weights_that_two_nodes_share_are_read_again_on_a_cpu(tmp_path: Path) -> None:
    node = helper.make_node
    nodes = [node("MatMul", ["x", "w"], ["a"]), node("Tanh", ["a"], ["b"]), node("MatMul", ["b", "w"], ["y"])]
    path = saved(tmp_path, {"x": ["batch", 64]}, nodes, weight=(64, 64))
    after = Affine(64 * 64 * 4, 4 * 64 * 4)  # the first product, and the activation
    assert [op.reread_after for op in traced(path, target="cpu").ops] == [None, None, after]
    assert [op.reread_after for op in traced(path, target="cuda").ops] == [None, None, None]


def test_a_changed_file_is_traced_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path)
    first = traced(path)
    with monkeypatch.context() as patch:
        patch.setattr(onnx_session, "watch", lambda *_, **__: pytest.fail("traced again"))
        assert traced(str(path)) == first
        graph_store.forget()
        assert traced(path) == first
    saved(tmp_path, {"x": ["batch", 8]}, [helper.make_node("MatMul", ["x", "w"], ["y"])])
    assert traced(path).ops == first.ops[:1] != first.ops


def test_a_fixed_batch_holds_for_no_other(tmp_path: Path) -> None:
    graph = traced(file(tmp_path, batch=4))
    predictor = Predictor(PROFILE)
    predicted = predictor.predict(graph, 4, runtime="onnxruntime")
    assert graph.macs(4) == 4 * 8 * 4
    assert predicted.latency_ms > 0
    assert "takes batch 4 only" in " ".join(predicted.provenance.caveats)
    with pytest.raises(UsageError, match=r"at batch 4 alone, not at batch 8\. Ask for batch=4, or .* open first dim"):
        predictor.predict(graph, 8, runtime="onnxruntime")
    assert predictor.max_batch(graph, 1e6, runtime="onnxruntime") == 4
    assert predictor.max_batch(graph, predicted.latency_ms / 2, runtime="onnxruntime") == 0


def test_a_product_of_three_tensors_is_estimated(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": ["batch", 4, 8]}, [EINSUM])
    (op,) = traced(path).ops
    assert (op.estimated, op.family) == (True, "other")
    with pytest.raises(UnknownOpError, match="no cost formula knows ort::Einsum, which onnxruntime runs"):
        traced(path, strict=True)


def test_keys_and_values_of_earlier_tokens_are_no_picture(tmp_path: Path) -> None:
    path = saved(tmp_path, {"x": ["n", 12, "past", 64]}, [helper.make_node("Tanh", ["x"], ["y"])])
    with pytest.raises(UsageError, match=r"'x' has open sizes besides the batch \(n x 12 x past x 64\)\. Give inputs="):
        traced(path)


@pytest.mark.parametrize("names", [("n", "tokens"), ("batch", "positions")])
def test_what_is_as_long_as_the_tokens_is_no_batch(names: tuple[str, str], tmp_path: Path) -> None:
    node, (batch, length) = helper.make_node("Add", ["ids", "positions"], ["y"]), names
    path = saved(tmp_path, {"ids": [batch, "tokens"], "positions": [length]}, [node], dtype="int64")
    assert traced(path, seq=7).ops[0].dims["numel"].at(3) == 3 * 7


def test_open_sizes_of_one_name_are_one(tmp_path: Path) -> None:
    """As in a decoder, which is given the states of all tokens of its encoder."""
    inputs = "float[n, tokens, 8] x, int64[n, tokens] ids"
    nodes = "i = Cast <to = 1> (ids) one = Constant <value_ints = [1]> () u = Unsqueeze (i, one) y = MatMul (u, x)"
    path = parsed(tmp_path, inputs, nodes)
    assert (traced(path).macs(2), traced(path).input_size) == (2 * 128 * 8, 128)
    assert traced(path, seq=5).macs(2) == 2 * 5 * 8
    assert traced(parsed(tmp_path, inputs.replace("n, tokens", "3, batch"), nodes)).macs(2) == 3 * 2 * 8


def test_examples_are_told_apart_by_their_names(tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["a", "w"], ["c"]), helper.make_node("Add", ["c", "b"], ["y"])]
    path, long, short = saved(tmp_path, {"a": ["n", "m", "k"], "b": ["n", "m", 4]}, nodes), (2, 6, 8), (2, 6, 4)
    given = {"a": torch.zeros(long), "b": torch.zeros(short)}
    assert traced(path, inputs=given).macs(1) == 6 * 8 * 4
    assert traced(path, inputs=dict(reversed(given.items()))).macs(1) == 6 * 8 * 4
    with pytest.raises(UsageError, match=r"net\.onnx cannot be run"):
        traced(path, inputs={"b": torch.zeros(long), "a": torch.zeros(short)})


@pytest.mark.parametrize(("dtype", "precision"), [("float16", "fp16"), ("float64", "fp64")])
def test_a_file_is_fed_what_it_takes(dtype: str, precision: str, tmp_path: Path) -> None:
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"])]
    path = saved(tmp_path, {"x": ["batch", "width"]}, nodes, dtype=dtype)
    on_cpu, on_cuda = (traced(path, inputs=torch.zeros(2, 8), target=target) for target in ("cpu", "cuda"))
    assert (on_cpu.precision, on_cpu.macs(3)) == (precision, 3 * 8 * 4)
    assert [graph.notes != () for graph in (on_cpu, on_cuda)] == [False, precision == "fp16"]


def test_a_file_in_fp32_is_priced_in_halves_for_a_gpu(tmp_path: Path) -> None:
    path = file(tmp_path)
    single, half = (traced(path, precision=precision, target="cuda") for precision in ("fp32", "fp16"))
    assert (half.precision, half.launches(2), half.macs(2)) == ("fp16", single.launches(2), single.macs(2))
    assert half.bytes(2) * 2 == single.bytes(2)
    assert half.notes == ("onnxruntime's nodes are those of the file in float32, with the bytes of float16",)
    assert traced(path, target="cuda").notes == ()


def halved(folder: Path, nodes: list[Any]) -> tuple[Path, Path]:
    """One graph in float32, and in float16 with its weights beside it."""
    (folder / "half").mkdir()
    how = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    half = saved(folder / "half", {"x": ["batch", 64]}, nodes, weight=(64, 64), dtype="float16", how=how)
    return saved(folder, {"x": ["batch", 64]}, nodes, weight=(64, 64)), half


def test_a_file_in_fp16_runs_on_a_gpu_what_one_in_fp32_does_in_fp16(tmp_path: Path) -> None:
    node = helper.make_node
    gate = [node("Sigmoid", ["a"], ["b"]), node("Mul", ["a", "b"], ["y"])]  # one node, if nothing is cast in it
    single, half = halved(tmp_path, [node("MatMul", ["x", "w"], ["a"]), *gate])
    on_gpu, asked = traced(half, target="cuda"), traced(single, target="cuda", precision="fp16")
    assert [op.name for op in on_gpu.ops] == ["ort::MatMul", "ort::QuickGelu"]
    assert (on_gpu.ops, on_gpu.notes, on_gpu.input_bytes) == (asked.ops, asked.notes, asked.input_bytes)
    assert {op.name for op in traced(half, target="cpu").ops} >= {"ort::Cast"}


def test_functions_of_a_file_in_fp16_are_taken_apart_on_a_gpu(tmp_path: Path) -> None:
    own = (
        '<domain: "own", opset_import: ["": 18]> Own (a) => (d) { b = Cast <to = 10> (a) c = Add (a, b) d = Tanh (c) }'
    )
    path = parsed(tmp_path, "float16[batch, 8] x", "y = own.Own (x)", "float16 y", own)
    assert {(op.name, op.dtype) for op in traced(path, target="cuda").ops} >= {
        ("ort::Add", "float16"),
        ("ort::Tanh", "float16"),
    }


def test_casts_of_a_file_in_fp16_stay_on_a_gpu(tmp_path: Path) -> None:
    node, nodes = helper.make_node, []
    nodes += [node("MatMul", ["x", "w"], ["a"]), node("Cast", ["a"], ["b"], to=onnx.TensorProto.FLOAT)]
    nodes += [node("Softmax", ["b"], ["c"]), node("Cast", ["c"], ["y"], to=onnx.TensorProto.FLOAT16)]
    graph = traced(halved(tmp_path, nodes)[1], target="cuda")
    assert [op.name for op in graph.ops] == ["ort::MatMul", "ort::Cast", "ort::Softmax", "ort::Cast"]
    assert {op.write_bytes.at(3) for op in graph.ops} == {3 * 64 * 2}
    assert "with the bytes of float16" in graph.notes[0]


def test_what_a_loop_runs_counts_in_each_of_its_iterations(tmp_path: Path) -> None:
    ends = "(int64 i, bool on, float[b, 8] state) => (bool still, float[b, 8] next)"
    body = f"step {ends} {{ next = MatMul (state, w) still = Identity (on) }}"
    nodes = f"n = Constant <value_int = 5> () t = Constant <value = bool {{1}}> () y = Loop <body = {body}> (n, t, x)"
    assert traced(parsed(tmp_path, "float[batch, 8] x", nodes, w=(8, 8))).macs(3) == 5 * 3 * 8 * 8


@pytest.mark.parametrize(
    ("changed", "asked", "message"),
    [
        ({"width": "width"}, {}, r"'x' has open sizes besides the batch \(batch x width\)\. Give inputs="),
        ({"width": "width"}, {"seq": 0}, "seq=0 is not a length; give a whole number"),
        ({}, {"inputs": {"z": torch.zeros(2, 8)}}, "takes x; give inputs= with one tensor for each"),
        ({}, {"memory_format": "channels_last"}, "has the layout that it was exported in; leave memory_format out"),
        ({}, {"precision": "fp16"}, "holds a model in fp32; convert the file to predict fp16"),
        ({}, {"runtime": "eager"}, r"which latpred cannot predict in eager\. Ask for runtime='onnxruntime'"),
        ({"opset": 99}, {}, r"uses opset 99 of ai\.onnx, and onnxruntime .* opset_version=\d+, or"),
        ({"ir_version": 99}, {}, "is of IR version 99, newer than onnxruntime"),
    ],
)
def test_what_cannot_run_is_said(changed: dict[str, Any], asked: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=message):
        trace_for_runtime(file(tmp_path, **changed), **({"runtime": "onnxruntime"} | asked))


@pytest.mark.parametrize(
    ("shape", "asked", "said"),
    [
        (["batch", 8], {"seq": 8}, r"changes nothing, since no input has such a size open\. Leave it out"),
        (["batch", 8], {"image": 8}, r"changes nothing, since no input has such a size open\. Leave it out"),
        (["batch", 8], {"inputs": torch.zeros(1, 8), "seq": 8}, "seq=8 changes nothing, since inputs= has its size"),
    ],
)
def test_sizes_that_no_file_takes(shape: Any, asked: dict[str, Any], said: str, tmp_path: Path) -> None:
    store.save(PROFILE)
    path = saved(tmp_path, {"x": shape}, [helper.make_node("Add", ["x", "x"], ["y"])])
    with pytest.raises(UsageError, match=said):
        latpred.predict(path, 1, "onnxruntime", device=PROFILE.name, **asked)


def test_products_of_all_samples_by_all_are_counted_at_each_batch_that_is_asked_for(tmp_path: Path) -> None:
    path = parsed(tmp_path, "float[batch, 16] x", "t = Transpose (x) y = MatMul (x, t)")
    graph = traced(path, batches=[8, 1000])
    assert (graph.macs(8), [*graph.exact]) == (8 * 8 * 16, [8])
    assert "not affine in batch: traced at 8; what is said of any other" in graph.notes[0]
    assert traced(path).macs(3) == 3 * 3 * 16


def test_a_batch_that_only_the_inputs_leave_open_is_one(tmp_path: Path) -> None:
    path = parsed(tmp_path, "float[n, 8] x", "sizes = Constant <value_ints = [1, 2, 4]> () y = Reshape (x, sizes)")
    assert traced(path).only == traced(path, batches=4).only == (1,)


def test_a_loop_over_the_samples_is_counted_at_each_batch_that_is_asked_for(tmp_path: Path) -> None:
    step = "row = Gather (x, i) z = MatMul (row, w) still = Identity (on)"
    body = f"step (int64 i, bool on) => (bool still, float z) {{ {step} }}"
    nodes = (
        f"s = Shape <end = 1> (x) n = Squeeze (s) t = Constant <value = bool {{1}}> () y = Loop <body = {body}> (n, t)"
    )
    graph = traced(parsed(tmp_path, "float[batch, 3, 8] x", nodes, w=(8, 4)), batches=[2, 5])
    assert ([graph.macs(batch) for batch in (2, 5)], graph.only) == ([2 * 3 * 32, 5 * 3 * 32], (2, 5))


def test_what_goes_by_values_is_said(tmp_path: Path) -> None:
    (note,) = traced(parsed(tmp_path, "float[n] x", "y = NonZero (x)", "int64 y")).notes
    assert note.startswith("what NonZero does may depend on values")


def test_weights_that_a_node_holds_count(tmp_path: Path) -> None:
    weights = [helper.make_node("Constant", [], ["v"], value=numpy_helper.from_array(np.ones((8, 4), np.float16)))]
    path = saved(
        tmp_path, {"x": ["batch", 8]}, [*weights, helper.make_node("MatMul", ["x", "v"], ["y"])], dtype="float16"
    )
    proto = onnx.load(str(path))
    proto.graph.ClearField("initializer")
    onnx.save(proto, str(path))
    assert (traced(path).precision, traced(path).parameters) == ("fp16", 32)


def test_functions_that_branches_call_read_what_they_are_given(tmp_path: Path) -> None:
    nodes = branching(*(f"h = own.Product (x, {name})" for name in "wv")) + " y = own.Product (h, u)"
    own = '<domain: "own", opset_import: ["": 20]> Product (a, b) => (c) { c = MatMul (a, b) }'
    path = parsed(tmp_path, "float[n, 8] x", nodes, rest=own, w=(8, 4), v=(8, 64), u=(4, 16))
    assert [op.weight_bytes.at(1) for op in traced(path).ops if op.family == "gemm"] == [4 * 8 * 4, 4 * 4 * 16]


def test_links_to_weights_are_followed(tmp_path: Path) -> None:
    """The cache of a model hub holds files under other names, and links to them."""
    path = file(tmp_path, how={"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0})
    (kept := tmp_path / "kept").mkdir()
    for number, held in enumerate((path, tmp_path / "weights.bin")):
        held.rename(kept / str(number))
        held.symlink_to(kept / str(number))
    assert traced(path).macs(1) == 32
    (inner := tmp_path / "inner").mkdir()
    outside = onnx.load(str(path), load_external_data=False)
    outside.graph.initializer[0].external_data[0].value = "../weights.bin"
    (inner / "net.onnx").write_bytes(outside.SerializeToString())
    with pytest.raises(UsageError, match="escapes model directory"):
        traced(inner / "net.onnx")


def test_a_size_that_an_export_holds_inside_is_asked_for(tmp_path: Path) -> None:
    nodes = "sizes = Constant <value_ints = [-1, 16]> () y = Reshape (x, sizes)"
    path = parsed(tmp_path, "float[n, width] x", nodes)
    with pytest.raises(UsageError, match=r"cannot be run with x 1 x 9: .*If the export holds other sizes inside, give"):
        traced(path, inputs=torch.zeros(1, 9))
    assert traced(path, seq=16).ops


@pytest.mark.parametrize(
    ("dtype", "node", "said"),
    [
        ("bfloat16", "Relu", "a model in bf16, has the operator Relu, for which onnxruntime has no kernel on a CPU"),
        ("float", "own.Relu", "has the operator own:Relu, for which onnxruntime has no kernel"),
    ],
)
def test_what_onnxruntime_has_no_kernel_for_is_named(dtype: str, node: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said):
        traced(parsed(tmp_path, f"{dtype}[1, 8] x", f"y = {node} (x)", f"{dtype} y"))


def test_a_file_that_is_not_whole(tmp_path: Path) -> None:
    how = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    path = file(tmp_path, how=how)
    assert traced(path).macs(1) == 32
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UsageError, match=r"its weights \(among them w\) in weights\.bin, which is not in .*Copy that"):
        traced(path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"net.onnx is no whole ONNX model.*Export or copy it again"):
        traced(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="it holds no graph"):
        traced(path)
    with pytest.raises(UsageError, match=r"There is no file .*other\.onnx\. There are: net\.onnx"):
        traced(tmp_path / "other.onnx")


def test_products_of_bytes_count_as_products(tmp_path: Path) -> None:
    product = "a = QuantizeLinear (x, s, z) b = QLinearMatMul (a, s, z, q, s, z, s, z) y = DequantizeLinear (b, s, z)"
    path = parsed(tmp_path, "float[batch, 8] x", product, s=())
    proto = onnx.load(str(path))
    kinds = {"z": np.zeros((), np.uint8), "q": np.ones((8, 4), np.uint8)}
    proto.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in kinds.items())
    onnx.save(proto, str(path))
    (op,) = (op for op in traced(path).ops if op.name == "ort::QLinearMatMul")
    assert (op.dtype, op.family, op.macs.at(2), op.estimated) == ("uint8", "gemm", 64, False)
    assert "no CUDA kernels for ort::QLinearMatMul" in " ".join(traced(path, target="cuda").notes)


@pytest.mark.parametrize(
    ("node", "named"),
    [("Tan", True), ("Tanh", False), ("Celu", True), ("Elu", False), ("NonMaxSuppression", False)],
)
def test_operators_without_kernels_for_a_gpu_are_named(node: str, named: bool, tmp_path: Path) -> None:
    out, read = ("int64 y", "x, z") if node == "NonMaxSuppression" else ("float y", "x")
    path = parsed(tmp_path, "float[1, 8, 4] x, float[1, 1, 8] z", f"y = {node} ({read})", out)
    assert any(f"no CUDA kernels for ort::{node}:" in note for note in traced(path, target="cuda").notes) == named


@pytest.mark.parametrize(("target", "op_type"), [("cpu", "QLinearMatMul"), ("cuda", "MatMul")])
def test_products_of_quantised_values_are_of_bytes_on_a_cpu_only(target: str, op_type: str, tmp_path: Path) -> None:
    x, w, a = (
        f"{name}q = QuantizeLinear ({name}, s) {made} = DequantizeLinear ({name}q, s)"
        for name, made in (("x", "xd"), ("w", "wd"), ("a", "y"))
    )
    nodes = f"s = Constant <value_float = 0.1> () {x} {w} a = MatMul (xd, wd) {a}"
    path = parsed(tmp_path, "float[batch, 8] x", nodes, w=(8, 4))
    assert op_type in {op.name.removeprefix("ort::") for op in traced(path, target=target).ops}


ROW, PAST, STEPS = torch.zeros(2, 8), torch.zeros(1, 12, 7, 64), torch.zeros(5, 2, 8)
CUSTOM = ("custom", 0)


@pytest.mark.parametrize(
    ("shape", "asked", "elements", "size"),
    [
        (["n", 3, "h", "w"], {}, 3 * 224**2, ("image", 224)),
        (["n", 3, "h", "w"], {"image": 64}, 3 * 64**2, ("image", 64)),
        (["n", 3, "h", "w"], {"inputs": torch.zeros(1, 3, 9, 9)}, 3 * 9**2, CUSTOM),
        (["n", 3, 8, 8], {}, 3 * 8**2, CUSTOM),
        (["n", "c", 8, 8], {}, 3 * 8**2, CUSTOM),
        (["n", 3, 48, "w"], {}, 3 * 48 * 224, ("image", 224)),  # a line of text
        (["n", 3, 48, "w"], {"image": 320}, 3 * 48 * 320, ("image", 320)),
        (["n", "w", 48, 3], {}, 3 * 48 * 224, CUSTOM),
        (["n", "h"], {"seq": 16}, 16, ("seq", 16)),
        *((["n", "h"], {"inputs": given}, 8, CUSTOM) for given in (ROW, {"x": ROW}, lambda n: torch.zeros(n, 8))),
        (["n", 12, "past", 64], {"inputs": PAST}, 12 * 7 * 64, CUSTOM),
        ([5, "batch_size", 8], {}, 5 * 8, CUSTOM),
        *(
            (["steps", "batch_size", 8], {"inputs": given}, 5 * 8, CUSTOM)
            for given in (STEPS, lambda n: torch.zeros(5, n, 8))
        ),
    ],
)
def test_open_sizes_are_guessed_or_given(shape: Any, asked: Any, elements: int, size: Any, tmp_path: Path) -> None:
    graph = traced(saved(tmp_path, {"x": shape}, [helper.make_node("Tanh", ["x"], ["y"])]), **asked)
    assert graph.ops[0].dims["numel"].at(2) == 2 * elements
    assert (graph.input_kind, graph.input_size, graph.only) == (*size, ())


def test_a_file_is_no_pytorch_model(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"an ONNX graph.* can be predicted .* but not run, measured"):
        latpred.trace(str(file(tmp_path)))


def test_the_command_line_predicts_a_file(tmp_path: Path) -> None:
    store.save(PROFILE)
    asked = ["predict", str(file(tmp_path)), "--device", PROFILE.name, "--batch", "1,8"]
    done = run(*asked, "--runtime", "onnxruntime")
    assert done.exit_code == 0, done.output
    assert "net.onnx" in done.output
    assert [one["runtime"] for one in document("explain", *asked[1:4])["runtimes"]] == ["onnxruntime"]
    strange = saved(tmp_path, {"x": ["batch", 4, 8]}, [EINSUM])
    strict = run("predict", strange, *asked[2:], "--runtime", "onnxruntime", "--strict")
    assert (strict.exit_code, "no cost formula knows ort::Einsum" in strict.output) == (1, True)
    wrong = run(*asked)
    assert wrong.exit_code == 2
    assert "--runtime onnxruntime" in wrong.output


@pytest.mark.parametrize("both", [True, False])
def test_doctor_tells_of_two_that_overwrite_each_other(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"onnxruntime": "1.31.1"} | ({"onnxruntime-gpu": "1.30.0"} if both else {})
    monkeypatch.setattr(onnx_session, "installed", lambda: versions)
    finding = next(one for one in doctor.examine() if one.topic == "onnxruntime")
    assert finding.verdict == ("note" if both else "ok")
    repair = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    assert finding.advice.startswith(repair) == both
