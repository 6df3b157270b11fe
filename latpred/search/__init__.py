"""Predictions for searches; `latpred` itself exports all of it but the published spaces.

`many` predicts a table of candidates (`predict_many`), with `workers` and `resume`; `ranking` orders it (`rank`) and
compares orders (`agreement`). `budget` holds a candidate against a limit (`LatencyBudget`). `choices` and `supernet`
put graphs of architectures together (`Choice`, `Supernet`), of which `option_table` makes latencies that add up
(`latency_table`) and `spaces` has NAS-Bench-201, FBNet and once-for-all.
"""
