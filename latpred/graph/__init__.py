"""What a model does: ops with counts affine in batch, the schedule a runtime makes of them, and what a kernel's time depends on."""
