#!/bin/sh
# Dynamo's indexer of KV events over replicas.sh: it tells how much of a prompt each replica has.
#     pip install ai-dynamo-runtime==1.6.1; pip install --no-deps ai-dynamo==1.6.1
#     curl http://127.0.0.1:8190/query -H 'content-type: application/json' -d '{"model_name": "default-model", "token_ids": [1, 2, 3]}'
set -eu
python -m dynamo.indexer --port 8190 &
trap 'kill $!' INT TERM
until curl --silent --fail --output /dev/null http://127.0.0.1:8190/workers; do sleep 0.2; done
for number in 1 2; do
    curl --silent --fail-with-body http://127.0.0.1:8190/register -H 'content-type: application/json' -d "{\"instance_id\": $number,
        \"model_name\": \"default-model\", \"block_size\": 16, \"endpoint\": \"tcp://127.0.0.1:555$number\",
        \"replay_endpoint\": \"tcp://127.0.0.1:556$number\"}"
done
wait
