#!/bin/sh
# vLLM's router (pip install vllm-router==0.1.17) in front of replicas.sh, at http://127.0.0.1:8100/v1: a prompt goes where most of it
# is cached, by KV events, and the turns of a conversation whose requests have the same header x-session-id go to one replica.
set -eu
exec vllm-router --host 127.0.0.1 --port 8100 --policy kv_aware --kv-aware-session-affinity-ttl-secs 600 \
    --kv-event-model default-model --kv-event-block-size 16 \
    --worker-urls http://127.0.0.1:8101 http://127.0.0.1:8102 --worker-startup-check-interval 1 \
    --kv-event-source http://127.0.0.1:8101=tcp://127.0.0.1:5551 --kv-event-replay-source http://127.0.0.1:8101=tcp://127.0.0.1:5561 \
    --kv-event-source http://127.0.0.1:8102=tcp://127.0.0.1:5552 --kv-event-replay-source http://127.0.0.1:8102=tcp://127.0.0.1:5562
