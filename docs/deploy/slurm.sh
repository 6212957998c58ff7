#!/usr/bin/env bash
# A prefill and a decode server on two nodes with a GPU each, and the router on the first node. In the root of the
# repository: sbatch docs/deploy/slurm.sh MODEL. With pyxis, srun --container-image can use the image of
# docs/deploy/Dockerfile instead of .venv.
#SBATCH --job-name=scout --nodes=2 --ntasks-per-node=1 --gpus-per-node=1 --exclusive --mem=0 --signal=B:TERM@60
set -euo pipefail
MODEL="${1:?the folder of a model}"
source .venv/bin/activate
ulimit -l unlimited
mapfile -t NODE < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
trap 'kill $(jobs -p); wait' TERM EXIT

srun --nodes=1 --nodelist="${NODE[0]}" python -m sglang.launch_server --model-path "$MODEL" \
    --host 0.0.0.0 --port 30000 --disaggregation-mode prefill --disaggregation-bootstrap-port 8998 \
    --disaggregation-transfer-backend mooncake --enable-metrics --kv-offload scout &
srun --nodes=1 --nodelist="${NODE[1]}" python -m sglang.launch_server --model-path "$MODEL" \
    --host 0.0.0.0 --port 30001 --disaggregation-mode decode \
    --disaggregation-transfer-backend mooncake --enable-metrics --kv-offload scout --kv-offload-host-gb 400 &
python -m sglang_router.launch_router --pd-disaggregation --host 0.0.0.0 --port 30002 \
    --prefill "http://${NODE[0]}:30000" 8998 --decode "http://${NODE[1]}:30001" &
wait -n
