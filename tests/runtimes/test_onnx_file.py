""".onnx files as models, and what is wrong with those that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from click.testing import CliRunner
from factories import device, dispatch, profile
from onnx import TensorProto, helper, numpy_helper

import latpred
from latpred.cli import main
from latpred.errors import MissingPackageError, UsageError
from latpred.prediction.predictor import Predictor
from latpred.profile import store
from latpred.runtimes import graph_store, lowering
from latpred.runtimes.onnx import onnx_session


@pytest.fixture(autouse=True)
def nothing_in_memory() -> None:
    """The same file in another test has the same key."""
    graph_store.forget()


def file(folder: Path, batch: Any = "batch", width: Any = 8, **changed: Any) -> Path:
    """A file with one product, one node without a name, and one activation."""
    import numpy as np

    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, width])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    weights = numpy_helper.from_array(np.ones((8, 4), dtype=np.float32), "w")
    nodes = [helper.make_node("MatMul", ["x", "w"], ["a"]), helper.make_node("Tanh", ["a"], ["y"])]
    graph = helper.make_graph(nodes, "graph", [x], [y], [weights])
    opset = helper.make_opsetid("", changed.get("opset", 20))
    model = helper.make_model(graph, opset_imports=[opset], ir_version=changed.get("ir_version", 9))
    path = folder / "net.onnx"
    onnx.save(model, str(path), **changed.get("how", {}))
    return path


def walk(path: Path | str, **options: Any) -> latpred.ModelGraph:
    return lowering.trace_for_runtime(path, runtime="onnxruntime", **options)


def test_a_file_is_walked_without_pytorch_knowing_it(tmp_path: Path) -> None:
    graph = walk(file(tmp_path))
    assert graph.model == "net.onnx"
    assert [op.name for op in graph.ops] == ["ort::MatMul", "ort::Tanh"]
    assert graph.macs(5) == 5 * 8 * 4
    assert graph.parameters == 32
    assert graph.input_bytes.at(3) == 3 * 8 * 4


def test_a_changed_file_is_walked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path)
    first = walk(path)
    monkeypatch.setattr(onnx_session, "watch", lambda *_, **__: pytest.fail("walked again"))
    assert walk(str(path)) == first
    graph_store.forget()
    assert walk(path) == first
    monkeypatch.undo()
    monkeypatch.setenv("LATPRED_HOME", str(tmp_path))
    file(tmp_path, width=8, opset=19)
    assert walk(path).macs(1) == first.macs(1)


def test_a_fixed_batch_holds_for_no_other(tmp_path: Path) -> None:
    graph = walk(file(tmp_path, batch=4))
    assert graph.macs(4) == 4 * 8 * 4
    predictor = Predictor(profile(device(kind="cpu", asynchronous=False), runtimes={"onnxruntime": dispatch()}))
    predicted = predictor.predict(graph, 4, runtime="onnxruntime")
    assert predicted.latency_ms > 0
    assert "takes batch 4 only" in " ".join(predicted.setting.provenance.caveats)
    with pytest.raises(UsageError, match=r"net.onnx takes batch 4 and no other, so batch 8 .* open first dimension"):
        predictor.predict(graph, 8, runtime="onnxruntime")
    assert predictor.max_batch(graph, 1e6, runtime="onnxruntime") == 4
    assert predictor.max_batch(graph, predicted.latency_ms / 2, runtime="onnxruntime") == 0


def test_a_size_of_minus_one_is_open(tmp_path: Path) -> None:
    graph = walk(file(tmp_path, batch=-1))
    assert graph.macs(5) == 5 * 8 * 4


def test_a_product_of_dimensions_without_names_is_estimated(tmp_path: Path) -> None:
    path = tmp_path / "einsum.onnx"
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4, 8])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node("Einsum", ["x", "x"], ["y"], name="product", equation="...ij,...kj->...ik")
    made = helper.make_graph([node], "graph", [x], [y])
    onnx.save(helper.make_model(made, opset_imports=[helper.make_opsetid("", 20)], ir_version=9), str(path))
    (op,) = walk(path).ops
    assert op.estimated
    assert op.family == "other"


def test_open_sizes_are_given_or_asked_for(tmp_path: Path) -> None:
    x = torch.zeros(2, 8)
    assert walk(file(tmp_path, width="width"), inputs=x).macs(3) == 3 * 8 * 4
    assert walk(file(tmp_path, width="width"), inputs={"x": x}).macs(3) == 3 * 8 * 4
    assert walk(file(tmp_path, width="width"), seq=8).macs(3) == 3 * 8 * 4
    with pytest.raises(UsageError, match=r"'x' has open sizes besides the batch \(batch x width\)\. Give inputs="):
        walk(file(tmp_path, width="width"))
    with pytest.raises(UsageError, match="takes x; give inputs= with one tensor for each"):
        walk(file(tmp_path), inputs={"z": x})


def test_a_truncated_file(tmp_path: Path) -> None:
    path = file(tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UsageError, match=r"net.onnx is no whole ONNX model.*Export or copy it again"):
        walk(path)
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="it holds no graph"):
        walk(path)


def test_a_newer_opset(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"uses opset 99 of ai\.onnx, and onnxruntime .* opset_version=\d+, or"):
        walk(file(tmp_path, opset=99))


def test_a_newer_ir_version(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is of IR version 99, newer than onnxruntime"):
        walk(file(tmp_path, ir_version=99))


def test_missing_external_weights(tmp_path: Path) -> None:
    how = {"save_as_external_data": True, "location": "weights.bin", "size_threshold": 0}
    path = file(tmp_path, how=how)
    assert walk(path).macs(1) == 32
    (tmp_path / "weights.bin").unlink()
    with pytest.raises(UsageError, match=r"its weights \(among them w\) in weights\.bin, which is not in .*Copy that"):
        walk(path)


def test_a_missing_file_names_its_neighbours(tmp_path: Path) -> None:
    file(tmp_path)
    with pytest.raises(UsageError, match=r"There is no file .*other\.onnx\. There are: net\.onnx"):
        walk(tmp_path / "other.onnx")


def test_other_runtimes_and_precisions(tmp_path: Path) -> None:
    path = file(tmp_path)
    with pytest.raises(UsageError, match=r"is an ONNX graph, which eager cannot run\. Ask for runtime='onnxruntime'"):
        lowering.trace_for_runtime(path)
    with pytest.raises(UsageError, match="is an ONNX graph, not a PyTorch model"):
        latpred.trace(str(path))
    with pytest.raises(UsageError, match="holds a model in fp32; convert the file to predict fp16"):
        walk(path, precision="fp16")


def test_without_onnxruntime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = file(tmp_path)
    monkeypatch.setattr(onnx_session, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"not installed; run: pip install 'latpred\[onnx\]'"):
        walk(path)


def test_the_command_line_predicts_a_file(tmp_path: Path) -> None:
    costs = {"eager": dispatch(), "onnxruntime": dispatch()}
    made = profile(device(kind="cpu", asynchronous=False), runtimes=costs)
    store.save(made)
    path = str(file(tmp_path))
    asked = ["predict", path, "--device", made.name, "--batch", "1,8"]
    done = CliRunner().invoke(main, [*asked, "--runtime", "onnxruntime"])
    assert done.exit_code == 0, done.output
    assert "net.onnx" in done.output
    wrong = CliRunner().invoke(main, asked)
    assert wrong.exit_code == 2
    assert "--runtime onnxruntime" in wrong.output


@pytest.mark.parametrize("both", [True, False])
def test_doctor_tells_of_two_that_overwrite_each_other(both: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from latpred import doctor

    found = {"onnxruntime": "1.31.1"} | ({"onnxruntime-gpu": "1.30.0"} if both else {})
    monkeypatch.setattr(onnx_session, "installed", lambda: found)
    finding = next(one for one in doctor.examine() if one.topic == "onnxruntime")
    assert finding.verdict == ("note" if both else "ok")
    repair = "pip uninstall -y onnxruntime onnxruntime-gpu && pip install onnxruntime-gpu"
    assert finding.advice.startswith(repair) == both
