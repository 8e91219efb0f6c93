#!/usr/bin/env bash
# Periodic waveform continuation (app:waveform_continuation_details) on one GPU, three seeds a run as one program (fan: eight).
#
#   recipes/audio.sh OUT              the paper's seven arms by the paper's protocol: 7 minutes
#   recipes/audio.sh OUT candidates   Complex KDA by every recipe: what it takes to keep the beat to 2048; about 4 minutes
#   recipes/audio.sh OUT fan          Complex KDA with a fan of clocks at the start and nothing that names the period in the loss: the
#                                     paper's protocol, and learning rates that go to zero; eight seeds; 1 to 2 minutes a recipe
#   recipes/audio.sh OUT ungated      DeltaProduct_2 without a forget gate, from reflections and from the standard start: 5 minutes
#
# Device time is of one H200. Measured: the arms three seeds at once, thirteen runs side by side, the slowest (GRU) in 419 s (4d131a7);
# DeltaProduct_2 in 272 s (96cceb1); even with eight seeds in 40 s (4971e40), since when silence is read by powers of one matrix.
# Estimated from these, not measured: candidates and fan, and deltaproduct2-gated in the first line.
#
# The models are tiny and each process waits for its own launches, so a few share the device (AT_ONCE, default 4).
# After LIMIT seconds (default 480) whatever still trains leaves a checkpoint in OUT/runs; the same command goes on from there.
set -u
out=${1:?folder for the results}
what=${2:-plain}
python=${PYTHON:-python3}
seeds=3
[[ $what == fan ]] && seeds=8
common=(--seeds "${SEEDS:-$seeds}" --device "${DEVICE:-cuda}" --out "$out")
export PYTHONPATH=. OMP_NUM_THREADS=2
case $what in
  plain) runs=("gru paper" "deltaproduct2-gated paper" "ckda paper" "kda paper" "kda-beta2 paper" "kda-signed paper" "transformer paper") ;;
  candidates)
    runs=()
    tail=schedule=tail
    for recipe in even steady+init=clock init=clock steady $tail $tail+penalty=closure-{late,turn,turns} penalty=closure; do
      runs+=("ckda $recipe")
    done
    ;;
  fan) runs=("ckda init=fan" "ckda init=fan+schedule=tail") ;;
  ungated) runs=("deltaproduct2 paper" "deltaproduct2-standard paper") ;;
  *) echo "recipes/audio.sh: '$what' is none of plain, candidates, fan, ungated" >&2; exit 2 ;;
esac
deadline=$(($(date +%s) + ${LIMIT:-480}))
one() { # arm recipe: train it, and stop at the deadline with a checkpoint
  local left=$((deadline - $(date +%s)))
  ((left > 5)) || { echo "no time left for $1 $2"; return; }
  timeout -s INT "$left" "$python" -m ckda.cli audio --mixer "$1" --recipe "$2" "${common[@]}" >/dev/null
  local status=$?
  echo "$(date +%T) $1 $2: exit $status"
}
for run in "${runs[@]}"; do
  while (($(jobs -rp | wc -l) >= ${AT_ONCE:-4})); do wait -n; done
  one $run &
done
wait
finished=()
for run in "${runs[@]}"; do
  read -r arm recipe <<<"$run"
  name=$arm; [[ $recipe == paper ]] || name="$arm+$recipe"
  [[ -f $out/runs/$name.json && -f $out/runs/$name.pt ]] && finished+=("$run")
done
arms=$(printf '%s\n' "${finished[@]}" | cut -d' ' -f1 | sort -u | paste -sd,)
recipes=$(printf '%s\n' "${finished[@]}" | cut -d' ' -f2 | sort -u | paste -sd,)
"$python" -m ckda.cli audio --mixer "$arms" --recipe "$recipes" "${common[@]}"
