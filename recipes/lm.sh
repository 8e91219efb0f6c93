#!/usr/bin/env bash
# The language models on one GPU: our own ladder by units, the study of factors, tracking inside text, throughput.
#
#   recipes/lm.sh PACKED OUT                    the ladder: unpack, sweep, collect, ladder, collect, fit
#   recipes/lm.sh PACKED OUT unpack factors     parts of it, in the order given
#
# PACKED is the folder `packed` of recipes/lm_corpus.py. After LIMIT seconds (default 540) a part of units begins none that would end
# later, and leaves its record in OUT/PART; the same command goes on, also on another machine: HAVE names folders of records that
# are known already. Where a part leaves units, only `collect` is still done, and the status is 3. `collect` merges the records in
# HAVE; the learning rates and batches of the other studies are those of the sweep that lies there, else the sizes' own; the base of
# the factors is the ladder's units of the same budgets.
# ONLY and BUDGETS are --only and --budgets. `ckda lm ladder --study ladder --plan` prints the device minutes.
set -uo pipefail
packed=${1:?folder of the packed corpus}
out=${2:?folder for the results}
shift 2
parts=("$@")
if [ ${#parts[@]} -eq 0 ]; then parts=(unpack sweep collect ladder collect fit); fi
python=${PYTHON:-python3}
tokens=${TOKENS:-runs/lm/tokens}
have=${HAVE:-results/lm}
export PYTHONPATH=".${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1

left() { # of LIMIT seconds of this script
  local limit=${LIMIT:-540}
  echo $((SECONDS < limit ? limit - SECONDS : 0))
}

units() { # the units of a study, in the time that is left
  local settings=()
  if [ "$1" != sweep ] && [ -f "$have/sweep/units.json" ]; then settings=(--settings "$have/sweep/units.json"); fi
  "$python" -m ckda.cli lm ladder --study "$1" --data "$tokens" --out "$out/$1" --have "$have/$1" "$have/ladder" \
    --time-limit "$(left)" "${settings[@]}" ${ONLY:+--only "$ONLY"} ${BUDGETS:+--budgets "$BUDGETS"}
}

status=0
for part in "${parts[@]}"; do
  if [ $status -ne 0 ] && [ "$part" != collect ]; then
    echo "$part: left for later, for an earlier part has units left" >&2
    continue
  fi
  case $part in
    unpack) "$python" recipes/lm_corpus.py --unpack "$packed" --out "$tokens" ;;
    sweep | factors | ladder | tracking) units "$part" ;;
    throughput) "$python" recipes/lm_comparison.py throughput --data "$tokens" --out "$out" ;;
    large) "$python" recipes/lm_comparison.py large --data "$tokens" --out "$out" ;;
    comparison) "$python" recipes/lm_comparison.py train --data "$tokens" --time-limit "$(left)" --out "$out" ;;
    collect)
      for name in sweep ladder factors tracking; do
        if compgen -G "$out/$name/units-*.json" > /dev/null; then
          base=() # the factors are compared with the ladder's units of the same size and budgets
          if [ "$name" = factors ] && [ -f "$have/ladder/units.json" ]; then base=("$have/ladder/units.json"); fi
          "$python" -m ckda.cli lm ladder --collect "$out/$name" "${base[@]}" --out "$have/$name" || exit $?
        fi
      done
      ;;
    fit)
      "$python" -m ckda.cli scaling fit --data "$have/ladder/cells.csv" --offset none --hold-out 47M/120MT --baseline kda \
        --out "$have/ladder/scaling"
      ;;
    *)
      echo "$part: there are unpack, sweep, factors, ladder, tracking, throughput, large, comparison, collect, fit" >&2
      exit 2
      ;;
  esac
  code=$?
  if [ $code -ne 0 ] && [ $code -ne 3 ]; then exit $code; fi
  if [ $code -ne 0 ]; then status=$code; fi
done
exit $status
