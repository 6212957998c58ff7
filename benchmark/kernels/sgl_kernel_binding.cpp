// A torch operator around one function of SGLang's CPU kernels, so that a benchmark needs to
// compile one of their files and not all. scripts/setup_baseline_kernels.sh builds it against SGLang's
// source; nothing else uses it.
#include <ATen/ATen.h>
#include <omp.h>
#include <torch/library.h>

#include <optional>

// Defined in sgl-kernel/csrc/cpu/decode.cpp of SGLang.
void decode_attention_cpu(at::Tensor& q, at::Tensor& k, at::Tensor& v, at::Tensor& out,
                          const std::optional<at::Tensor>& new_k,
                          const std::optional<at::Tensor>& new_v, at::Tensor& new_location,
                          at::Tensor& partial, at::Tensor& token_table, at::Tensor& rows,
                          at::Tensor& lengths, double scale, double logit_cap, bool cross_attention,
                          int64_t window_tokens, std::optional<at::Tensor> encoder_lengths,
                          std::optional<at::Tensor> sinks);

namespace {

// threads: of the OpenMP library that this file is linked to, which need not be torch's own copy.
void decode(at::Tensor q, at::Tensor k, at::Tensor v, at::Tensor out, at::Tensor partial,
            at::Tensor token_table, at::Tensor rows, at::Tensor lengths, double scale,
            int64_t threads) {
  omp_set_num_threads(static_cast<int>(threads));
  decode_attention_cpu(q, k, v, out, std::nullopt, std::nullopt, rows, partial, token_table, rows,
                       lengths, scale, 0.0, false, -1, std::nullopt, std::nullopt);
}

}  // namespace

TORCH_LIBRARY(scout_benchmark_sgl_kernel, m) {
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor(a!) out, Tensor(b!) partial, Tensor "
      "token_table, "
      "Tensor rows, Tensor lengths, float scale, int threads) -> ()");
  m.impl("decode", c10::kCPU, &decode);
}
