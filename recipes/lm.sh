#!/usr/bin/env bash
# The language-model comparison on one GPU: recipes/lm.sh CORPUS OUT [prepare|train|profile|large]...
# CORPUS is what recipes/lm_corpus.py wrote, with the folder requests of `ckda lm eval --build` in it. Each part can be stopped and
# called again; LIMIT (seconds, default 500) ends a call of `train` early, and the next one goes on.
set -euo pipefail
corpus=$1 out=$2
shift 2
here=$(cd "$(dirname "$0")/.." && pwd)
export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
for part in "${@:-prepare train profile large}"; do
  for step in $part; do
    case $step in
      prepare) python -m ckda.cli lm prepare "$corpus"/corpus-*.jsonl.xz --tokenizer "$corpus/tokenizer.json" --held-out 0.03 --out "$out/tokens" ;;
      train) python "$here/recipes/lm_comparison.py" train --data "$out/tokens" --requests "$corpus/requests" \
        --time-limit "${LIMIT:-500}" --out "$out/comparison" ;;
      profile) python "$here/recipes/lm_comparison.py" profile --data "$out/tokens" --out "$out/comparison" ;;
      large) python "$here/recipes/lm_comparison.py" large --text "$corpus/corpus-00.jsonl.xz" --out "$out/comparison" ;;
      *) echo "$step: there are prepare, train, profile, large" >&2; exit 2 ;;
    esac
  done
done
