"""What `latpred --help` says of each verb: the first paragraph of its own help.

The help page needs them without importing what the verbs import; a test holds them against the verbs.
"""

from __future__ import annotations

SUMMARIES = {
    "predict": "Predict the latency of MODEL, with its interval, its regime and its crossover batch.",
    "curve": "Predict the latency of MODEL over a range of batch sizes; see `latpred predict` for what MODEL may be.",
    "explain": (
        "Compare runtimes for MODEL: what each takes, where the time goes, how far it can grow, what to change."
    ),
    "timeline": (
        "Follow host and device through one forward pass of MODEL: every dispatch, every kernel, and the gaps between."
    ),
    "report": (
        "Write one HTML file about MODELS: answer, figures, runtimes, what is free, what to change, "
        "how far to trust it."
    ),
    "generate": "Predict how long MODEL takes to generate text: its first token, each further one, and all of them.",
    "trace": "Walk MODEL without a device: operations, multiply-adds, bytes and launches of one forward pass.",
    "calibrate": (
        "Measure what ops and kernels cost on this machine, and keep it as a profile. Once per machine and device."
    ),
    "check": (
        "Say in half a minute whether a PROFILE of this machine still holds, after a new driver, torch or library."
    ),
    "adapt": "Correct a profile with a few measured models, and say what that bought.",
    "fit": "Fit a profile from samples taken elsewhere, or from a TABLE of published latencies, and keep it.",
    "measure": "Run models on this machine and time them, in rounds, with the repeat noise of the same run.",
    "compare": "Compare a predicted with a measured table: errors, order, crossover and knee, intervals, baselines.",
    "validate": "Measure whole models that no fit has seen, and compare the profile's predictions with them.",
    "evaluate": "Predict every cell of a measurement table made elsewhere, and say how far off that is.",
    "models": "List the models that go by name, or those with TEXT in a name. Any name works with _ for - and - for _.",
    "profiles": "List, show and locate device profiles.",
    "cache": "Show or clear what latpred keeps only to save time.",
    "doctor": "Say what stands between this machine and a prediction, and what to do about it.",
}
