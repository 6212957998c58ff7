// Torch operators around two functions of vLLM's CPU attention, so that a benchmark needs to
// compile two of its files and not all. scripts/setup_baseline_kernels.sh builds it against vLLM's
// source; nothing else uses it.
#include <omp.h>
#include <torch/all.h>
#include <torch/library.h>

#include <optional>
#include <string>

// Both are defined in csrc/cpu/cpu_attn.cpp of vLLM.
torch::Tensor get_scheduler_metadata(int64_t requests, int64_t query_heads, int64_t kv_heads,
                                     int64_t head_dim, const torch::Tensor& lengths,
                                     at::ScalarType dtype, const torch::Tensor& query_starts,
                                     bool causal, int64_t window_tokens, const std::string& isa,
                                     bool split_kv, const std::optional<torch::Tensor>& causals);
void cpu_attention_with_kv_cache(
    const torch::Tensor& q, const torch::Tensor& k, const torch::Tensor& v, torch::Tensor& out,
    const torch::Tensor& query_starts, const torch::Tensor& lengths, double scale, bool causal,
    const std::optional<torch::Tensor>& alibi_slopes, int64_t window_tokens,
    const torch::Tensor& block_table, double logit_cap, const torch::Tensor& metadata,
    const std::optional<torch::Tensor>& sinks, const std::optional<torch::Tensor>& causals,
    double k_scale, double v_scale, const std::string& kv_cache_dtype);

namespace {

// For one query of each sequence, and for as many threads as the calls will have.
at::Tensor plan(int64_t query_heads, int64_t kv_heads, int64_t head_dim, at::Tensor lengths,
                at::Tensor query_starts, std::string isa, int64_t threads) {
  omp_set_num_threads(static_cast<int>(threads));
  return get_scheduler_metadata(lengths.size(0), query_heads, kv_heads, head_dim, lengths,
                                at::kBFloat16, query_starts, true, -1, isa, true, std::nullopt);
}

void decode(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor out, at::Tensor query_starts,
            at::Tensor lengths, double scale, at::Tensor block_table, at::Tensor plan) {
  cpu_attention_with_kv_cache(q, k, v, out, query_starts, lengths, scale, true, std::nullopt, -1,
                              block_table, 0.0, plan, std::nullopt, std::nullopt, 1.0, 1.0, "auto");
}

}  // namespace

TORCH_LIBRARY(scout_benchmark_vllm, m) {
  m.def(
      "plan(int query_heads, int kv_heads, int head_dim, Tensor lengths, Tensor query_starts, "
      "str isa, int threads) -> Tensor");
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor query_starts, Tensor lengths, "
      "float scale, Tensor block_table, Tensor plan) -> ()");
  m.impl("plan", c10::kCPU, &plan);
  m.impl("decode", c10::kCPU, &decode);
}
