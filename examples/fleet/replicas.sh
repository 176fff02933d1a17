#!/bin/sh
# Two replicas of the default model on this machine, which tell a router what they cache; Ctrl-C ends them.
set -eu
for number in 1 2; do
    mistral-paged serve --port "810$number" --served-model-name default-model --pa-block-size 16 --pa-memory-mb 256 --num-threads 1 \
        --kv-events "tcp://127.0.0.1:555$number" --kv-events-replay "tcp://127.0.0.1:556$number" &
done
trap 'kill $(jobs -p)' INT TERM
wait
