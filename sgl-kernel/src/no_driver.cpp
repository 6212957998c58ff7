// The one function of libcuda.so.1 that SGLang's kernels link with.
extern "C" __attribute__((visibility("default"))) int cuPointerGetAttribute() {
  return 100;  // CUDA_ERROR_NO_DEVICE
}
