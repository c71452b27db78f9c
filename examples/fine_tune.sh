#!/usr/bin/env bash
# Fine-tunes a Hugging Face model with groups that may be lost, and writes the result as a Hugging Face model.
#   examples/fine_tune.sh MODEL_DIR TEXT.jsonl OUT_DIR [FLAGS of pretrain_gpt.py, which replace those below...]
# NUM_GROUPS (2) is the number of model replicas. The result is in OUT_DIR/hf.
set -euo pipefail
model=$1 text=$2 out=$3
shift 3
mkdir -p "$out"
tokenizer=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$model")

spare-preprocess --input "$text" --output-prefix "$out/data" --append-eod "${tokenizer[@]}"
spare-convert --model-type GPT --loader hf --saver core --load-dir "$model" --save-dir "$out/core"
# The checkpoint has the flags of the model's shape; training begins at step 1 with a new optimizer.
spare-launch --num-groups "${NUM_GROUPS:-2}" --run-dir "$out/run" "$(dirname "${BASH_SOURCE[0]}")/../pretrain_gpt.py" \
  --load "$out/core" --finetune --use-checkpoint-args \
  --data-path "$out/data_text_document" --split 100,0,0 "${tokenizer[@]}" \
  --micro-batch-size 1 --global-batch-size 8 --train-iters 100 --lr 1e-5 --eval-iters 0 \
  --save "$out/trained" --save-interval 50 "$@"
spare-convert --model-type GPT --loader core --saver hf --load-dir "$out/trained" --save-dir "$out/hf"
