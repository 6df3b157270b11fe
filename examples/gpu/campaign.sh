#!/usr/bin/env bash
# Calibrate a GPU, measure the studies, and hold one against the other: one step a call, each at most ten minutes.
#
#     examples/gpu/campaign.sh STEP
#         # walk, check, calibrate, heldout, core, launches, more, compilers, generate, again or judge
#     DEVICE=simulated BUDGET=20s examples/gpu/campaign.sh core      # a dry run, on any machine
#
# Everything is kept under $RUNS (./campaign); a step that was cut off goes on where it was when it is called again.
set -euo pipefail

device="${DEVICE:-cuda:0}"
runs="${RUNS:-campaign}"
latpred="${LATPRED:-latpred}"
python="${PYTHON:-$(command -v python || echo python3)}"
name="${PROFILE:-${device//:/-}}"
precisions="${PRECISIONS:-fp16 fp32}" # the first is measured most
here="$(dirname "$0")"

export LATPRED_HOME="$runs/home"
mkdir -p "$LATPRED_HOME" "$runs/said"

say() {
    echo "+ $*" >&2
    "$@"
}

calibrate() {
    local given=()
    for one in $precisions; do given+=(--precision "$one"); done
    say $latpred calibrate --device "$device" "${given[@]}" "$@"
}

measure() { # SUITE STAGE...
    local suite="$1" given=()
    shift
    for one in ${STAGES:-$@}; do given+=(--stage "$one"); done
    say $latpred measure --suite "$suite" --device "$device" --record "$runs/$suite" "${given[@]}" --budget "${BUDGET:-9m}" |
        tee -i "$runs/said/$suite-measured.txt"
}

step() { # NAME; one function, so that nobody who edits this file changes a step under way
    case "${1:-}" in
    walk) # no GPU needed: what the runtimes run, found out beforehand with the same versions of everything
        say $python "$here/walks.py" --seconds "${BUDGET_S:-3600}"
        ;;
    check) # does every part work here at all? two models, once in every runtime
        say $latpred doctor | tee -i "$runs/said/doctor.txt"
        BUDGET="${BUDGET:-3m}" measure check
        [ ! -e "$runs/check/table.csv" ] || $python - "$runs/check/table.csv" <<'TABLE' | tee -i "$runs/said/check.txt"
import sys, pandas
shown = "model runtime protocol latency_s spread_s n overhead_s compute_s launches x_kernels x_sm_mhz".split()
print(pandas.read_csv(sys.argv[1]).filter(items=shown).to_string(index=False))
TABLE
        ;;
    calibrate) # five minutes of measuring, all runtimes that can be had
        calibrate --runtimes "${RUNTIMES:-all}" --name "$name" --budget "${BUDGET:-5m}" | tee -i "$runs/said/calibration.txt"
        ;;
    core) # what matters most: 12 models, batches 1, 4, 16 and 64, fp16, eager, CUDA graphs and TorchScript
        measure paper core again
        ;;
    heldout) # the same of models that are never used for a fit or a choice
        measure heldout core again
        ;;
    launches) # what a profiler counts, in processes in which nothing is timed: it slows whatever is launched after it
        for suite in heldout paper; do BUDGET="${BUDGET:-4m}" measure "$suite" launches; done
        ;;
    more) # everything else, in the order of its worth, for as many calls as there is time
        measure paper
        ;;
    compilers) # what takes long to compile, where five minutes were too few for it; measures nothing else again
        calibrate --runtimes "${RUNTIMES:-compile,compile-reduce-overhead}" --name "$name" --budget "${BUDGET:-4m}" |
            tee -i "$runs/said/compilers.txt"
        ;;
    again) # a second profile: how far do two calibrations agree?
        calibrate --runtimes eager --name "$name-again" --budget "${BUDGET:-4m}" | tee -i "$runs/said/again.txt"
        ;;
    generate) # GPT-2 writes 16 tokens, predicted beside measured
        say $latpred generate gpt2 --prompt 128 --new-tokens 16 --batch "${BATCH:-1-64:2x}" --device "$name" \
            --precision "${PRECISION:-fp16}" --measure --csv -o "$runs/generation.csv"
        ;;
    judge) # needs no GPU: reports of both recordings as text and JSON, and the paper's findings as tables and figures
        for suite in heldout paper; do
            [ -e "$runs/$suite/recording.json" ] || continue
            for form in txt json; do
                say $latpred validate --device "$name" --replay "$runs/$suite" -o "$runs/said/$suite.$form" || [ $? = 1 ] # 1: a target was missed
            done
        done
        second=()
        [ ! -e "$LATPRED_HOME/profiles/$name-again.json" ] || second=(--again "$name-again")
        say $python "$here/findings.py" --device "$name" "${second[@]}" -o "$runs/said" "$runs/paper" "$runs/heldout" |
            tee -i "$runs/said/findings.txt"
        ;;
    *)
        sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
        exit 2
        ;;
    esac
}

step "$@"
exit
