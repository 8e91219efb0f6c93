#!/usr/bin/env bash
# The language-model comparison on one GPU.
#
#   recipes/lm.sh CORPUS OUT                 everything
#   recipes/lm.sh CORPUS OUT prepare train   parts of it: prepare, train, profile, large
#
# CORPUS is what recipes/lm_corpus.py wrote, with the folder requests of `ckda lm eval --build` in it. After LIMIT seconds (default
# 500) `train` leaves a checkpoint; the same command goes on from there.
set -euo pipefail
corpus=${1:?folder of the corpus}
out=${2:?folder for the results}
shift 2
parts=("$@")
if [ ${#parts[@]} -eq 0 ]; then parts=(prepare train profile large); fi
python=${PYTHON:-python3}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}"
for part in "${parts[@]}"; do
  case $part in
    prepare)
      "$python" -m ckda.cli lm prepare "$corpus"/corpus-*.jsonl.xz --tokenizer "$corpus/tokenizer.json" --held-out 0.03 --out "$out/tokens"
      ;;
    train)
      "$python" recipes/lm_comparison.py train --data "$out/tokens" --requests "$corpus/requests" --time-limit "${LIMIT:-500}" --out "$out"
      ;;
    profile) "$python" recipes/lm_comparison.py profile --data "$out/tokens" --out "$out" ;;
    large) "$python" recipes/lm_comparison.py large --text "$corpus/corpus-00.jsonl.xz" --out "$out" ;;
    *)
      echo "$part: there are prepare, train, profile, large" >&2
      exit 2
      ;;
  esac
done
