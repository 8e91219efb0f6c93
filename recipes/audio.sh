#!/usr/bin/env bash
# Periodic waveform continuation (app:waveform_continuation_details) on one GPU, three seeds a run as one program.
#
#   recipes/audio.sh OUT              the paper's seven arms by the paper's protocol
#   recipes/audio.sh OUT candidates   Complex KDA by every recipe: what it takes to keep the beat to 2048
#
# The models are tiny and each process waits for its own launches, so a few share the device (AT_ONCE, default 4).
# After LIMIT seconds (default 480) whatever still trains leaves a checkpoint in OUT/runs; the same command goes on from there.
set -u
out=${1:?folder for the results}
what=${2:-plain}
python=${PYTHON:-python3}
common=(--seeds "${SEEDS:-3}" --device "${DEVICE:-cuda}" --out "$out")
export PYTHONPATH=. OMP_NUM_THREADS=2
case $what in
  plain) runs=("gru paper" "deltaproduct2 paper" "ckda paper" "kda paper" "kda-beta2 paper" "kda-signed paper" "transformer paper") ;;
  candidates)
    runs=()
    tail=schedule=tail
    for recipe in even steady+init=clock init=clock steady $tail $tail+penalty=closure-{late,turn,turns} penalty=closure; do
      runs+=("ckda $recipe")
    done
    ;;
  *) echo "recipes/audio.sh: '$what' is neither 'plain' nor 'candidates'" >&2; exit 2 ;;
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
