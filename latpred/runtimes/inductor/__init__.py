"""torch.compile: what Inductor makes of a model, found without compiling it, and estimates where it cannot be run."""
