// Images on their way into a convolution: codes as its kernels read them (cuda/cuda.h: of all other quantisers).
#pragma once
#include "cuda/cuda.h"

namespace pyquant::cuda {

struct Images {
  const void* data = nullptr;
  DType type = DType::f32;  // f32, f16, bf16; s8: codes already
  int64_t batch = 0, channels = 0, height = 0, width = 0;
  bool channels_last = false;  // [batch][height][width][channels], else [batch][channels][height][width]; dense
  int64_t numbers() const { return channels * height * width; }  // of one image
};

// Codes as [batch][top + height + bottom][left + width + right][channels], with the zero point of the image around it.
struct ImagesOut {
  int8_t* q = nullptr;
  int64_t padding[4] = {0, 0, 0, 0};  // top, bottom, left, right
  // What a product reads of each of its rows, `rows` to an image: the step of the image. null: not written.
  float* row_scale = nullptr;
  int32_t* row_zero_point = nullptr;
  int64_t rows = 0;
  Zeros zeros{};  // as of QuantizeOut
};

// scale, zero_point: [batch], or [1] where all images have one; zero_point may be null (0). Codes are moved as they
// are.
void quantize_images(const Images& x, const float* scale, const int32_t* zero_point, bool is_shared,
                     const CodeRange& range, const ImagesOut& out, const Context& context);
// One scale an image, of its own range. workspace: so many bytes.
int64_t images_workspace_bytes(const Images& x);
void quantize_images_dynamic(const Images& x, const CodeRange& range, const ImagesOut& out, void* workspace,
                             const Context& context);

// Rows of x that lie in images (ImageRows), written one after another: q [m, ldq], zero from column k on.
void gather_patches(const int8_t* images, const ImageRows& rows, int64_t m, int64_t k, int8_t* q, int64_t ldq,
                    const Context& context);

// A convolution whose output channels are divided into groups, each of which reads channels of its own: problem.k and
// problem.image.channels are those of one group, whose first channel lies so many codes behind that of the group
// before. Any s8 or s4 weights in natural order, any group scales and steps; f32, f16, bf16 or s8 out.
void grouped_conv(const GemmProblem& problem, int64_t groups, const GemmOperands& operands, const Epilogue& epilogue,
                  const Context& context);

}  // namespace pyquant::cuda
