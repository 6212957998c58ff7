# Environment for SGLang on a machine without a GPU. To be sourced (bash or sh): . scripts/cpu_env.sh
# A variable that is already set keeps its value, but for CUDA_VISIBLE_DEVICES. With an NVIDIA GPU only the harmless
# part is set; SCOUT_FORCE_CPU=1 asks for the CPU all the same.

export TOKENIZERS_PARALLELISM="${TOKENIZERS_PARALLELISM:-false}"

# Without an RDMA device mooncake can only use TCP; its default is rdma, which then fails at start.
if [ ! -d /sys/class/infiniband ] || [ -z "$(ls -A /sys/class/infiniband 2>/dev/null)" ]; then
    export MOONCAKE_PROTOCOL="${MOONCAKE_PROTOCOL:-tcp}"
fi

if [ "${SCOUT_FORCE_CPU:-0}" = 1 ] || [ ! -e /dev/nvidiactl ]; then
    # Chooses SGLang's CPU platform. Without it RoPE asks for vLLM's kernels and the server dies at start.
    export SGLANG_USE_CPU_ENGINE="${SGLANG_USE_CPU_ENGINE:-1}"
    # Where torch sees a GPU, SGLang's layers take their CUDA kernels, whatever --device says.
    export CUDA_VISIBLE_DEVICES=
    # Two servers and a worker share the cores. OpenMP threads that spin at the end of each parallel region
    # take them from whoever has work.
    export OMP_WAIT_POLICY="${OMP_WAIT_POLICY:-PASSIVE}"
    # A newer SGLang loads the driver's library; scripts/no_driver.sh makes one that says that there is no device.
    _no_driver="${VIRTUAL_ENV:-$PWD/.venv}/lib/no-driver"
    case ":${LD_LIBRARY_PATH:-}:" in
    *":$_no_driver:"*) ;;
    *) [ ! -d "$_no_driver" ] || export LD_LIBRARY_PATH="$_no_driver${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}" ;;
    esac
    # With --tp-size SGLang opens NCCL where it finds it, and needs a GPU for it. This names no file, and SGLang
    # goes on with gloo.
    export SGLANG_NCCL_SO_PATH="${SGLANG_NCCL_SO_PATH:-no-gpu}"
fi
