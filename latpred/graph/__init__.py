"""What a model does: ops with counts affine in batch, their schedule in a runtime, and the features of kernels."""
