# Environment for SGLang on a machine without a GPU. To be sourced (bash or sh): . scripts/cpu_env.sh
# Variables that are already set keep their values, except CUDA_VISIBLE_DEVICES. With an NVIDIA GPU only the harmless
# part is set; SCOUT_FORCE_CPU=1 forces the CPU.

export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# Without an RDMA device mooncake can only use TCP; its default, rdma, then fails at start.
if [ ! -d /sys/class/infiniband ] || [ -z "$(ls -A /sys/class/infiniband 2>/dev/null)" ]; then
    export MOONCAKE_PROTOCOL="${MOONCAKE_PROTOCOL:-tcp}"
fi

if [ "${SCOUT_FORCE_CPU:-0}" = 1 ] || [ ! -e /dev/nvidiactl ]; then
    # Chooses SGLang's CPU platform. Without it RoPE asks for vLLM's kernels and the server dies at start.
    export SGLANG_USE_CPU_ENGINE="${SGLANG_USE_CPU_ENGINE:-1}"
    # Where torch sees a GPU, SGLang's layers take their CUDA kernels, whatever --device says.
    export CUDA_VISIBLE_DEVICES=
    # Two servers and CPU attention share the cores. OpenMP threads that spin at the end of each parallel region
    # would take them from threads with work.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    # With --tp-size SGLang loads NCCL if it finds it, and then needs a GPU. This path does not exist, so SGLang
    # falls back to gloo.
    export SGLANG_NCCL_SO_PATH="${SGLANG_NCCL_SO_PATH:-no-gpu}"
fi
