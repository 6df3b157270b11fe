"""ONNX Runtime: sessions, exported and `.onnx` models, the nodes that run, and their cost formulas."""
