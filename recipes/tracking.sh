#!/usr/bin/env bash
# State tracking (sec. 5.1, app:exp_state_tracking) on one GPU.
#
#   recipes/tracking.sh OUT            every piece below, in this order, until LIMIT seconds (default 480) are over
#   recipes/tracking.sh OUT PIECE ...  these pieces; ranges:S4, baselines:A5, counts:S3 and so on are one group of a piece
#
# Device time is of one H200, training and compiling, tests beyond 512 letters not counted. A run of 60,000 updates and three seeds
# takes 60 to 90 s where eight share the device (b785acd). What was not measured says so; the commit is that of the measurement.
#
#   bench     milliseconds an update, one seed against three, one run against eight side by side; not measured
#   timing    S3, Complex KDA, 1000 updates: seconds to perfect accuracy at the training length; 16 to 21 s (30fcceb, b785acd)
#   theory    A5 from the paper's construction, three seeds, with the penalty on relations, finished, without, and with the begin
#             token's key as in the authors' code; 31 s with the penalty, 8 s to finish (8468673), 14 s without (30fcceb)
#   closure   S3 by the closure penalty, that on relations and what they are compared with, three seeds; 55 s the four penalties side
#             by side (a28d1d5), here one after the other: not measured
#   ranges    S3, S4 and A5, four range settings, three seeds, the paper's 60,000 updates, momentum cycled: fig:group_word_problems;
#             12 runs, four side by side: 4 to 6 minutes a group; A5 and Complex KDA on S3, five side by side, 382 s, 170 of them
#             beside tests of the kernels (b038f73)
#   momentum  not among the default: S4, 24 seeds, and S3 with beta to 2, 10 seeds, with cycled and with constant momentum; about
#             25 minutes, by 22 s a seed: LIMIT=590 a few times. The constant ones in pieces of their own:
#   s4        S4 with constant momentum, seeds 10 to 23 in two halves (0 to 9 are in results/): 5 minutes
#   beta2     S3 with beta to 2, seeds 3 to 9 with either momentum (0 to 2 are in results/): 5 minutes
#   rate      S3 with beta to 2 by the Muon rate of the paper's text (0.005), seeds 0 to 9; not run so far: 3 to 8 minutes, by 50 s
#             for three seeds (daf45dc) and 332 s for seven beside other runs (d5b8f30)
#   baselines DeltaProduct_2 as published (on A5 without SiLU on the keys, as the authors' driver has it), a GRU, a Transformer,
#             Complex KDA with SiLU on the keys and on q, k, v: S3, S4 and A5, three seeds, 60,000 updates:
#             fig:group_word_problems_baselines; 15 runs, 5 to 8 minutes a group, an estimate; not run so far
#   counts    how many of 24 seeds find a group: A5 and S4 by orthogonal (190 s each, by 96 s for 12) and by wide (250 and 136 s
#             beside other programs), made nearly exact by polish (80 and 52 s); S3 by exact in 2000 and 8000 updates (65 s)
#             and by exact+heads=16x4, then settle (not measured on a GPU; 27 to 34 minutes of a CPU core)
#   horizon   at which length ten kinds of models go wrong, predicted and measured; seven are trained here, 108 s by four programs side
#             by side (d8632c7); S4 by the paper's protocol and the later check are the weights in results/tracking, seeds 10 to 16
#             with constant momentum those of the piece s4 where it was run. Prediction and test are the CPU's: 10 minutes of one
#             core for the seven models of the later check
#   starts    no training: the gates and learning rates of the two starts, fig:initialization
#   weights   no training: the best seeds of counts and ranges, one file each (under 1 MB), into OUT/weights
#   mixers    all mixers on S3, one seed, 10,000 updates: beside fig:group_word_problems_baselines; 91 s for nine side by side
#             (461af85), 102 s for seven (47e9d17), all 31: not measured
#   regular   parity, even pairs, cycle navigation, modular arithmetic, brackets, S5, traces, recall: five arms, five seeds; 5 to 7
#             minutes, by 64 s for arithmetic of three arms, 18 s for three small tasks and 71 s for the eight of S5 (3aeda0d, 7fed5ff)
#   silu      the same with SiLU on the keys; not measured
#   screen    S4: what might find its representation, six seeds each, 20,000 smaller updates; not measured (with four seeds and 5000
#             updates 136 s, 7e519ba)
#   search    S4: 24 seeds by init=orthogonal-quarter, which the screening found, the best three go on, with the penalty on relations
#             (37 s, 548bfc1), finished (CPU: four to seven minutes a seed), and without (not measured)
#   six       the same with six seeds and all kept; 58, 14 and 20 s (8468673)
#   a5        A5 from random keys: 12 seeds from near orthogonal transitions, 24 with gates and betas spread; S4 by the first; 96, 123
#             and 211 s beside one another (7003f98)
#   figures   no training: figures, tables and findings from the folders of the other pieces, into OUT/figures
#
# Each piece has its own folder OUT/PIECE. One that runs into the limit leaves checkpoints there; the same command goes on from
# them and skips what is done. Figures of several pieces: ckda track --collect OUT/ranges OUT/theory --out FOLDER
set -u
out=${1:?folder for the results}
shift
pieces=("$@")
((${#pieces[@]})) || pieces=(bench timing theory closure ranges mixers screen search six a5)
python=${PYTHON:-python3}
export PYTHONPATH=. OMP_NUM_THREADS=4
deadline=$(($(date +%s) + ${LIMIT:-480}))
track() { # options of `ckda track`; half=NAME in front: seeds of one run that have a folder of their own
  local left=$((deadline - $(date +%s)))
  ((left > 5)) || { echo "no time left for: $*"; return 3; }
  "$python" -m ckda.cli track "$@" --device "${DEVICE:-cuda}" --out "$out/$piece${half:+/$half}" --time-limit "$left"
}
figures() { # fig:group_word_problems, fig:group_word_problems_baselines, fig:s3_interpretability
  local name folders piece run
  for name in words:ranges,theory baselines:baselines,mixers,silu beyond:ranges,closure,theory,search,a5 screening:screen,six; do
    folders=()
    for piece in $(tr , ' ' <<<"${name#*:}"); do [[ -d $out/$piece/runs ]] && folders+=("$out/$piece"); done
    ((${#folders[@]})) && "$python" -m ckda.cli track --collect "${folders[@]}" --out "$out/figures/${name%%:*}"
  done
  for run in "$out"/{ranges,closure,search,a5}/runs/*ckda*.pt; do
    [[ -f $run && $run != *checkpoint* ]] && "$python" -m ckda.cli inspect track "$run" --out "$out/figures/inspect"
  done
}
keep_weights() { # the best seed of each run that is there, alone
  local run
  for run in "$out"/{counts,ranges}/runs/*ckda*.pt; do
    [[ -f $run && $run != *checkpoint* ]] || continue
    "$python" -c 'import sys; from ckda.experiments.tracking.run import keep_replica; print(keep_replica(*sys.argv[1:]))' \
      "$run" "$out/weights"
  done
}
predict() { # the horizon of what the piece trained, and of kept weights
  local kept=results/tracking new=$out/horizon/runs more=steps=6k+batch=256+momentum=0.95 runs check
  runs=("$kept"/paper/weights/S4-ckda.seed*.pt "$new"/S3-*.pt "$new"/A5-ckda+theory*.pt)
  [[ -f $out/s4/seeds-10/runs/S4-ckda+momentum=0.95.pt ]] && runs+=("$out/s4/seeds-10/runs/S4-ckda+momentum=0.95.pt")
  check=("$new/A5-ckda+orthogonal.pt" "$new"/S4-*"$more.pt" "$kept"/{counts,smoothing,settle}/weights/*.pt)
  "$python" -m ckda.cli inspect horizon "${runs[@]}" --check "${check[@]}" --length 65536 --out "$out/horizon"
}
starts() {
  mkdir -p "$out/starts"
  "$python" -c 'import sys; from ckda.experiments.tracking.figures import initialization_figure as draw
draw().savefig(sys.argv[1], dpi=160, metadata={"Software": None})' "$out/starts/initialization.png"
}
for asked in "${pieces[@]}"; do
  piece=${asked%%:*}
  groups=(S3 S4 A5)
  [[ $asked == *:* ]] && groups=("${asked#*:}")
  echo "$(date +%T) $asked"
  case $piece in
    bench) "$python" benchmarks/tracking.py --device "${DEVICE:-cuda}" --out "$out/bench" ;;
    timing) track S3 --recipe fast ;;
    theory)
      track A5 --recipe theory,theory+penalty=relations,theory+init=quaternions-begin
      track A5 --recipe theory+finish --from "$out/theory/runs/A5-ckda+theory+penalty=relations.pt" ;;
    closure)
      track S3 --recipe closed,steps=3k
      for penalty in closure closure-orthogonal closure-strong orthogonal; do
        track S3 --recipe "penalty=$penalty+steps=4k+momentum=0.95"
      done
      track S3 --recipe penalty=relations+steps=3k+momentum=0.95 ;;
    ranges) for group in "${groups[@]}"; do track "$group" --mixer ranges --together 4; done ;;
    momentum)
      for momentum in cycled 0.95; do
        track S4 --seeds 24 --momentum "$momentum" --lengths 8,16,32,64,128,256,512
        track S3 --mixer kda-beta2 --seeds 10 --momentum "$momentum" --lengths 8,16,32,64,128,256,512
      done ;;
    s4)
      for first in 10 17; do
        half=seeds-$first track S4 --momentum 0.95 --seed "$first" --seeds 7 --lengths 8,16,32,64,128,256,512
      done ;;
    beta2)
      for momentum in cycled 0.95; do
        half=seeds-3 track S3 --mixer kda-beta2 --momentum "$momentum" --seed 3 --seeds 7 --lengths 8,16,32,64,128,256,512
      done ;;
    rate) track S3 --mixer kda-beta2 --seeds 10 --lr-muon 0.005 --lengths 8,16,32,64,128,256,512 ;;
    horizon)
      track S3 --recipe closed,fast,penalty=relations+steps=3k+momentum=0.95
      track A5 --recipe theory+penalty=relations,theory
      more=steps=6k+batch=256+momentum=0.95
      track S4 --recipe "init=orthogonal-quarter+penalty=relations+$more,init=orthogonal-quarter+$more" --seeds 6
      track A5 --recipe orthogonal --seeds 6
      predict ;;
    baselines)
      for group in "${groups[@]}"; do
        silu=paper
        [[ $group == A5 ]] && silu=silu=qv
        track "$group" --mixer deltaproduct2-wide --recipe "$silu" --lengths 8,16,32,64,128,256,512
        track "$group" --mixer gru,attention --lengths 8,16,32,64,128,256,512
        track "$group" --recipe silu=k,silu=qkv --lengths 8,16,32,64,128,256,512
      done ;;
    counts)
      far=8,16,32,64,128,256,512,4096,65536
      for group in "${groups[@]}"; do
        case $group in
          S3) track S3 --recipe exact,exact+steps=8k+batch=256,exact+heads=16x4+then=settle --seeds 24 --lengths $far ;;
          S4) track S4 --recipe orthogonal+then=polish,wide+heads=48x4 --seeds 24 --lengths $far ;;
          A5) track A5 --recipe orthogonal+then=polish,wide --seeds 24 --lengths $far ;;
        esac
      done ;;
    starts) starts ;;
    weights) keep_weights ;;
    regular) track --suite regular ;;
    mixers) track S3 --mixer all --recipe steps=10k --seeds 1 --together 9 ;;
    silu) track S3 --mixer all --recipe silu=k+steps=10k --seeds 1 --together 9 ;;
    screen)
      changes=paper,silu=qkv,silu=k,init=beta-spread,init=orthogonal-half,init=orthogonal-quarter,init=orthogonal-by-input
      changes+=,curriculum=from-2,curriculum=generators-first,curriculum=involutions-first,curriculum=subgroup-first
      track S4 --recipe "$changes,penalty=homomorphism" --momentum 0.95 \
        --steps 20000 --batch 256 --seeds 6 --together 12 --lengths 8,16,32,64,128,512 ;;
    search)
      more=steps=6k+batch=256+keep=3-of-24-at-0.4+momentum=0.95
      track S4 --recipe "init=orthogonal-quarter+penalty=relations+$more,init=orthogonal-quarter+$more"
      track S4 --recipe finish --from "$out/search/runs/S4-ckda+init=orthogonal-quarter+penalty=relations+$more.pt" ;;
    six)
      more=steps=6k+batch=256+momentum=0.95
      track S4 --recipe "init=orthogonal-quarter+penalty=relations+$more,init=orthogonal-quarter+$more" --seeds 6
      track S4 --recipe finish --from "$out/six/runs/S4-ckda+init=orthogonal-quarter+penalty=relations+$more.pt" ;;
    a5)
      far() { track "$@" --lengths 8,16,32,64,128,256,512,1024,4096; }
      far A5 --recipe orthogonal --seeds 12
      far A5 --recipe curriculum=from-2+init=beta-spread+steps=15k+batch=256+heads=48x4+momentum=0.95 --seeds 24
      far S4 --recipe orthogonal --seeds 24 ;;
    figures) figures ;;
    *) echo "recipes/tracking.sh: there is no piece '$piece'" >&2; exit 2 ;;
  esac
  echo "$(date +%T) $asked: exit $?"
done
