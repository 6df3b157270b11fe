#!/usr/bin/env bash
# Calibrate a GPU, measure the studies, and hold one against the other: one step a call, each at most ten minutes.
#
#     examples/gpu/campaign.sh STEP          # check, calibrate, core, heldout, more, generate or judge
#     DEVICE=simulated BUDGET=20s examples/gpu/campaign.sh core      # a dry run, on any machine
#
# Everything is kept under $RUNS (./campaign); a step that was cut off goes on where it was when it is called again.
set -euo pipefail

device="${DEVICE:-cuda:0}"
runs="${RUNS:-campaign}"
latpred="${LATPRED:-latpred}"
name="${PROFILE:-${device//:/-}}"

export LATPRED_HOME="$runs/home"
mkdir -p "$LATPRED_HOME" "$runs/said"

say() {
    echo "+ $*" >&2
    "$@"
}

case "${1:-}" in
check) # a minute: does every part work here at all?
    say $latpred doctor | tee "$runs/said/doctor.txt"
    say $latpred measure --suite paper --device "$device" --record "$runs/try" --stage core --budget "${BUDGET:-45s}"
    ;;
calibrate) # five minutes of measuring, all runtimes that can be had
    say $latpred calibrate --device "$device" --runtimes all --name "$name" --budget "${BUDGET:-5m}" |
        tee "$runs/said/calibration.txt"
    ;;
core) # what matters most: 12 models, batches 1, 4, 16 and 64, fp16, eager, CUDA graphs and TorchScript
    say $latpred measure --suite paper --device "$device" --record "$runs/paper" --stage core --stage again \
        --budget "${BUDGET:-9m}"
    ;;
heldout) # models that are never used for a fit or a choice
    say $latpred measure --suite heldout --device "$device" --record "$runs/heldout" --budget "${BUDGET:-9m}"
    ;;
more) # everything else, in the order of its worth, for as many calls as there is time
    say $latpred measure --suite paper --device "$device" --record "$runs/paper" --budget "${BUDGET:-9m}"
    ;;
generate) # GPT-2 writes 16 tokens; a simulated device cannot
    say $latpred generate gpt2 --prompt 128 --new-tokens 16 --batch "${BATCH:-1-64:2x}" --device "$device" \
        --precision "${PRECISION:-fp16}" --measure --csv -o "$runs/generation.csv"
    ;;
judge) # needs no GPU: reports of both recordings, as text and JSON
    for suite in heldout paper; do
        [ -e "$runs/$suite/recording.json" ] || continue
        for form in txt json; do
            say $latpred validate --device "$name" --replay "$runs/$suite" -o "$runs/said/$suite.$form" || true
        done
    done
    ;;
*)
    sed -n '2,7s/^# \{0,1\}//p' "$0" >&2
    exit 2
    ;;
esac
