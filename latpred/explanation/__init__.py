"""Why a prediction is what it is: runtimes side by side, advice, headroom and text generation."""
